"""What an answer has to be, as Lark for llguidance: calls in the form that the model's parser reads, after reasoning.

Marks that are tokens of their own are written as their ids, since no text matches those. Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from nodes.asks.grammar_text import json_options
from nodes.asks.schema_annotations import TooManySchemas, without_annotations
from nodes.asks.schema_numbers import NumberTooLarge
from nodes.gateway.parsers.harmony import HarmonyParser
from nodes.gateway.parsers.thinking import Thinking
from nodes.gateway.parsers.written import NAME, CallForm, lark_of
from nodes.gateway.parsers.xml_values import is_text
from nodes.gateway.tool_fields import OfferedTool

_TEXT: Final = r"TEXT: /(.|\n)*/"
_LINE_END: Final = "\n</parameter>\n"
# Keys that no line can hold, and what of a text only its whole value could tell.
_OBJECT: Final = {"type": "object"}
_NO_KEY: Final = re.compile(r"[>\n]|^$")
_PYTHON: Final[Mapping[str, Any]] = {"boolean": bool, "integer": int, "number": (int, float), "string": str}
_UNENFORCED: Final = ("pattern", "format", "minLength", "maxLength")


class Unwritable(ValueError):
    """Arguments of a tool that no grammar can describe; says why."""

    def __init__(self, tool: OfferedTool, why: str) -> None:
        super().__init__(f"Arguments of '{tool.name}' cannot be kept to '{tool.param}': {why}.")
        self.param = tool.param


class CallGrammar(NamedTuple):
    """Of which calls an answer may be. `begin`: the mark of the first, empty if there is none."""

    form: CallForm
    begin: str
    tools: Sequence[OfferedTool]
    one_call: bool
    is_harmony: bool = False

    def lark(self, marks: Mapping[str, int], *, must_call: bool, content: str = "") -> str:
        """An answer that is calls; if it need not be any, else text, or what `content`, a Lark term, says.

        Raises Unwritable.
        """
        form = self.form
        enforced = [must_call or tool.strict for tool in self.tools]
        rules = [
            f"arguments_{number}: {_arguments(tool, form) if enforced[number] else _any_arguments(form)}"
            for number, tool in enumerate(self.tools)
        ]
        rules += [
            f"call_{number}: {lark_of(form.head.replace(NAME, tool.name, 1), marks)} {self._rest(number, marks)}"
            for number, tool in enumerate(self.tools)
        ]
        rules.append(f"call: {self._any('call')}")
        if form.as_lines:
            rules.append(f"text_line[lazy]: /(.|\\n)*{_escaped(_LINE_END)}/")
            rules.append(r"KEY: /[^>\n]+/")
        calls = f"{lark_of(form.opening, marks)} call {self._more(marks)}"
        if must_call:
            start = [f"start: {calls}"]
        elif self.is_harmony:
            said = content or "TEXT"
            start = [f"start: final | {calls}", f"final: {lark_of('<|channel|>final<|message|>', marks)} {said}"]
        elif content:
            start = [f"start: {content} | {calls}"]
        elif not self.begin:
            start = [f"start: free | {calls}", r"free: /([^{ \n](.|\n)*)?/"]
        else:
            start = [f"start: TEXT | begun first {self._more(marks)}", *self._first(marks)]
        return "\n".join(["%llguidance {}", *start, *rules, _TEXT])

    def _first(self, marks: Mapping[str, int]) -> list[str]:
        """The first call after free text, the end of which is its mark."""
        is_token = self.begin in marks
        begun = f"begun: TEXT {lark_of(self.begin, marks)}" if is_token else f"begun[lazy]: TEXT {_quoted(self.begin)}"
        lead = self.form.lead(self.begin)
        after_name = self.form.head.partition(NAME)[2]
        rules = [
            f"first_{number}: {lark_of(f'{lead}{tool.name}{after_name}', marks)} {self._rest(number, marks)}"
            for number, tool in enumerate(self.tools)
        ]
        return [begun, *rules, f"first: {self._any('first')}"]

    def _any(self, rule: str) -> str:
        return " | ".join(f"{rule}_{number}" for number in range(len(self.tools)))

    def _rest(self, number: int, marks: Mapping[str, int]) -> str:
        return f"arguments_{number} {lark_of(self.form.tail, marks)}"

    def _more(self, marks: Mapping[str, int]) -> str:
        form = self.form
        more = "" if self.one_call or not form.several else f"({lark_of(form.between, marks)} call)*"
        return f"{more} {lark_of(form.closing, marks)}"


def before_answer(reasoning: Thinking | HarmonyParser, marks: Mapping[str, int], *, is_called: bool) -> str:
    """Lark of the reasoning before `@answer`, empty if there is none. `is_called`: the answer has its own header."""
    if isinstance(reasoning, HarmonyParser):
        return _before_message(reasoning, marks, has_header=is_called)
    if reasoning.ended:
        return ""
    closing = lark_of(reasoning.closing, marks)
    thought = f"thought: TEXT {closing}" if reasoning.closing in marks else f"thought[lazy]: TEXT {closing}"
    may_open = "thought" if reasoning.is_open else f"({lark_of(reasoning.opening, marks)} thought)?"
    # Models end a line or two after the mark. Without a bound a weak one wrote blanks until its tokens were used up.
    return "\n".join(["%llguidance {}", rf"start: {may_open} /[ \n]{{0,4}}/ @answer", thought, _TEXT])


def _before_message(parser: HarmonyParser, marks: Mapping[str, int], *, has_header: bool) -> str:
    end = lark_of("<|end|><|start|>assistant", marks)
    channel, message = lark_of("<|channel|>", marks), lark_of("<|message|>", marks)
    header = "" if has_header else lark_of("<|channel|>final<|message|>", marks)
    if parser.begun is not None and parser.begun != "analysis":
        return ""
    given = "" if parser.begun is None else f"TEXT {end}"
    prelude = f'prelude: {channel} ("analysis" | "commentary") {message} TEXT {end}'
    return "\n".join(["%llguidance {}", f"start: {given} prelude* {header} @answer", prelude, _TEXT])


def _any_arguments(form: CallForm) -> str:
    return f'("<parameter=" KEY {_quoted(">" + chr(10))} text_line)*' if form.as_lines else _json(_OBJECT, strict=False)


def _arguments(tool: OfferedTool, form: CallForm) -> str:
    """Lark of a tool's arguments."""
    schema = arguments_schema(tool)
    return _lines(tool, schema) if form.as_lines else _json(schema, strict=tool.strict)


