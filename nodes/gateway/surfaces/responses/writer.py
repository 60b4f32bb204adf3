"""The items of a response, and the events of its stream: `event: response.…` with `data: {…}`, numbered from 0. Pure.

    created, in_progress, for each item output_item.added … output_item.done, completed | incomplete | failed

Whole and streamed answers have their items from here, so they are the same. Each piece of text costs the encoding of it
and a join; what surrounds it is encoded once for each message.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from nodes.gateway.answers.sse import ENCODE
from nodes.gateway.errors import ApiError
from nodes.gateway.fields.openai_types import DrawnTokenLogprob, Usage
from nodes.gateway.jobs.answer_parts import Answer, Began, Ended, More, Part, Step
from nodes.gateway.parsers.events import CallEnd, Event, Reasoning, Text
from nodes.gateway.requests.events import ABORT
from nodes.gateway.surfaces.responses.answer import (
    RESPONSE_ID_PREFIX,
    CustomToolCall,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)
from nodes.gateway.surfaces.responses.custom_input import CustomInput
from nodes.gateway.surfaces.responses.history import seal
from nodes.gateway.surfaces.responses.tools import ToolTable

CallId = Callable[[int], str]
"""The id of a sample's call by its index."""

_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of a response that failed, by status; the others are `server_error`."""


class Found(NamedTuple):
    """What a parser found, and for text the tokens of it, if logprobs were asked for."""

    event: Event
    logprobs: Sequence[DrawnTokenLogprob] = ()


class ResponseWriter:
    """Events of one response as bytes. `response` is what is known of it at the beginning.

    A response that is not streamed is made in the same way, and its bytes are dropped.
    """

    def __init__(self, response: Response, tools: ToolTable, call_id: CallId, *, seals_reasoning: bool = False) -> None:
        self._response = response
        self._tools = tools
        self._call_id = call_id
        self._seals = seals_reasoning
        self._answer = Answer()
        self._items: list[Item] = []
        self._logprobs: list[DrawnTokenLogprob] = []
        self._custom = CustomInput()
        self._number = 0
        self._events: list[bytes] = []
        self._written = ""
        self._delta: tuple[bytes, bytes] = (b"", b"")
        self._was_broken = False

    def start(self) -> bytes:
        """The first events, before there is output."""
        self._add("created", {"response": self._response})
        self._add("in_progress", {"response": self._response})
        return self._flush()

    def piece(self, found: Iterable[Found]) -> bytes:
        """Whatever came with a piece of the sample."""
        for event, logprobs in found:
            if isinstance(event, Text) and self._was_broken:
                # That of a call that went wrong, which is an item already.
                self._was_broken = False
                continue
            self._was_broken = self._was_broken or (isinstance(event, CallEnd) and not event.whole)
            for step in self._answer.feed([event]):
                self._take(step, logprobs)
        return self._flush()

    def text(self, text: str) -> bytes:
        """More of the message, where an answer is nothing else."""
        if not self._items:
            return self.piece([Found(Text(text))])
        # One comes with every token: a third of the time of a step.
        self._answer.parts[-1].pieces.append(text)
        self._text(text, ())
        return self._flush()

    def close(self, finish_reason: str) -> bytes:
        """The sample has ended: so have all items."""
        self._close(_item_status(finish_reason))
        return self._flush()

    def ended(self, finish_reason: str, usage: Usage, now: int) -> Response:
        """The whole response, once closed."""
        status = _item_status(finish_reason)
        return replace(
            self._response,
            status=status,
            completed_at=now,
            # OpenAI's clients know no reason for one that was aborted.
            incomplete_details=IncompleteDetails() if finish_reason == "length" else None,
            output=self._items,
            usage=_usage(usage),
        )

    def end(self, response: Response) -> bytes:
        """The last event."""
        self._add(response.status, {"response": response})
        return self._flush()

    def failed(self, error: ApiError) -> bytes:
        """The last event of a response that broke: what came of it, and why there is no more."""
        number = self._number
        self._close("incomplete")
        # Nobody is told that items are done: agents run calls that are.
        self._events.clear()
        self._number = number
        code: Any = _CODES.get(error.status, "server_error")
        said = ResponseError(code=code, message=error.message, type=error.code or error.type, param=error.param)
        broken = replace(self._response, status="failed", error=said, output=self._items)
        self._add("failed", {"response": broken})
        return self._flush()

    def error(self, error: ApiError) -> bytes:
        """The last event where this server does not know what became of the response."""
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + ENCODE({**said, "sequence_number": self._number}) + b"\n\n"

    def _close(self, status: ItemStatus) -> None:
        """Ends the last item; what ended before it is complete. A response without any has an empty message."""
        if not self._items:
            self._take(next(self._answer.feed([Text("")])))
        for step in self._answer.close():
            self._end(step.part, status)

    def _take(self, step: Step, logprobs: Sequence[DrawnTokenLogprob] = ()) -> None:
        match step:
            case Began(part):
                self._begin(part)
            case More(part, text) if part.kind is Text:
                self._text(text, logprobs)
            case More(part, text) if part.kind is Reasoning:
                self._tell("reasoning_text.delta", content_index=0, delta=text)
            case More(_, text) if isinstance(self._items[-1], CustomToolCall):
                self._custom_text(self._custom.feed(text))
            case More(_, text):
                self._tell("function_call_arguments.delta", delta=text)
            case Ended(part):
                self._end(part, "completed" if part.whole else "incomplete")

    def _begin(self, part: Part) -> None:
        self._logprobs, self._custom = [], CustomInput()
        if part.kind is Text:
            said: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._add_item(OutputMessage(id=self._id_of("msg", part)))
            self._tell("content_part.added", content_index=0, part=said)
        elif part.kind is Reasoning:
            self._add_item(ReasoningItem(id=self._id_of("rs", part)))
            self._tell("content_part.added", content_index=0, part={"type": "reasoning_text", "text": ""})
        else:
            tool = self._tools.name_of(part.name)
            item = CustomToolCall if tool.is_custom else FunctionCall
            self._add_item(
                item(
                    id=self._id_of("ctc" if tool.is_custom else "fc", part),
                    call_id=self._call_id(part.call_index),
                    name=tool.name,
                    namespace=UNSET if tool.namespace is None else tool.namespace,
                )
            )

    def _id_of(self, prefix: str, part: Part) -> str:
        """The same for the same place in the same response, however often it is made again."""
        return f"{prefix}_{self._response.id.removeprefix(RESPONSE_ID_PREFIX)}_{part.index}"

    def _add_item(self, item: Item) -> None:
        self._items.append(item)
        self._add("output_item.added", {"output_index": len(self._items) - 1, "item": item})

    def _end(self, part: Part, status: ItemStatus) -> None:
        item, text = self._items[-1], part.text
        match item:
            case OutputMessage():
                item.content = [OutputText(text=text, logprobs=self._logprobs)]
                self._tell("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
                self._tell("content_part.done", content_index=0, part=item.content[0])
            case ReasoningItem():
                item.content, item.encrypted_content = [ReasoningText(text=text)], seal(text) if self._seals else UNSET
                self._tell("reasoning_text.done", content_index=0, text=text)
                self._tell("content_part.done", content_index=0, part=item.content[0])
            case FunctionCall():
                item.arguments = text
                self._tell("function_call_arguments.done", name=item.name, arguments=text)
            case CustomToolCall():
                self._custom_text(self._custom.close())
                item.input = self._custom.text
                self._tell("custom_tool_call_input.done", input=item.input)
        item.status = status
        self._add("output_item.done", {"output_index": len(self._items) - 1, "item": item})

    def _custom_text(self, text: str) -> None:
        if text:
            self._tell("custom_tool_call_input.delta", delta=text)

    def _text(self, text: str, logprobs: Sequence[DrawnTokenLogprob]) -> None:
        self._logprobs += logprobs
        # Once for each message: three fields of a delta that stay the same for all its tokens.
        if (item_id := self._items[-1].id) != self._written:
            self._written = item_id
            at = ENCODE({"item_id": item_id, "output_index": len(self._items) - 1, "content_index": 0})[1:-1]
            self._delta = (
                b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",' + at
                + b',"sequence_number":', b',"delta":',
            )  # fmt: skip
        number, self._number = self._number, self._number + 1
        end = b',"logprobs":[]}\n\n' if not logprobs else b',"logprobs":' + ENCODE(logprobs) + b"}\n\n"
        self._events.append(b"%b%d%b%b%b" % (self._delta[0], number, self._delta[1], ENCODE(text), end))

    def _tell(self, name: str, /, **fields: Any) -> None:
        """An event of the last item."""
        self._add(name, {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, **fields})

    def _add(self, name: str, fields: dict[str, Any]) -> None:
        number, self._number = self._number, self._number + 1
        kind = f"response.{name}"
        said = ENCODE({"type": kind, "sequence_number": number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), said))

    def _flush(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def _item_status(finish_reason: str) -> Any:
    return "incomplete" if finish_reason in ("length", ABORT) else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=usage.completion_tokens_details,
        total_tokens=usage.total_tokens,
    )
