r"""Qwen3-Coder: `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n…</function>\n</tool_call>`."""

import json
import re
from typing import ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.calls import Calls
from nodes.gateway.parsers.cursor import BLANKS, NotACall, Reading, held_suffix
from nodes.gateway.parsers.json_scanner import JsonScanner
from nodes.gateway.parsers.parameters import TEXT_TYPES, Allowed, Parameters
from nodes.gateway.parsers.written import NAME, CallForm
from nodes.gateway.parsers.xml_values import is_exact, json_of, name_of, text_of

_CALL_END: Final = "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_VALUE: Final = (_PARAMETER, _FUNCTION_END, _CALL_END)
# What may end a value, if it is seen to do so by what follows.
_ENDS: Final = re.compile(rf"(?:\r?\n)?(?P<end>{_PARAMETER_END}|{_FUNCTION_END})|\r?\n(?P<next>{_PARAMETER})")
_HELD: Final = (
    *(line_end + end for line_end in ("", "\n", "\r\n") for end in (_PARAMETER_END, _FUNCTION_END)),
    "\r\n" + _PARAMETER,
    "\n" + _PARAMETER,
)
_TYPED_ENDS: Final = re.compile("|".join((_PARAMETER_END, _FUNCTION_END, _PARAMETER)))
# Longer names of parameters exist in no schema that a model can follow; what is longer is not a name.
_KEY_LIMIT: Final = 256
_KEY: Final = re.compile(rf"[^>\n]{{0,{_KEY_LIMIT}}}")


