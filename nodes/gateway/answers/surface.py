"""What a surface is: a route that generates, with its forms of bodies, answers and errors. One file or folder each.

Below a surface everything is a conversation or a prompt: `read` makes a `Job` of the body, by way of
`Validator.converse` or `complete` if it has another form than OpenAI's. What comes back are pieces of samples, taken
apart into the events of `parsers/events.py` where the model or the call has reasoning or tools
(`jobs/answer_events.py`), and these make the parts of an answer (`jobs/answer_parts.py`).
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.sse import Writer
from nodes.gateway.errors import OPENAI_ERRORS, ErrorForm
from nodes.gateway.jobs.validation import Job, Own, Validator


class Surface(Protocol[Own]):
    """One route. `id_prefix` begins the ids of its requests; `chunk_object` is in chunks of OpenAI's form."""

    path: ClassVar[str]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str] = ""
    errors: ClassVar[ErrorForm] = OPENAI_ERRORS

    def read(self, validator: Validator, data: bytes, request_id: str) -> Job[Own]:
        """A body as what is to be done; `Job.own` may keep what the answer needs of it. Raises `ApiError`, in which
        `param` is a field of this surface.
        """
        ...

    def whole(self, answering: Answering[Own]) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The answer to a call whose samples have all ended; takes what is in its output."""
        ...

    def writer(self, answering: Answering[Own]) -> Writer:
        """What writes a streamed answer."""
        ...
