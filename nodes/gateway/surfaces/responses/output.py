"""From what a parser finds in a sample to the items of a response, and to the events of its stream. Pure.

Whole and streamed answers have their items from here, so they are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, assert_never

from msgspec import UNSET

from nodes.gateway.fields.openai_types import DrawnTokenLogprob
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, End, Event, Mark, Reasoning, Text
from nodes.gateway.surfaces.responses.answer import (
    RESPONSE_ID_PREFIX,
    CustomToolCall,
    FunctionCall,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from nodes.gateway.surfaces.responses.custom_input import CustomInput
from nodes.gateway.surfaces.responses.history import seal
from nodes.gateway.surfaces.responses.tools import ToolTable

Emit = Callable[[str, dict[str, Any]], None]
"""Takes an event's name, without `response.`, and its fields, which are those of this moment."""
CallId = Callable[[int], str]
"""The id of a sample's call by its index."""

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def item_id(kind: str, response_id: str, index: int) -> str:
    """The same for the same place in the same response, however often it is made again."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix(RESPONSE_ID_PREFIX)}_{index}"


class Output:
    """The items of one response, in the order in which the model began them. Only the last may be open."""

    def __init__(
        self, response_id: str, tools: ToolTable, call_id: CallId, emit: Emit, *, seals_reasoning: bool = False
    ) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._tools = tools
        self._call_id = call_id
        self._emit = emit
        self._seals = seals_reasoning
        self._open: Item | None = None
        self._texts: list[str] = []
        self._logprobs: list[DrawnTokenLogprob] = []
        self._custom = CustomInput()
        self._was_broken = False

    @property
    def writes_text(self) -> bool:
        """Whether more text would go on with a message."""
        return isinstance(self._open, OutputMessage)

    @property
    def open_id(self) -> str:
        return self._open.id if self._open is not None else ""

    def repeats_call(self) -> bool:
        """Whether the text that comes next is that of a call that went wrong, which is an item already."""
        was_broken, self._was_broken = self._was_broken, False
        return was_broken

    def text(self, text: str, logprobs: Sequence[DrawnTokenLogprob] = ()) -> None:
        """More of a message, with its tokens; the event of it is left to the caller, who says it best."""
        if not self.writes_text:
            self._begin_text(OutputMessage(id=self._next_id("message")), {"type": "output_text", "text": ""})
        self._texts.append(text)
        self._logprobs += logprobs

    def take(self, event: Event) -> None:
        """Anything but `Text`."""
        match event:
            case Reasoning(text):
                self._reasoning(text)
            case CallBegin(index, name, _):
                self._begin_call(index, name)
            case CallArguments(_, text, _):
                self._arguments(text)
            case CallEnd(_, whole, _):
                self._was_broken = not whole
                self._close("completed" if whole else "incomplete")
            case Mark() | End():
                pass
            case Text(text):
                self.text(text)
            case _:
                assert_never(event)

    def close(self, status: ItemStatus) -> list[Item]:
        """Ends the last item; what ended before it is complete. A response without any has an empty message."""
        if not self.items:
            self.text("")
        self._close(status)
        return self.items

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._open, ReasoningItem):
            self._begin_text(ReasoningItem(id=self._next_id("reasoning")), {"type": "reasoning_text", "text": ""})
        self._texts.append(text)
        self._emit("reasoning_text.delta", self._at(content_index=0, delta=text))

    def _begin_text(self, item: OutputMessage | ReasoningItem, part: dict[str, Any]) -> None:
        self._begin(item)
        self._texts, self._logprobs = [], []
        if isinstance(item, OutputMessage):
            part |= {"annotations": [], "logprobs": []}
        self._emit("content_part.added", self._at(content_index=0, part=part))

    def _begin_call(self, index: int, function: str) -> None:
        name, namespace, is_custom = self._tools.name_of(function)
        kind = "custom_tool_call" if is_custom else "function_call"
        said: dict[str, Any] = {"id": self._next_id(kind), "call_id": self._call_id(index), "name": name}
        where = UNSET if namespace is None else namespace
        self._texts, self._custom = [], CustomInput()
        self._begin(CustomToolCall(**said, namespace=where) if is_custom else FunctionCall(**said, namespace=where))

    def _arguments(self, text: str) -> None:
        if isinstance(self._open, CustomToolCall):
            self._custom_text(self._custom.feed(text))
        elif text:
            self._texts.append(text)
            self._emit("function_call_arguments.delta", self._at(delta=text))

    def _custom_text(self, text: str) -> None:
        if text:
            self._emit("custom_tool_call_input.delta", self._at(delta=text))

    def _next_id(self, kind: str) -> str:
        # An item that another ends was complete; the next takes the place after it.
        self._close("completed")
        return item_id(kind, self._response_id, len(self.items))

    def _begin(self, item: Item) -> None:
        self._open = item
        self.items.append(item)
        self._emit("output_item.added", {"output_index": len(self.items) - 1, "item": item})

    def _close(self, status: ItemStatus) -> None:
        item, text = self._open, "".join(self._texts)
        match item:
            case None:
                return
            case OutputMessage():
                part = OutputText(text=text, logprobs=self._logprobs)
                item.content = [part]
                said = self._at(content_index=0, text=text, logprobs=self._logprobs)
                self._end_part("output_text.done", said, part)
            case ReasoningItem():
                part = ReasoningText(text=text)
                item.content, item.encrypted_content = [part], seal(text) if self._seals else UNSET
                self._end_part("reasoning_text.done", self._at(content_index=0, text=text), part)
            case FunctionCall():
                item.arguments = text
                self._emit("function_call_arguments.done", self._at(name=item.name, arguments=text))
            case CustomToolCall():
                self._custom_text(self._custom.close())
                item.input = self._custom.text
                self._emit("custom_tool_call_input.done", self._at(input=item.input))
            case _:
                assert_never(item)
        item.status = status
        self._emit("output_item.done", {"output_index": len(self.items) - 1, "item": item})
        self._open = None

    def _end_part(
        self,
        done: Literal["output_text.done", "reasoning_text.done"],
        said: dict[str, Any],
        part: OutputText | ReasoningText,
    ) -> None:
        self._emit(done, said)
        self._emit("content_part.done", self._at(content_index=0, part=part))

    def _at(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.open_id, "output_index": len(self.items) - 1, **fields}
