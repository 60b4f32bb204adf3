"""gpt-oss: messages `<|start|>assistant<|channel|>CHANNEL<|message|>…<|end|>`, the first begun by the prompt.

Channel `analysis` is reasoning, `final` and `commentary` are text; a message to a function, in either place
(`<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>` or
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`), is a call.
"""

import re
from collections.abc import Generator
from typing import ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls, OfferedTools
from nodes.gateway.parsers.cursor import NotACall, Reading
from nodes.gateway.parsers.events import Reasoning, Text
from nodes.gateway.parsers.written import NAME, CallForm

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_ANALYSIS: Final = "analysis"
_TO: Final = " to="
_FUNCTIONS: Final = "functions."
_HEADER: Final = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=(?P<first>[^\s<]+))?\s*"
    r"(?:<\|channel\|>(?P<channel>\w+)(?: to=(?P<second>[^\s<]+))?\s*(?:<\|constrain\|>)?\w*)?\s*"
)
# Around the names in a header: its marks, "assistant", " to=functions.", channel and type.
_HEADER_SLACK: Final = 128


class HarmonyParser(Calls):
    """Reasoning, text and calls at once. `prompt_tail` is the end of the rendered prompt: a message may be begun."""

    begin: ClassVar[str] = _CHANNEL
    # The mark after it ends the answer, so there is one call.
    form: ClassVar[CallForm] = CallForm(
        f"{_CHANNEL}commentary to={_FUNCTIONS}{NAME} {_CONSTRAIN}json{_MESSAGE}", several=False
    )
    triggers: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, *_ENDS)
    marks: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def __init__(self, tools: OfferedTools, prompt_tail: str = "") -> None:
        at = prompt_tail.rfind(_START)
        self._given = prompt_tail[at:] if at >= 0 else ""
        # The channel of a message that the prompt has begun; None: the model begins one.
        self.begun: Final = self._begun()
        # Marks of an end that ends no message are text.
        self._in_message = False
        super().__init__(tools)

    @override
    def _run(self) -> Generator[None]:
        if self.begun is not None:
            self._given = ""
            self._kind = Reasoning if self.begun == _ANALYSIS else Text
            self._in_gap, self._in_message = False, True
        elif self._given and (yield from self.cursor.ahead(_TO)):
            yield from self._attempt(_TO, self._calls(_TO))
        while trigger := (yield from self._until_trigger()):
            yield from self._attempt(trigger, self._calls(trigger))

    def _begun(self) -> str | None:
        given, mark, _ = self._given.partition(_MESSAGE)
        header = _HEADER.fullmatch(given)
        return ((header and header["channel"]) or "") if mark else None

    @override
    def _calls(self, trigger: str) -> Reading[None]:
        cursor = self.cursor
        given, self._given = self._given, ""
        if trigger in _ENDS:
            if not self._in_message:
                raise NotACall
            cursor.pos += len(trigger)
            self._emit_mark()
            self._kind, self._in_gap, self._in_message = Text, True, False
            return
        text = yield from cursor.until(_MESSAGE, self.name_limit + _HEADER_SLACK)
        header = _HEADER.fullmatch(text if trigger == _START else given + text)
        if not header:
            raise NotACall
        recipient: str = header["first"] or header["second"] or ""
        self._all_is_text = bool(recipient)
        name = self._name_in(recipient)
        if recipient.startswith(_FUNCTIONS) or (name in self.tools and header["channel"] != _ANALYSIS):
            yield from self._call(name)
            self._in_message = False
            yield from cursor.blanks()
            for end in _ENDS:
                if (yield from cursor.literal(end)):
                    self._emit_mark()
                    break
        elif recipient and header["channel"] != _ANALYSIS:
            raise NotACall
        else:
            self._emit_mark()
            self._kind = Reasoning if header["channel"] == _ANALYSIS else Text
            self._in_gap, self._in_message = False, True

    def _name_in(self, recipient: str) -> str:
        """Of a tool: models leave out what goes before it, and the blank between it and the type."""
        name = recipient.removeprefix(_FUNCTIONS)
        glued = name.removesuffix("json")
        return glued if name not in self.tools and glued in self.tools else name
