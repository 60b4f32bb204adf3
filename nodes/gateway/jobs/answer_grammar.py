"""What an answer has to be, as Lark for llguidance: calls in the form that the model's parser reads, after reasoning.

Marks that are tokens of their own are written as their ids, since no text matches those. Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from nodes.asks.grammar_text import described
from nodes.asks.schema_annotations import TooManySchemas, without_annotations
from nodes.asks.schema_numbers import NumberTooLarge
from nodes.asks.schema_refs import SchemaDocument, UnresolvedReference
from nodes.gateway.fields.tool_fields import OfferedTool
from nodes.gateway.parsers.harmony import HarmonyParser
from nodes.gateway.parsers.parameters import TEXT_TYPES, Parameters, Way, listed_in
from nodes.gateway.parsers.thinking import Thinking
from nodes.gateway.parsers.written import NAME, CallForm, lark_of
from nodes.gateway.parsers.xml_values import json_of, name_of

_TEXT: Final = r"TEXT: /(.|\n)*/"
_VALUE_END: Final = "</parameter>"
_LINE_END: Final = f"\n{_VALUE_END}\n"
# Keys that no line can hold, and what of a text only its whole value could tell.
_OBJECT: Final = {"type": "object"}
_NO_KEY: Final = re.compile(r"[>\n]|^$|.{256}")
_CONTAINERS: Final = frozenset({"array", "object"})
_NUMBERS: Final = frozenset({"integer", "number"})
_UNENFORCED: Final = ("pattern", "format", "minLength", "maxLength")
# Of all arguments together, which are written one by one.
_OF_OBJECTS: Final = ("minProperties", "maxProperties", "patternProperties", "enum", "const")
# Of a number that is written as any text may be.
_OF_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")


class Unwritable(ValueError):
    """Arguments of a tool that no grammar can describe; says why."""

    def __init__(self, tool: OfferedTool, why: str) -> None:
        super().__init__(f"Arguments of '{tool.name}' cannot be kept to '{tool.param}': {why}.")
        self.param = tool.param


class NoValue(Unwritable):
    """Nothing fits, in any form."""


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
            # To the first mark, or line that begins a parameter, where the parser may end it too. A text that may be a
            # container begins with no bracket.
            end = _escaped(_VALUE_END)
            within = r"~/(.|\n)*\n<parameter=(.|\n)*/"
            rules.append(r'text_line: text_value "\n"')
            rules.append(rf"text_value[lazy]: /(.|\n)*{end}/ & {within}")
            rules.append(rf"plain_text[lazy]: /(\n|[^ \n\t\r\f\v\[{{(](.|\n)*)?{end}/ & {within}")
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
    return _lines(tool) if form.as_lines else _json(schema, strict=tool.strict)


def arguments_schema(tool: OfferedTool) -> dict[str, Any]:
    """What a tool's arguments have to be. Raises Unwritable."""
    given = tool.parameters
    kind: Any = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in cast("list[Any]", kind)):
        raise Unwritable(tool, f"they are an object, and the schema's type is {json.dumps(kind)[:100]}")
    if "$ref" in given:
        return _held(tool, {"allOf": [given, _OBJECT]}, SchemaDocument(given))
    return {**_held(tool, given, SchemaDocument(given)), "type": "object"}


def _held(tool: OfferedTool, schema: Mapping[str, Any], document: SchemaDocument) -> dict[str, Any]:
    """What of a schema is enforced. Raises Unwritable."""
    try:
        # Who writes a server's schemas does not know what calls it: zod's email has look-ahead.
        return without_annotations(schema, document, with_all_patterns=tool.strict)
    except (TooManySchemas, NumberTooLarge, UnresolvedReference) as error:
        raise Unwritable(tool, str(error) or "it has too many schemas") from None


def json_term(schema: str, *, strict: bool) -> str:
    """Lark of JSON that a schema, itself JSON, describes."""
    return _json(json.loads(schema), strict=strict)


def _json(schema: Mapping[str, Any], *, strict: bool) -> str:
    # Not by msgspec, which does not write the integers beyond 64 bits that it reads.
    return "%json " + json.dumps(described(schema, strict=strict), ensure_ascii=False, separators=(",", ":"))


