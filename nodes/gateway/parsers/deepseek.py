r"""DeepSeek: `<｜tool▁calls▁begin｜>`, one call after another, `<｜tool▁calls▁end｜>`.

A call of V3 and R1 is `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>`,
one of V3.1 `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
"""

from typing import ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.calls import NAME_SLACK, Calls
from nodes.gateway.parsers.cursor import Reading
from nodes.gateway.parsers.written import NAME, CallForm

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"


class DeepSeekV31Calls(Calls):
    """Name, separator, object. The mark around all calls may be missing."""

    begin: ClassVar[str] = _CALLS
    form: ClassVar[CallForm] = CallForm(f"{_CALL}{NAME}{_SEPARATOR}", _CALL_END, opening=_CALLS, closing=_CALLS_END)
    triggers: ClassVar[tuple[str, ...]] = (_CALLS, _CALL)
    marks: ClassVar[tuple[str, ...]] = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)

    @override
    def _calls(self, trigger: str) -> Reading[None]:
        cursor = self.cursor
        cursor.pos += len(trigger)
        if trigger == _CALLS:
            yield from cursor.blanks()
            yield from cursor.expect(_CALL)
        while True:
            yield from self._call((yield from self._name()))
            yield from self._after_arguments()
            yield from cursor.blanks()
            if (yield from cursor.literal(_CALL_END)):
                self._emit_mark()
            yield from cursor.blanks()
            if not (yield from cursor.literal(_CALL)):
                break
        if (yield from cursor.literal(_CALLS_END)):
            self._emit_mark()

    def _name(self) -> Reading[str]:
        return (yield from self.cursor.until(_SEPARATOR, self.name_limit)).strip()

    def _after_arguments(self) -> Reading[None]:
        yield from ()


class DeepSeekV3Calls(DeepSeekV31Calls):
    """The kind of call, separator, name, and the object between fences."""

    form: ClassVar[CallForm] = CallForm(
        f"{_CALL}function{_SEPARATOR}{NAME}\n{_FENCE}json\n",
        f"\n{_FENCE}{_CALL_END}",
        opening=_CALLS,
        between="\n",
        closing=_CALLS_END,
    )

    @override
    def _name(self) -> Reading[str]:
        yield from self.cursor.until(_SEPARATOR, NAME_SLACK)
        name = (yield from self.cursor.until("\n", self.name_limit)).strip()
        yield from self.cursor.blanks()
        if (yield from self.cursor.literal(_FENCE)):
            yield from self.cursor.literal("json")
        return name

    @override
    def _after_arguments(self) -> Reading[None]:
        yield from self.cursor.blanks()
        if (yield from self.cursor.literal(_FENCE)):
            self._emit_mark()