def arguments_schema(tool: OfferedTool) -> dict[str, Any]:
    """What a tool's arguments have to be. Raises Unwritable."""
    try:
        schema = without_annotations(dict(tool.parameters))
    except (TooManySchemas, NumberTooLarge) as error:
        raise Unwritable(tool, str(error) or "it has too many schemas") from None
    kind: Any = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in cast("list[Any]", kind)):
        raise Unwritable(tool, f"they are an object, and the schema's type is {json.dumps(kind)[:100]}")
    return {**schema, "type": "object"}


def json_term(schema: str, *, strict: bool) -> str:
    """Lark of JSON that a schema, itself JSON, describes."""
    return _json(json.loads(schema), strict=strict)


def _json(schema: Mapping[str, Any], *, strict: bool) -> str:
    described = {**schema, "x-guidance": json_options(strict=strict)}
    # Not by msgspec, which does not write the integers beyond 64 bits that it reads.
    return "%json " + json.dumps(described, ensure_ascii=False, separators=(",", ":"))


def _lines(tool: OfferedTool, schema: Mapping[str, Any]) -> str:
    """Arguments as lines `<parameter=KEY>`, value, `</parameter>`, in the order of the schema."""
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    required = set(cast("Sequence[str]", schema.get("required") or ()))
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    lines: list[str] = []
    for key, of_key in properties.items():
        if _NO_KEY.search(key):
            raise Unwritable(tool, f"this model cannot write the name {key[:100]!r} of a parameter")
        if _fits_nothing(of_key):
            if key in required:
                raise Unwritable(tool, f"no value of the required parameter {key[:100]!r} has its type")
            continue
        line = f"{_quoted(f'<parameter={key}>' + chr(10))} {_value(tool, of_key, shared)}"
        lines.append(line if key in required else f"({line})?")
    if missing := required - properties.keys():
        raise Unwritable(tool, f"nothing describes the required parameter {min(missing)[:100]!r}")
    return " ".join(lines)


def _fits_nothing(given: Any) -> bool:
    """Whether none of the values that a schema lists is of its type: as JSON such a property would be left out."""
    schema: Mapping[str, Any] = cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}
    choices: Any = schema.get("enum")
    kind: Any = schema.get("type")
    if not isinstance(choices, list) or kind not in _PYTHON:
        return False
    kinds = _PYTHON[kind]
    return not any(isinstance(one, kinds) and (kind == "boolean") == isinstance(one, bool) for one in choices)  # pyright: ignore[reportUnknownVariableType] - of JSON


def _value(tool: OfferedTool, given: Any, shared: Mapping[str, Any]) -> str:
    schema: Mapping[str, Any] = cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}
    if not is_text(given):
        return f"{_json({**shared, **schema}, strict=tool.strict)} {_quoted(_LINE_END)}"
    choices: Any = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in cast("list[Any]", choices)):
        return f"({' | '.join(map(_quoted, cast('list[str]', choices)))}) {_quoted(_LINE_END)}"
    if tool.strict and (unheld := [key for key in _UNENFORCED if key in schema]):
        raise Unwritable(tool, f"'{unheld[0]}' of a text cannot be enforced with this model")
    return "text_line"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")
