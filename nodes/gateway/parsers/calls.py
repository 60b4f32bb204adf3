"""Text with calls in it: what every form of writing a call shares."""

import json
import re
from abc import abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Final

from typing_extensions import override

from nodes.gateway.parsers.cursor import NotACall, Reading
from nodes.gateway.parsers.events import CallArguments, CallBegin, CallEnd, Text
from nodes.gateway.parsers.json_scanner import JsonScanner
from nodes.gateway.parsers.stage import Stage
from nodes.gateway.parsers.written import CallForm

# Name to JSON schema of its parameters.
OfferedTools = Mapping[str, Mapping[str, Any]]
# Around a name there may be a blank, a quote or a namespace; more is not a name.
NAME_SLACK: Final = 32
# Whose value is a tool's name.
_NAMES: Final = ("name", "function")
# What models write beside name and arguments. Any other key first, and it is an answer in JSON, which is not held.
_PASSED_OVER: Final = ("id", "type")


class Calls(Stage):
    """A form says what ends plain text (`triggers`) and reads the calls that follow (`_calls`).

    A call begins once its name is known to be that of an offered tool and its arguments begin; what was read until
    then goes out as text if it is no call. From then on arguments go out as they come.
    `form` is how calls are written, and `begin` the mark that begins the first, if there is one.
    """

    begin: ClassVar[str] = ""
    form: ClassVar[CallForm]
    # The ids of calls that the model's template accepts: `call_` and 24 digits, or nine letters and digits.
    short_ids: ClassVar[bool] = False
    # Whether an object with a name and no arguments is a call.
    bare: ClassVar[bool] = True
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments", "parameters")

    def __init__(self, tools: OfferedTools) -> None:
        self.tools: Final = tools
        self.name_limit: Final = max(map(len, tools), default=0) + NAME_SLACK
        # A character of a JSON string may be written as six.
        self.value_limit: Final = 6 * self.name_limit
        self._index = -1
        self._open = False
        # What was read is text, all of it, if it is no call.
        self._all_is_text = False
        super().__init__()

    @classmethod
    def form_in(cls, chat_template: str) -> CallForm:
        """The form that a template renders, where a parser reads several."""
        return cls.form

    @abstractmethod
    def _calls(self, trigger: str) -> Reading[None]:
        """Reads a trigger and the calls that follow; raises NotACall. What it reads and does not take is text."""

    @override
    def _run(self) -> Generator[None]:
        while trigger := (yield from self._until_trigger()):
            yield from self._attempt(trigger, self._calls(trigger))

    def _attempt(self, trigger: str, calls: Reading[None]) -> Reading[None]:
        cursor = self.cursor
        after_trigger = cursor.pos - cursor.taken + len(trigger)
        num_takes = cursor.num_takes
        self._all_is_text = False
        try:
            yield from calls
        except NotACall:
            if self._open:
                self._end_call(whole=False)
            # What was read of arguments, and all of a call that is cut, is not read again for calls inside it: to
            # begin at each of many marks one inside the other would take time quadratic in the text.
            if cursor.closed:
                cursor.pos = len(cursor.text)
                self._not_a_call()
            elif self._all_is_text:
                self._not_a_call()
            elif cursor.num_takes == num_takes:
                cursor.pos = cursor.taken + after_trigger
                self._not_a_call()
        cursor.pos = cursor.taken

    def _not_a_call(self) -> None:
        if self.cursor.pos > self.cursor.taken:
            self._in_gap = False
            self._emit_text()

    def _begin_call(self, name: str) -> None:
        self._index += 1
        self._open = self._made_calls = True
        self._all_is_text = False
        self._events.append(CallBegin(self._index, name, self.cursor.take()))

    def _arguments(self, text: str) -> None:
        """`text`, made from what was read since the last event."""
        source = self.cursor.take()
        if text or source:
            self._events.append(CallArguments(self._index, text, source))

    def _end_call(self, *, whole: bool = True) -> None:
        self._open = False
        self._kind, self._in_gap = Text, whole
        self._events.append(CallEnd(self._index, whole, self.cursor.take() if whole else ""))

    def _known(self, name: str) -> str:
        if name not in self.tools:
            raise NotACall
        return name

    def _call(self, name: str) -> Reading[None]:
        """A call whose name was read, and whose arguments, an object, come next."""
        yield from self.cursor.blanks()
        if not (yield from self.cursor.ahead("{")):
            raise NotACall
        self._begin_call(self._known(name))
        yield from self._object()
        self._end_call()

    def _object(self) -> Reading[None]:
        cursor, scanner = self.cursor, JsonScanner()
        while True:
            cursor.pos = scanner.scan(cursor.text, cursor.pos)
            self._arguments(scanner.escaped(cursor.text, cursor.taken, cursor.pos))
            if scanner.done:
                return
            if scanner.broken or cursor.closed:
                raise NotACall
            yield

    def _json_call(self, *, is_inner: bool = False) -> Reading[None]:
        """A call as one object with name and arguments, in any order; a few short values are passed over.

        `is_inner`: it is the `function` of an object like those of the API. The call is whole with its arguments, of
        which models forget the brace that follows.
        """
        cursor = self.cursor
        name: str | None = None
        held: str | None = None
        num_passed = 0
        has_inner = False
        yield from cursor.expect("{")
        while True:
            key = yield from self._string()
            yield from cursor.blanks()
            yield from cursor.expect(":")
            yield from cursor.blanks()
            if key == "function" and name is held is None and not is_inner and (yield from cursor.ahead("{")):
                yield from self._json_call(is_inner=True)
                has_inner = True
            elif key in _NAMES and name is None and not has_inner:
                name = self._known((yield from self._string()))
                if held is not None:
                    self._begin_call(name)
                    self._arguments(held)
            elif key in self.argument_keys and not (self._all_is_text or self._open or has_inner):
                if name is not None and (yield from cursor.ahead("{")):
                    self._begin_call(name)
                    yield from self._object()
                else:
                    self._all_is_text = True
                    held = _object_of((yield from cursor.value()))
                    if name is not None:
                        self._begin_call(name)
                        self._arguments(held)
            elif key in _PASSED_OVER or self._open or has_inner:
                yield from cursor.value(self.value_limit)
                num_passed += 1
            else:
                raise NotACall
            yield from cursor.blanks()
            if num_passed > len(_PASSED_OVER) or not (yield from cursor.literal(",")):
                break
        if self._open:
            yield from cursor.literal("}")
            self._end_call()
            return
        yield from cursor.expect("}")
        if has_inner:
            self._emit_mark()
            return
        if name is None or not self.bare:
            raise NotACall
        self._begin_call(name)
        self._arguments("{}")
        self._end_call()

    def _string(self) -> Reading[str]:
        yield from self.cursor.blanks()
        if not (yield from self.cursor.ahead('"')):
            raise NotACall
        return json.loads((yield from self.cursor.value(self.value_limit)))


def _object_of(value: str) -> str:
    """Arguments that are an object, or JSON of one as a text, which is how the API says them; nothing is no argument.

    Raises NotACall.
    """
    if value.startswith("{"):
        return value
    inner: Any = json.loads(value) if value.startswith('"') else None
    if not isinstance(inner, str):
        raise NotACall
    text = inner.strip() or "{}"
    scanner = JsonScanner()
    if not text.startswith("{") or scanner.scan(text, 0) < len(text) or not scanner.done:
        raise NotACall
    text = scanner.escaped(text, 0, len(text))
    # Half of a surrogate pair, escaped in the outer text, is no text by itself.
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
