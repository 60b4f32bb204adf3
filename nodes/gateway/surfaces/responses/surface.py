"""POST /v1/responses: a chat in another form, answered as items. See `translation.py` and `writer.py`."""

import time
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from typing_extensions import override

from nodes.gateway.answers.responses import ended, total_usage
from nodes.gateway.answers.sse import Writer
from nodes.gateway.answers.surface import Answering, Surface
from nodes.gateway.errors import ApiError, Internal, unsupported
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.parsers.events import Event, Text
from nodes.gateway.requests.events import End, Tokens
from nodes.gateway.surfaces.responses.alignment import TokenAlignment
from nodes.gateway.surfaces.responses.answer import RESPONSE_ID_PREFIX, Response
from nodes.gateway.surfaces.responses.echo import first_response
from nodes.gateway.surfaces.responses.kept import Keeping
from nodes.gateway.surfaces.responses.tools import ToolTable
from nodes.gateway.surfaces.responses.translation import NAMES, Asked, Translated, read, translate
from nodes.gateway.surfaces.responses.writer import Found, ResponseWriter


class OfResponse(NamedTuple):
    """What the answer needs of the call: `Job.own`. `keeping` None: the response is not kept."""

    asked: Asked
    tools: ToolTable
    keeping: Keeping | None = None


def job_of(
    asked: Asked, translated: Translated, validator: Validator, request_id: str, keeping: Keeping | None = None
) -> Job[OfResponse]:
    """Raises `ApiError`, in which `param` is a field of the response."""
    conversation, options, tools = translated
    job = validator.converse(conversation, options, request_id, names=NAMES)
    return job._replace(own=OfResponse(asked, tools, keeping))


class ResponsesSurface(Surface[OfResponse]):
    """One sample of a chat, as items."""

    path: ClassVar[str] = "/v1/responses"
    id_prefix: ClassVar[str] = RESPONSE_ID_PREFIX

    @override
    def read(self, validator: Validator, data: bytes, request_id: str) -> Job[OfResponse]:
        """Where nothing is kept."""
        asked = read(data)
        if asked.body.previous_response_id is not None:
            message = (
                "'previous_response_id' is not supported by this server, which keeps no responses. Send the whole "
                "conversation as 'input', or have the operator start it with `--responses-store BYTES`."
            )
            raise unsupported(message, "previous_response_id")
        return job_of(asked, translate(asked), validator, request_id)

    @override
    def whole(self, answering: Answering[OfResponse]) -> Response:
        return ResponseStream(answering).whole()

    @override
    def writer(self, answering: Answering[OfResponse]) -> "ResponseStream":
        return ResponseStream(answering)


RESPONSES = ResponsesSurface()


class ResponseStream(Writer):
    """The stream of one response; `response` is all of it, once its sample has ended."""

    def __init__(self, answering: Answering[OfResponse]) -> None:
        own = answering.job.own
        head, self._keeping = answering.head, own.keeping
        self.response = first_response(
            own.asked,
            head.id if self._keeping is None else self._keeping.kept.name(head.id),
            created=head.created,
            model=head.model,
            sampling=answering.job.sampling,
            is_kept=self._keeping is not None,
        )
        self._answering, self._details = answering, answering.details
        self._writer = ResponseWriter(
            self.response,
            own.tools,
            lambda index: answering.call_id(0, index),
            seals_reasoning=own.asked.seals_reasoning,
        )
        self._reads_logprobs = self._details.reads_logprobs
        # Where the text is the model's, all of its tokens go with it.
        self._alignment = TokenAlignment() if answering.answers is not None and self._reads_logprobs else None

    def whole(self) -> Response:
        """The response to a call that has ended, of whose output nothing was written."""
        ((piece, _),) = ended(self._answering.generation)
        self.piece(0, self._answering.events(piece), piece.end, piece.tokens)
        return self.response

    @override
    def start(self) -> bytes:
        return self._writer.start()

    @override
    def text(self, number: int, text: str, end: End | None, tokens: Tokens | None) -> bytes:
        if end is None and not self._reads_logprobs:
            return self._writer.text(text)
        return super().text(number, text, end, tokens)

    @override
    def piece(self, number: int, events: Sequence[Event], end: End | None, tokens: Tokens | None) -> bytes:
        reason = None if end is None else end.finish_reason
        data = self._writer.piece(self._found(events, reason, tokens))
        if reason is None:
            return data
        data += self._writer.close(reason)
        usage = total_usage(self._answering.generation, self._answering.answers)
        self.response = self._writer.ended(reason, usage, int(time.time()))
        return data

    def _found(self, events: Sequence[Event], reason: str | None, tokens: Tokens | None) -> Iterable[Found]:
        if not self._reads_logprobs:
            return map(Found, events)
        drawn = self._details.logprobs_of(tokens, reason)
        if self._alignment is not None:
            self._alignment.add(drawn)
            return [Found(event, self._alignment.take(event)) for event in events]
        if drawn and not events:
            return [Found(Text(""), drawn)]
        return [Found(event, drawn) for event in events]

    @override
    async def settle(self) -> None:
        if self._keeping is not None:
            self.response = await self._keeping.keep(self.response)

    @override
    def finish(self) -> bytes:
        return self._writer.end(self.response)

    @override
    def error(self, error: ApiError) -> bytes:
        # After a fault of this gateway nothing is known of the response.
        is_fault = isinstance(error, Internal) and error.code == Internal.code
        return self._writer.error(error) if is_fault else self._writer.failed(error)
