r"""Qwen3-Coder: `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n…</function>\n</tool_call>`."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final, cast

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls
from nodes.gateway.parsers.cursor import BLANKS, NotACall, Reading, held_suffix
from nodes.gateway.parsers.written import NAME, CallForm
from nodes.gateway.parsers.xml_values import is_text, json_of, text_of

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_ENDS: Final = (_PARAMETER_END, "\n" + _PARAMETER_END)
# Longer names of parameters exist in no schema that a model can follow; what is longer is not a name.
_KEY_LIMIT: Final = 256


class Qwen3CoderCalls(Calls):
    """The arguments' JSON is made from the parameters, with the types of the tool's schema; text goes out as it comes.

    A value ends at `</parameter>` if another parameter or the end of the call follows: else it is part of the value.
    """

    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    triggers: ClassVar[tuple[str, ...]] = (begin, _FUNCTION)
    marks: ClassVar[tuple[str, ...]] = (begin, end)
    form: ClassVar[CallForm] = CallForm(
        f"{begin}\n{_FUNCTION}{NAME}>\n", f"{_FUNCTION_END}\n{end}", between="\n", as_lines=True
    )

    @override
    def _calls(self, trigger: str) -> Reading[None]:
        cursor = self.cursor
        cursor.pos += len(trigger)
        if trigger == self.begin:
            yield from cursor.blanks()
            yield from cursor.expect(_FUNCTION)
        name = self._known((yield from cursor.until(">", self.name_limit)).strip())
        self._begin_call(name)
        properties: Any = self.tools[name].get("properties")
        yield from self._parameters(cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {})
        self._end_call()
        yield from cursor.blanks()
        if (yield from cursor.literal(self.end)):
            self._emit_mark()

    def _parameters(self, properties: Mapping[str, Any]) -> Reading[None]:
        cursor = self.cursor
        before = "{"
        while True:
            yield from cursor.blanks()
            if (yield from cursor.literal(_FUNCTION_END)):
                self._arguments("{}" if before == "{" else "}")
                return
            yield from cursor.expect(_PARAMETER)
            key = yield from cursor.until(">", _KEY_LIMIT)
            yield from cursor.literal("\n")
            schema = properties.get(key)
            self._arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if is_text(schema):
                yield from self._text_value()
            else:
                yield from self._typed_value(schema)

    def _text_value(self) -> Reading[None]:
        cursor = self.cursor
        opened = False
        while True:
            at, ended = self._value_end(0)
            safe = at if at >= 0 else len(cursor.text) - held_suffix(cursor.text[cursor.taken :], _ENDS)
            if ended is False:
                safe += len(_PARAMETER_END)
            elif at > cursor.taken and cursor.text[at - 1] == "\n":
                safe -= 1
            text = text_of(cursor.text[cursor.taken : safe])
            if text or ended:
                text = text if opened else '"' + text
                cursor.pos = at + len(_PARAMETER_END) if ended else safe
                self._arguments(text + '"' if ended else text)
                opened = True
            if ended:
                return
            if ended is None:
                if cursor.closed:
                    raise NotACall
                yield

    def _typed_value(self, schema: Any) -> Reading[None]:
        cursor = self.cursor
        search = 0
        while True:
            at, ended = self._value_end(search)
            if ended:
                end = at - 1 if at > cursor.taken and cursor.text[at - 1] == "\n" else at
                text = json_of(cursor.text[cursor.taken : end], schema)
                cursor.pos = at + len(_PARAMETER_END)
                self._arguments(text)
                return
            if ended is False:
                search = at + len(_PARAMETER_END) - cursor.taken
                continue
            if at < 0:
                search = max(search, len(cursor.text) - len(_PARAMETER_END) - cursor.taken)
            if cursor.closed:
                raise NotACall
            yield

    def _value_end(self, search: int) -> tuple[int, bool | None]:
        """Where the next `</parameter>` is, or -1, and whether it ends the value; None if more has to come first."""
        text = self.cursor.text
        at = text.find(_PARAMETER_END, self.cursor.taken + search)
        if at < 0:
            return -1, None
        blanks = BLANKS.match(text, at + len(_PARAMETER_END))
        rest = text[blanks.end() : blanks.end() + len(_PARAMETER)] if blanks else ""
        if rest.startswith((_PARAMETER, _FUNCTION_END)):
            return at, True
        return at, None if _PARAMETER.startswith(rest) or _FUNCTION_END.startswith(rest) else False
