r"""DeepSeek: `<｜tool▁calls▁begin｜>`, one call after another, `<｜tool▁calls▁end｜>`.

A call of V3 and R1 is `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{…}\n```<｜tool▁call▁end｜>`,
one of V3.1 `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
"""

from typing import ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls
from nodes.gateway.parsers.cursor import Reading
from nodes.gateway.parsers.written import NAME, CallForm

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"


class DeepSeekV31Calls(Calls):
    """Name, separator, object. The mark around all calls may be missing; there may be fences around the object.

    Distilled models have the template of one version and write as the other one: each is read as both are written.
    """

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
            yield from cursor.blanks()
            if (yield from cursor.literal(_FENCE)):
                self._emit_mark()
                yield from cursor.blanks()
            if (yield from cursor.literal(_CALL_END)):
                self._emit_mark()
            yield from cursor.blanks()
            if not (yield from cursor.literal(_CALL)):
                break
        if (yield from cursor.literal(_CALLS_END)):
            self._emit_mark()

    def _name(self) -> Reading[str]:
        cursor = self.cursor
        name = yield from cursor.until(_SEPARATOR, self.name_limit)
        yield from cursor.blanks()
        if not (yield from cursor.ahead("{")) and not (yield from cursor.ahead(_FENCE)):
            # What was read is the kind of call.
            name = yield from cursor.until("\n", self.name_limit)
            yield from cursor.blanks()
        if (yield from cursor.literal(_FENCE)):
            yield from cursor.literal("json")
        return name.strip()


class DeepSeekV3Calls(DeepSeekV31Calls):
    """The kind of call, separator, name, and the object between fences."""

    form: ClassVar[CallForm] = CallForm(
        f"{_CALL}function{_SEPARATOR}{NAME}\n{_FENCE}json\n",
        f"\n{_FENCE}{_CALL_END}",
        opening=_CALLS,
        between="\n",
        closing=_CALLS_END,
    )
