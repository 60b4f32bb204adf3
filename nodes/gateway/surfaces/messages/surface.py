"""POST /v1/messages: a chat whose answers are Anthropic's messages; and what /v1/messages/count_tokens counts."""

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

from msgspec.structs import replace
from typing_extensions import override

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import ended
from nodes.gateway.answers.sse import Writer
from nodes.gateway.answers.surface import Surface
from nodes.gateway.errors import ApiError, ErrorForm
from nodes.gateway.jobs.answer_events import merged
from nodes.gateway.jobs.answer_parts import parts_of
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.parsers.events import Event
from nodes.gateway.requests.events import End, Tokens
from nodes.gateway.surfaces.messages.answer import stop_reason_of, usage_of
from nodes.gateway.surfaces.messages.errors import ANTHROPIC_ERRORS
from nodes.gateway.surfaces.messages.reading import MessagesReader
from nodes.gateway.surfaces.messages.translation import NAMES, hides_thinking
from nodes.gateway.surfaces.messages.types import (
    CountTokensBody,
    MessageAnswer,
    MessagesBody,
    MessageUsage,
    StopReason,
)
from nodes.gateway.surfaces.messages.writer import PING, MessageEvents, content_of
from nodes.protocol import Prepare

_BODIES: Final = MessagesReader(MessagesBody)
_COUNTED: Final = MessagesReader(CountTokensBody)


class _Own(NamedTuple):
    """What an answer needs of its body: how many tokens were allowed, and whether reasoning is not shown."""

    max_tokens: int
    hides_thinking: bool


class _End(NamedTuple):
    """How an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


class MessagesSurface(Surface[_Own]):
    """One sample; it may end early where the context does."""

    path: ClassVar[str] = "/v1/messages"
    id_prefix: ClassVar[str] = "msg_"
    errors: ClassVar[ErrorForm] = ANTHROPIC_ERRORS

    @override
    def read(self, validator: Validator, data: bytes, request_id: str) -> Job[_Own]:
        body, conversation, options = _BODIES.read(data)
        assert isinstance(body, MessagesBody)
        job = validator.converse(conversation, options, request_id, names=NAMES)
        return job._replace(
            own=_Own(body.max_tokens, hides_thinking(body)),
            fits_max_tokens=True,
            tokens=job.tokens._replace(hides_output=body.max_tokens == 0),
        )

    def counted(self, validator: Validator, data: bytes, request_id: str) -> tuple[Prepare, list[str]]:
        """What to ask a tokenizer to count the tokens of a prompt, and the unknown fields. Raises `BadRequest`."""
        _, conversation, options = _COUNTED.read(data)
        job = validator.converse(conversation, options, request_id, names=NAMES)
        return replace(job.prepare, asks=[], words=[], checks=[], route=False), job.unknown_fields

    @override
    def whole(self, answering: Answering[_Own]) -> MessageAnswer:
        [(piece, _)] = ended(answering.generation)
        assert piece.end is not None
        head, own, parts = answering.head, answering.job.own, parts_of(answering.events(piece))
        content = content_of(parts, lambda index: _call_id(answering, index), hides_thinking=own.hides_thinking)
        end = _end_of(answering, piece.end)
        return MessageAnswer(id=head.id, model=head.model, content=content, **end._asdict())

    @override
    def writer(self, answering: Answering[_Own]) -> Writer:
        return _MessageWriter(answering)


MESSAGES: Final = MessagesSurface()


def _call_id(answering: Answering[_Own], index: int) -> str:
    """As Anthropic's begin, except for templates that take no such ids."""
    found = answering.call_id(0, index)
    return f"toolu_{found.removeprefix('call_')}" if found.startswith("call_") else found


def _end_of(answering: Answering[_Own], end: End) -> _End:
    sample, job = answering.generation.output.samples[0], answering.job
    stop = end.stop if isinstance(end.stop, str) else None
    reason = stop_reason_of(
        end.finish_reason or "",
        has_calls=answering.num_calls(0) > 0,
        stop_sequence=stop,
        num_output_tokens=sample.num_tokens,
        max_tokens=job.own.max_tokens,
    )
    usage = usage_of(answering.generation.num_prompt_tokens[0], end.num_cached_tokens, sample.num_tokens)
    return _End(reason, stop if reason == "stop_sequence" else None, usage)


class _MessageWriter(Writer):
    ping = PING

    def __init__(self, answering: Answering[_Own]) -> None:
        head = answering.head
        self._answering = answering
        self._events = MessageEvents(
            head.id,
            head.model,
            lambda index: _call_id(answering, index),
            hides_thinking=answering.job.own.hides_thinking,
        )
        self._end: End | None = None

    @override
    def start(self) -> bytes:
        return self._events.start(self._answering.generation.num_prompt_tokens[0])

    @override
    def text(self, number: int, text: str, end: End | None, tokens: Tokens | None) -> bytes:
        self._end = end
        return self._events.text(text) if text else b""

    @override
    def piece(self, number: int, events: Sequence[Event], end: End | None, tokens: Tokens | None) -> bytes:
        self._end = end
        return self._events.events(merged(events))

    @override
    def finish(self) -> bytes:
        assert self._end is not None
        return self._events.end(*_end_of(self._answering, self._end))

    @override
    def error(self, error: ApiError) -> bytes:
        return ANTHROPIC_ERRORS.event(error, self._answering.head.id)
