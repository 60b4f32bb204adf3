"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}`, once for each call; there may be `[CALL_ID]id` after the name, and `[ARGS]` may be missing.
"""

import re
from typing import ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls
from nodes.gateway.parsers.cursor import NotACall, Reading
from nodes.gateway.parsers.written import NAME, CallForm

_ARGS: Final = "[ARGS]"
_NAME: Final = re.compile(r"[^\[\]{}\s]*")
_CALL_ID: Final = re.compile(r"[0-9A-Za-z]*")


class MistralCalls(Calls):
    """A list of objects, one object alone, or a name and its arguments."""

    begin: ClassVar[str] = "[TOOL_CALLS]"
    triggers: ClassVar[tuple[str, ...]] = (begin,)
    marks: ClassVar[tuple[str, ...]] = (begin, _ARGS, "[CALL_ID]")
    short_ids: ClassVar[bool] = True
    form: ClassVar[CallForm] = CallForm(
        f'{{"name": "{NAME}", "arguments": ', "}", opening=f"{begin}[", between=", ", closing="]"
    )

    @classmethod
    @override
    def form_in(cls, chat_template: str) -> CallForm:
        return CallForm(f"{cls.begin}{NAME}{_ARGS}") if _ARGS in chat_template else cls.form

    @override
    def _calls(self, trigger: str) -> Reading[None]:
        cursor = self.cursor
        cursor.pos += len(trigger)
        yield from cursor.blanks()
        if (yield from cursor.ahead("{")):
            yield from self._json_call()
            return
        if not (yield from cursor.literal("[")):
            yield from self._named()
            return
        while True:
            yield from cursor.blanks()
            yield from self._json_call()
            yield from cursor.blanks()
            if not (yield from cursor.literal(",")):
                break
        if (yield from cursor.literal("]")):
            self._emit_mark()

    def _named(self) -> Reading[None]:
        cursor = self.cursor
        name = yield from cursor.run(_NAME, self.name_limit)
        yield from cursor.blanks()
        if (yield from cursor.literal("[CALL_ID]")):
            yield from cursor.run(_CALL_ID, self.name_limit)
        yield from cursor.literal(_ARGS)
        if name not in self.tools:
            raise NotACall
        yield from self._call(name)