class Qwen3CoderCalls(Calls):
    """The arguments' JSON is made from the parameters, with the types of the tool's schema; text goes out as it comes.

    A value ends at `</parameter>` if another parameter or the end of the call follows: else it is part of the value.
    Models leave that mark out. Then a text ends where a line begins another parameter of the tool, or where nothing but
    the end of the call comes before that of the answer; what is no text, where it is whole.
    """

    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = _CALL_END
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
        name = self._known(name_of((yield from cursor.until(">", self.name_limit))))
        self._begin_call(name)
        yield from self._parameters(Parameters(self.tools[name]))
        self._end_call()
        yield from cursor.blanks()
        if (yield from cursor.literal(self.end)):
            self._emit_mark()

    def _parameters(self, parameters: Parameters) -> Reading[None]:
        cursor = self.cursor
        names, before = frozenset(parameters.names), "{"
        while True:
            yield from cursor.blanks()
            # The function's end may be missing, but not that of the call.
            if (yield from cursor.literal(_FUNCTION_END)) or (yield from cursor.ahead(_CALL_END)):
                self._arguments("{}" if before == "{" else "}")
                return
            yield from cursor.expect(_PARAMETER)
            key = name_of((yield from cursor.until(">", _KEY_LIMIT)))
            line_end = ""
            for one in ("\r\n", "\n"):
                if not line_end and (yield from cursor.literal(one)):
                    line_end = one
            self._arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before, names = ", ", names - {key}
            allowed = parameters.of_key(key)
            if allowed.is_text:
                yield from self._text_value(names, line_end)
            else:
                yield from self._typed_value(allowed, line_end)

    def _text_value(self, others: frozenset[str], line_end: str) -> Reading[None]:
        """`others`: parameters that may follow. `line_end`: as it was before the value."""
        cursor = self.cursor
        opened = False
        while True:
            safe, after = self._text_end(others, line_end)
            text = text_of(cursor.text[cursor.taken : safe])
            cursor.pos = safe if after is None else after
            if text or after is not None:
                text = text if opened else '"' + text
                self._arguments(text if after is None else text + '"')
                opened = True
            if after is not None:
                return
            if cursor.closed:
                raise NotACall
            yield

    def _text_end(self, others: frozenset[str], line_end: str) -> tuple[int, int | None]:
        """Up to where there is nothing but text; and where reading goes on after it, if it ends there."""
        cursor = self.cursor
        text = cursor.text
        for found in _ENDS.finditer(text, cursor.taken):
            # The line end before the mark is the value's where there is none before the value.
            size = found[0].index("<")
            is_value = not line_end and found["end"] == _PARAMETER_END
            at = found.start() + size - (0 if is_value else min(size, len(line_end) or size))
            if found["next"]:
                ended, after = self._begins_another(found.end(), others), found.start("next")
            elif found["end"] == _PARAMETER_END:
                ended, after = self._is_followed(found.end()), found.end()
            else:
                ended, after = self._ends_all(found.end()), found.start("end")
            if ended is not False:
                return at, after if ended else None
        return len(text) - (0 if cursor.closed else held_suffix(text[cursor.taken :], _HELD)), None

    def _begins_another(self, pos: int, others: frozenset[str]) -> bool | None:
        """Whether the name of one of these comes; None: more has to come first."""
        key = _KEY.match(self.cursor.text, pos)
        end = key.end() if key else pos
        if end == len(self.cursor.text) and others and not self.cursor.closed and end - pos < _KEY_LIMIT:
            return None
        return key is not None and self.cursor.text[end : end + 1] == ">" and name_of(key[0]) in others

    def _ends_all(self, pos: int) -> bool | None:
        """Whether nothing comes but the end of the call, and then no more."""
        text = self.cursor.text
        pos = _after_blanks(text, pos)
        if text.startswith(_CALL_END, pos):
            pos = _after_blanks(text, pos + len(_CALL_END))
        if self.cursor.closed or not _CALL_END.startswith(text[pos : pos + len(_CALL_END)]):
            return pos == len(text)
        return None

    def _typed_value(self, allowed: Allowed, line_end: str) -> Reading[None]:
        cursor = self.cursor
        found = yield from self._typed_end(allowed)
        end, after = (cursor.taken + distance for distance in found)
        raw = cursor.text[cursor.taken : end]
        cursor.pos = after
        self._arguments(json_of(raw.removesuffix(line_end), allowed))

    def _typed_end(self, allowed: Allowed) -> Reading[tuple[int, int]]:
        """Where the value ends, and where reading goes on after it, as distances from what was taken."""
        cursor, scanner = self.cursor, JsonScanner()
        searched = scanned = 0
        in_string: tuple[int, int] | None = None
        is_tried, is_strict = False, True
        while True:
            begin = cursor.taken
            for found in _TYPED_ENDS.finditer(cursor.text, begin + searched):
                end, after = found.start() - begin, found.end() - begin
                if found[0] != _PARAMETER_END:
                    # The first one only, as each takes as long as the value is.
                    if not is_tried and is_exact(cursor.text[begin : begin + end], allowed):
                        return end, end
                    is_tried, searched = True, after
                    continue
                ended = self._is_followed(begin + after)
                if ended is None:
                    break
                if ended:
                    scanner.scan(cursor.text[begin + scanned : begin + end], 0)
                    scanned = end
                    # A line end within a string, as before the mark of one that is never closed, is no JSON but where
                    # nothing else may be: a quote of what follows would close the string.
                    is_strict = is_strict and not scanner.controls
                    if not scanner.in_string or not (is_strict or allowed.types.isdisjoint(TEXT_TYPES)):
                        return end, after
                    in_string = in_string or (end, after)
                searched = after
            else:
                searched = max(searched, len(cursor.text) - begin - len(_PARAMETER_END) + 1)
            if cursor.closed and in_string:
                return in_string
            if cursor.closed:
                raise NotACall
            yield

    def _is_followed(self, pos: int) -> bool | None:
        """Whether another parameter or an end comes after blanks; None: more has to come first."""
        text = self.cursor.text
        pos = _after_blanks(text, pos)
        if text.startswith(_AFTER_VALUE, pos):
            return True
        rest = text[pos : pos + len(_CALL_END)]
        return None if any(mark.startswith(rest) for mark in _AFTER_VALUE) else False


def _after_blanks(text: str, pos: int) -> int:
    found = BLANKS.match(text, pos)
    return found.end() if found else pos
