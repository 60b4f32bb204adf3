"""What a surface is: a route that generates, with its forms of bodies, answers and errors. One file or folder each.

Below a surface everything is a chat or a prompt: `read` makes a `Job` of the body, by way of `Validator.chat` if the
body can be said as one of a chat. What comes back are pieces of samples, taken apart into the events of
`parsers/events.py` where the model or the call has reasoning or tools (`answers.py`).
"""

from typing import ClassVar, NamedTuple, Protocol

import msgspec

from nodes.gateway.answers import Answers, Joined
from nodes.gateway.errors import OPENAI_ERRORS, ErrorForm
from nodes.gateway.outputs import Generation, Piece
from nodes.gateway.responses import Head
from nodes.gateway.sse import Writer
from nodes.gateway.token_details import TokenDetails
from nodes.gateway.validation import Job, Validator


class Answering(NamedTuple):
    """All that an answer is made of. `answers` None: texts are shown as they come."""

    head: Head
    job: Job
    generation: Generation
    details: TokenDetails
    answers: Answers | None = None

    def joined(self, piece: Piece) -> Joined:
        """The whole answer of a sample that has ended, whose only piece this is."""
        return Joined(piece.text) if self.answers is None else self.answers.joined(piece.number, piece.text)

    def call_id(self, number: int, index: int) -> str:
        """The id of a call of a sample; there are none without `answers`."""
        assert self.answers is not None, "texts that are not taken apart have no calls"
        return self.answers.call_id(number, index)

    def num_calls(self, number: int) -> int:
        """Whole calls of tools in a sample so far."""
        return 0 if self.answers is None else self.answers.samples[number].num_calls


class Surface(Protocol):
    """One route. `id_prefix` begins the ids of its requests; the `_object`s are names in its answers."""

    path: ClassVar[str]
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    errors: ClassVar[ErrorForm] = OPENAI_ERRORS

    def read(self, validator: Validator, data: bytes, request_id: str) -> Job:
        """A body as what is to be done; `Job.own` may keep what the answer needs of it. Raises `ApiError`, in which
        `param` is a field of this surface.
        """
        ...

    def whole(self, answering: Answering) -> msgspec.Struct:
        """The answer to a call whose samples have all ended; takes what is in its output."""
        ...

    def writer(self, answering: Answering) -> Writer:
        """What writes a streamed answer."""
        ...
