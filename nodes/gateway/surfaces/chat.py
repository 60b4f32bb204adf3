"""POST /v1/chat/completions: its whole answers and its chunks."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET
from typing_extensions import override

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import ended, extension_of, total_usage
from nodes.gateway.answers.sse import ENCODE, ChunkWriter
from nodes.gateway.answers.surface import Surface
from nodes.gateway.answers.token_details import TokenDetails
from nodes.gateway.fields.openai_types import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ToolCall,
)
from nodes.gateway.jobs.answer_events import merged
from nodes.gateway.jobs.answer_parts import Answer, Began, More, Part, parts_of
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.parsers.events import CallBegin, Event, Reasoning, Text
from nodes.gateway.requests.events import End, Tokens


class ChatSurface(Surface):
    """Answers are messages; the token that ends one is not part of it."""

    path: ClassVar[str] = "/v1/chat/completions"
    id_prefix: ClassVar[str] = "chatcmpl-"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    @override
    def read(self, validator: Validator, data: bytes, request_id: str) -> Job:
        return validator.chat(data, request_id)

    @override
    def whole(self, answering: Answering) -> ChatCompletion:
        head, details = answering.head, answering.details
        choices: list[ChatChoice] = []
        for piece, reason in ended(answering.generation):
            stop = details.stop_of(piece.end)
            message = _message(answering, piece.number, parts_of(answering.events(piece)))
            choices.append(
                ChatChoice(
                    index=piece.number,
                    message=message,
                    finish_reason=_finish_reason(answering, piece.number, reason),
                    logprobs=_logprobs(piece.tokens, reason, details),
                    token_ids=details.ids_of(piece.tokens),
                    stop_reason=UNSET if stop is None else stop.stop_reason,
                    matched_stop=UNSET if stop is None else stop.matched_stop,
                )
            )
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=total_usage(answering.generation, answering.answers),
            sglext=extension_of(answering.generation) if answering.job.tokens.cached else UNSET,
            # All samples have one prompt.
            prompt_token_ids=details.prompt_ids_of(0),
            prompt_logprobs=details.prompt_logprobs_of(0),
        )

    @override
    def writer(self, answering: Answering) -> ChunkWriter:
        return _ChatChunks(answering)


CHAT = ChatSurface()


class _ChatChunks(ChunkWriter):
    before_text = b'"delta":{"content":'
    after_text = b"}"

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering)
        self._answering = answering
        self._said = [Answer() for _ in range(self.num_samples)]
        # Tokens of pieces that showed nothing, such as marks: they go with the next one that does.
        self._held: dict[int, Tokens] = {}

    @override
    def start(self) -> bytes:
        """A message has a role before it has text; the first of these events says what the prompt was."""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = self.prompt_ids(0)
        return b"".join(
            self.opening
            + b'{"index":%d,' % index
            + role
            + (b"" if index else prompt)
            + self.ending_of(index, is_first=True)
            for index in range(self.num_samples)
        )

    @override
    def piece(self, number: int, events: Sequence[Event], end: End | None, tokens: Tokens | None) -> bytes:
        deltas = [b'"delta":' + ENCODE(delta) for delta in self._deltas(number, events)]
        tokens = self._with_held(number, tokens)
        if not deltas and end is None:
            if tokens is not None:
                self._held[number] = tokens
            return b""
        reason = end and end.finish_reason
        logprobs = ENCODE(self.logprobs(number, tokens, reason))
        deltas = deltas or [b'"delta":{"content":""}']
        chunks: list[bytes] = []
        # Tokens go with the first of the piece, its end with the last.
        for at, delta in enumerate(deltas):
            is_last = at == len(deltas) - 1
            told = _finish_reason(self._answering, number, reason) if is_last and reason else None
            more = self.more(number, None if at else tokens, end if is_last else None)
            chunks.append(self.chunk(number, delta, b"null" if at else logprobs, told, more))
        return b"".join(chunks)

    def _deltas(self, number: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        is_legacy = self._answering.job.tools.is_legacy
        for step in self._said[number].feed(merged(events)):
            match step:
                case More(Part(kind=kind), text) if kind is Text:
                    yield {"content": text}
                case More(Part(kind=kind), text) if kind is Reasoning:
                    yield {"reasoning": text, "reasoning_content": text}
                case Began(Part(kind=kind, name=name)) if kind is CallBegin and is_legacy:
                    yield {"function_call": {"name": name, "arguments": ""}}
                case More(_, text) if is_legacy:
                    yield {"function_call": {"arguments": text}}
                case Began(Part(kind=kind, name=name, call_index=index)) if kind is CallBegin:
                    call_id = self._answering.call_id(number, index)
                    function = {"name": name, "arguments": ""}
                    yield {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
                case More(Part(call_index=index), text):
                    yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
                case _:
                    pass

    def _with_held(self, number: int, tokens: Tokens | None) -> Tokens | None:
        held = self._held.pop(number, None)
        if held is None or tokens is None:
            return held or tokens
        return Tokens(held.ids + tokens.ids, held.extras + tokens.extras, tokens.num_past)

    @override
    def logprobs(self, number: int, tokens: Tokens | None, finish_reason: str | None) -> msgspec.Struct | None:
        found = _logprobs(tokens, finish_reason, self.details)
        # An event for the end alone has none.
        return found if found is not None and found.content else None


def _message(answering: Answering, number: int, parts: Sequence[Part]) -> AssistantMessage:
    calls = [
        ToolCall(
            id=answering.call_id(number, part.call_index),
            function=CalledFunction(name=part.name, arguments=part.text),
        )
        for part in parts
        if part.kind is CallBegin and part.whole
    ]
    text, reasoning = ("".join(part.text for part in parts if part.kind is kind) for kind in (Text, Reasoning))
    reasoning = reasoning or UNSET
    is_legacy = answering.job.tools.is_legacy
    return AssistantMessage(
        content=text or None if calls else text,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls if calls and not is_legacy else UNSET,
        function_call=calls[0].function if calls and is_legacy else UNSET,
    )


def _finish_reason(answering: Answering, number: int, reason: str) -> str:
    use = answering.job.tools
    if reason != "stop" or use.mode == "named" or not answering.num_calls(number):
        return reason
    return "function_call" if use.is_legacy else "tool_calls"


def _logprobs(tokens: Tokens | None, finish_reason: str | None, details: TokenDetails) -> ChatLogprobs | None:
    return ChatLogprobs(content=details.logprobs_of(tokens, finish_reason)) if details.reads_logprobs else None
