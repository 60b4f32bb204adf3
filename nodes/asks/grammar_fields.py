"""The HTTP fields by which clients ask for structured output: OpenAI's, vLLM's of today and of before, SGLang's and
llama.cpp's.

All of them say one of four things: a JSON schema, a regular expression, a grammar, or tags within free text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from nodes.asks.ask import Fields, InvalidAsk
from nodes.asks.schema_annotations import TooManySchemas, without_annotations
from nodes.asks.schema_numbers import NumberTooLarge, Schema
from nodes.asks.schema_refs import UnresolvedReference

Kind = Literal["json", "regex", "grammar", "tags"]
"""`grammar`: llguidance's Lark, or GBNF. `tags`: `StructuralTags` as JSON."""
_MAX_CHOICES: Final = 4096
"""Alternatives of one regular expression: 3,000 take 20 ms to compile."""
_ANY_OBJECT: Final = '{"type":"object"}'


class Wanted(NamedTuple):
    """What the output is to be; `param` is the field that says so. `strict`: or else the request is refused."""

    kind: Kind
    text: str
    param: str
    strict: bool = False


class TextFormat(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object; with `schema`, as llama.cpp, Together and Fireworks have it, JSON that it describes."""

    schema: str | Schema | None = None


class NamedSchema(Struct, frozen=True, kw_only=True):
    """A JSON schema; without one, any object. `strict`: what of it cannot be enforced is refused, else ignored."""

    name: str | None = None
    schema: str | Schema | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: NamedSchema


class Tagged(Struct, frozen=True, kw_only=True):
    """After `begin`, which starts with a trigger, comes JSON that `schema` describes, and then `end`."""

    begin: str
    schema: Schema
    end: str


class StructuralTagFormat(Struct, frozen=True, kw_only=True, tag_field="type", tag="structural_tag"):
    """Free text, but a trigger in it begins one of the structures."""

    structures: Annotated[list[Tagged], Meta(min_length=1, max_length=64)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=64)]


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    """vLLM's: one of the first six. The options after them are not supported."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=_MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Schema | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


FIELDS: Final[Fields] = {
    "response_format": TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    "structured_outputs": StructuredOutputs,
    "json_schema": str | Schema,
    "regex": str,
    "ebnf": str,
    "grammar": str,
    "structural_tag": str | Schema,
    "guided_json": str | Schema,
    "guided_regex": str,
    "guided_choice": Annotated[list[str], Meta(min_length=1, max_length=_MAX_CHOICES)],
    "guided_grammar": str,
}
_Reader = Callable[[Any, str], Wanted]


def wanted_of(body: Mapping[str, Any]) -> Wanted | None:
    """What the fields of a body say together; None: nothing. Raises InvalidAsk."""
    found = [*_found(body)]
    if len(found) > 1:
        (first, _, _), (second, _, _) = found[:2]
        raise InvalidAsk(
            f"'{second}' cannot be used together with '{first}': give one description of the output.", second
        )
    try:
        return found[0][2](found[0][1], found[0][0]) if found else None
    # Raised at some thousand nested brackets; what llguidance reads has 128.
    except RecursionError:
        raise InvalidAsk(f"The schema in '{found[0][0]}' is nested too deeply.", found[0][0]) from None


def _found(body: Mapping[str, Any]) -> Iterator[tuple[str, Any, _Reader]]:
    form = body["response_format"]
    if form is not None and not isinstance(form, TextFormat):
        yield "response_format", form, _of_format
    outputs = body["structured_outputs"]
    if outputs is not None:
        yield from _in_outputs(outputs)
    readers: dict[str, _Reader] = {
        "json_schema": _of_schema,
        "regex": _of_regex,
        "ebnf": _of_grammar,
        "grammar": _of_grammar,
        "structural_tag": _of_tags,
        "guided_json": _of_schema,
        "guided_regex": _of_regex,
        "guided_choice": _of_choice,
        "guided_grammar": _of_grammar,
    }
    for name, read in readers.items():
        # llama.cpp's clients send an empty grammar for none.
        if body[name] is not None and (name, body[name]) != ("grammar", ""):
            yield name, body[name], read


def _in_outputs(outputs: StructuredOutputs) -> Iterator[tuple[str, Any, _Reader]]:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(outputs, name):
            param = f"structured_outputs.{name}"
            raise InvalidAsk(f"'{param}' is not supported by this server.", param)
    readers: dict[str, _Reader] = {
        "json": _of_schema,
        "regex": _of_regex,
        "choice": _of_choice,
        "grammar": _of_grammar,
        "json_object": lambda _, param: Wanted("json", _ANY_OBJECT, param),
        "structural_tag": _of_tags,
    }
    given = [name for name in readers if getattr(outputs, name) not in (None, False)]
    if not given:
        options = "', '".join(readers)
        raise InvalidAsk(f"'structured_outputs' needs one of '{options}'.", "structured_outputs")
    for name in given:
        yield f"structured_outputs.{name}", getattr(outputs, name), readers[name]


def _of_format(form: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, param: str) -> Wanted:
    if isinstance(form, StructuralTagFormat):
        return _of_structures(form, param)
    if isinstance(form, JsonObjectFormat):
        schema, is_strict = form.schema, False
        param = param if schema is None else f"{param}.schema"
    else:
        schema, is_strict = form.json_schema.schema, bool(form.json_schema.strict)
        param = f"{param}.json_schema.schema"
    return Wanted("json", _ANY_OBJECT, param) if schema is None else _of_schema(schema, param, strict=is_strict)


def _of_schema(schema: str | Schema, param: str, *, strict: bool = False) -> Wanted:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=Schema)
        except msgspec.DecodeError as error:
            raise InvalidAsk(f"'{param}' is not a JSON schema: {error}.", param) from None
    return Wanted("json", _compact(_held(schema, param)), param, strict)


