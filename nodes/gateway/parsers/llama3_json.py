"""Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or not; several separated by `; `."""

import re
from typing import ClassVar

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls
from nodes.gateway.parsers.cursor import Reading
from nodes.gateway.parsers.written import NAME, CallForm

_TAG = "<|python_tag|>"


class Llama3JsonCalls(Calls):
    """Without a mark a call is an object that begins a line, and has an offered tool's name and an object after it."""

    begin: ClassVar[str] = ""
    triggers: ClassVar[tuple[str, ...]] = (_TAG, "{")
    marks: ClassVar[tuple[str, ...]] = (_TAG,)
    bare: ClassVar[bool] = False
    form: ClassVar[CallForm] = CallForm(f'{{"name": "{NAME}", "parameters": ', "}", between="; ")

    @override
    def _find(self) -> re.Match[str] | None:
        cursor = self.cursor
        for found in self._trigger.finditer(cursor.text, cursor.taken):
            at = found.start()
            before = cursor.text[at - 1] if at > cursor.taken else cursor.last
            if found.group() == _TAG or before in ("", "\n"):
                return found
        return None

    @override
    def _calls(self, trigger: str) -> Reading[None]:
        cursor = self.cursor
        if trigger == _TAG:
            cursor.pos += len(trigger)
            yield from cursor.blanks()
        while True:
            yield from self._json_call()
            yield from cursor.blanks()
            if not (yield from cursor.literal(";")):
                return
            yield from cursor.blanks()
