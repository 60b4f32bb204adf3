r"""Hermes 2 and 3, Qwen 2.5 and Qwen 3: `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`."""

import re
from typing import ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls
from nodes.gateway.parsers.cursor import Reading
from nodes.gateway.parsers.written import NAME, CallForm

_CLOSED: Final = re.compile(r"[} \t\r\n]*")


class HermesCalls(Calls):
    """An object between two marks, or several. A call ends with its object, whether its closing mark comes or not, and
    whether or not too many braces come before that.
    """

    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    triggers: ClassVar[tuple[str, ...]] = (begin,)
    marks: ClassVar[tuple[str, ...]] = (begin, end)
    form: ClassVar[CallForm] = CallForm(f'{begin}\n{{"name": "{NAME}", "arguments": ', f"}}\n{end}", between="\n")

    @override
    def _calls(self, trigger: str) -> Reading[None]:
        self.cursor.pos += len(trigger)
        while True:
            yield from self.cursor.blanks()
            yield from self._json_call()
            yield from self.cursor.run(_CLOSED)
            if (yield from self.cursor.literal(self.end)):
                self._emit_mark()
                return
            self.cursor.pos = self.cursor.taken
            yield from self.cursor.blanks()
            if not (yield from self.cursor.ahead("{")):
                return
