"""A JSON schema as a grammar is made of it: without what constrains nothing, complete in itself, with numbers that fit.

Descriptions are often most of a schema that a program wrote. A property may be called `title` as well, so a word is an
annotation only where a schema stands, and what no keyword here says to be a schema is left as it is. References are
resolved here, since the library's messages name its own places instead of the client's.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from nodes.asks.schema_numbers import Schema, fit_numbers
from nodes.asks.schema_refs import AnySchema, SchemaDocument

_CUT: Final = frozenset(
    {
        "title",
        "description",
        "examples",
        "example",
        "default",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        # llguidance's own options: which whitespace is allowed is the server's decision.
        "x-guidance",
        # What is pointed to is kept under other names.
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
    }
)
_ONE: Final = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_MANY: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_BY_NAME: Final = frozenset({"dependencies", "dependentSchemas", "patternProperties", "properties"})
_DIALECT: Final = re.compile(r"https?://json-schema\.org/draft(-0[4-7]|/2019-09|/2020-12)/schema#?")
"""llguidance takes each of them in one spelling, and refuses all others."""
_IN_PATTERNS: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
"""What has to be told apart in a regular expression: escapes, classes, look-around."""
_UNENFORCED_ESCAPES: Final = frozenset("123456789kbBcZG")
MAX_SCHEMAS: Final = 32_768
"""A schema takes at least two bytes, and 64 KiB are sent. Looking at so many takes a gateway 50 ms."""


class TooManySchemas(ValueError):
    """There are more than `MAX_SCHEMAS` schemas in a schema."""


def without_annotations(
    schema: Mapping[str, Any], document: SchemaDocument | None = None, *, with_all_patterns: bool = True
) -> Schema:
    """A copy without annotations; the order of properties is kept, since it is the order of what is drawn.

    `document`: where its references are looked up, itself if not given. What they lead to, and nothing else, is under
    `$defs` of the copy. `with_all_patterns`: also those that no grammar takes. Raises TooManySchemas, NumberTooLarge,
    UnresolvedReference.
    """
    return _Copy(document or SchemaDocument(schema), with_all_patterns=with_all_patterns).of(schema)


def is_enforceable(pattern: str) -> bool:
    """Whether a grammar may hold a text to this regular expression: one with look-around or back-references none."""
    found = _IN_PATTERNS.findall(pattern)
    return not any(one[0] == "(" or (one[0] == "\\" and one[1] in _UNENFORCED_ESCAPES) for one in found)


class _Copy:
    """Copies are made one after the other, not by recursion: clients choose how deep a schema is."""

    def __init__(self, document: SchemaDocument, *, with_all_patterns: bool) -> None:
        self._document = document
        self._with_all_patterns = with_all_patterns
        self._whole: Schema = {}
        self._left: list[tuple[Mapping[str, Any], Schema]] = []
        self._num_seen = 0
        # Where in the copy those are that are pointed to, by identity.
        self._places: dict[int, str] = {}
        self._kept: dict[str, Any] = {}

    def of(self, schema: Mapping[str, Any]) -> Schema:
        self._places[id(schema)] = "#"
        self._left.append((schema, self._whole))
        while self._left:
            source, copy = self._left.pop()
            self._num_seen += 1
            if self._num_seen + len(self._left) > MAX_SCHEMAS:
                raise TooManySchemas
            self._fill(copy, source)
            fit_numbers(copy)
        return {**self._whole, "$defs": self._kept} if self._kept else self._whole

    def _fill(self, copy: Schema, source: Mapping[str, Any]) -> None:
        for key, value in source.items():
            # Go's structs have null where a keyword is not given (`"required": null`); only a constant may be null.
            if value is None and key != "const":
                continue
            if key == "$ref":
                copy[key] = self._place(self._document.target(source))
            elif key == "$schema":
                if isinstance(value, str) and copy is self._whole and (dialect := _DIALECT.fullmatch(value)):
                    draft = dialect[1]
                    copy[key] = f"http{'' if draft[0] == '-' else 's'}://json-schema.org/draft{draft}/schema"
            elif key in _CUT or self._is_left_out(key, value):
                continue
            elif key in _BY_NAME and isinstance(value, Mapping):
                copy[key] = {name: self._copied(one) for name, one in cast("Mapping[str, Any]", value).items()}
            elif key in _MANY and isinstance(value, list):
                copy[key] = [self._copied(one) for one in cast("list[Any]", value)]
            else:
                copy[key] = self._copied(value) if key in _ONE else value

    def _is_left_out(self, key: str, value: Any) -> bool:
        is_pattern = key == "pattern" and isinstance(value, str)
        return is_pattern and not self._with_all_patterns and not is_enforceable(value)

    def _copied(self, one: Any) -> Any:
        if not isinstance(one, Mapping):
            return one
        copy: Schema = {}
        self._left.append((cast("Mapping[str, Any]", one), copy))
        return copy

    def _place(self, schema: AnySchema) -> str:
        """Where in the copy a schema is, once for all that point to it."""
        schema = self._document.follow(schema)
        place = self._places.get(id(schema))
        if place is None:
            name = str(len(self._kept))
            place = self._places[id(schema)] = f"#/$defs/{name}"
            self._kept[name] = self._copied(schema)
        return place