def _held(schema: Schema, param: str) -> Schema:
    """What of a schema is enforced."""
    try:
        return without_annotations(schema)
    except TooManySchemas:
        raise InvalidAsk(f"The schema in '{param}' is too large.", param) from None
    except (NumberTooLarge, UnresolvedReference) as error:
        raise InvalidAsk(f"The schema in '{param}' cannot be enforced: {error}.", param) from None


def _compact(schema: Schema) -> str:
    # Not by msgspec, which does not write the integers beyond 64 bits that it reads.
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _of_regex(regex: str, param: str) -> Wanted:
    return Wanted("regex", regex, param)


def _of_grammar(grammar: str, param: str) -> Wanted:
    return Wanted("grammar", grammar, param)


def _of_choice(choices: list[str], param: str) -> Wanted:
    # An expression compiles in half the time of a grammar's alternatives.
    return Wanted("regex", "|".join(re.escape(one) for one in choices), param)


def _of_tags(tags: str | Schema, param: str) -> Wanted:
    try:
        given = msgspec.json.decode(tags) if isinstance(tags, str) else tags
        form = msgspec.convert({"type": "structural_tag", **given}, StructuralTagFormat)
    # TypeError: the document is no object.
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError) as error:
        raise InvalidAsk(
            f"'{param}' cannot be read: {error}. It needs 'structures', each with 'begin', 'schema' and 'end', and"
            " 'triggers'.",
            param,
        ) from None
    return _of_structures(form, param)


def _of_structures(form: StructuralTagFormat, param: str) -> Wanted:
    for index, one in enumerate(form.structures):
        if not any(one.begin.startswith(trigger) for trigger in form.triggers):
            where = f"{param}.structures.{index}.begin"
            raise InvalidAsk(f"'{where}' starts with none of the triggers.", where)
    tags = {
        "triggers": form.triggers,
        "structures": [
            [one.begin, _held(one.schema, f"{param}.structures.{index}.schema"), one.end]
            for index, one in enumerate(form.structures)
        ],
    }
    return Wanted("tags", _compact(tags), param)