def _lines(tool: OfferedTool) -> str:
    """Arguments as lines `<parameter=KEY>`, value, `</parameter>`, in the order of the schema."""
    parameters = Parameters(tool.parameters)
    if tool.strict and (found := _first_of(_OF_OBJECTS, tool.parameters, parameters.document)):
        raise Unwritable(tool, f"'{found}' of all arguments cannot be enforced with this model")
    written: list[str] = []
    refused: list[NoValue] = []
    try:
        for way in parameters.ways:
            try:
                written.append(_way(tool, way, parameters))
            except NoValue as error:
                refused.append(error)
    except Unwritable:
        raise
    except ValueError as error:
        raise Unwritable(tool, str(error)) from None
    if not written:
        raise refused[0]
    return written[0] if len(written) == 1 else f"({' | '.join(f'({one})' for one in written)})"


def _way(tool: OfferedTool, way: Way, parameters: Parameters) -> str:
    """Lark of lines. Raises Unwritable."""
    lines: list[str] = []
    for key, of_key in way.properties.items():
        if _NO_KEY.search(key) or name_of(key) != key:
            raise Unwritable(tool, f"this model cannot write the name {key[:100]!r} of a parameter")
        value = _value(tool, key, of_key, parameters)
        if not value and key in way.required:
            raise NoValue(tool, f"no value fits the required parameter {key[:100]!r}")
        if not value:
            # As JSON such a property would be left out.
            continue
        line = f"{_quoted(f'<parameter={key}>' + chr(10))} {value}"
        lines.append(line if key in way.required else f"({line})?")
    if missing := way.required - way.properties.keys():
        raise Unwritable(tool, f"nothing describes the required parameter {min(missing)[:100]!r}")
    return " ".join(lines) or '""'


def _value(tool: OfferedTool, key: str, schema: Any, parameters: Parameters) -> str:
    """Lark of a value and the end of its line as `xml_values` reads them; empty if no value fits."""
    own, read = parameters.allowed(schema), parameters.of_key(key)
    others = own.other_types
    if own.texts is None:
        if read.other_types - own.types:
            # The parser does not know which way an answer takes.
            raise Unwritable(tool, f"{key[:100]!r} is any text in one alternative, and something else in another")
        unheld = _UNENFORCED if not others & _NUMBERS else _UNENFORCED + _OF_NUMBERS
        if tool.strict and (found := _first_of(unheld, schema, parameters.document)):
            raise Unwritable(tool, f"'{found}' of a text cannot be enforced with this model")
        # Numbers and null are read from a text too.
        if not (others := others & _CONTAINERS):
            return "text_line"
        terms = ['plain_text "\\n"']
    else:
        # The parser reads some as something else, as it would `null` beside null.
        written = [one for one in own.texts if _VALUE_END not in one and json.loads(json_of(one, read)) == one]
        terms = [f"{_quoted(one)} {_quoted(_LINE_END)}" for one in written]
    if others:
        is_plain = not own.types & TEXT_TYPES and "type" in schema
        kept = schema if is_plain else {"allOf": [schema, {"type": sorted(others)}]}
        held = _held(tool, kept, parameters.document)
        terms.append(f"{_json(held, strict=tool.strict)} {_quoted(_LINE_END)}")
    return f"({' | '.join(terms)})" if terms else ""


def _first_of(keys: Sequence[str], schema: Any, document: SchemaDocument) -> str | None:
    """Which of these keys a schema has, or one of those that it is made of."""
    left, seen = [schema], set[int]()
    # Not by recursion: clients choose how deep it is.
    while left:
        one = left.pop()
        if not isinstance(one, Mapping) or id(cast("Any", one)) in seen:
            continue
        part = cast("Mapping[str, Any]", one)
        seen.add(id(part))
        if found := [key for key in keys if key in part]:
            return found[0]
        if "$ref" in part:
            left.append(document.target(part))
        left += [inner for union in ("anyOf", "oneOf", "allOf") for inner in listed_in(part, union)]
    return None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")
