"""What a tool's schema says of each parameter, for those who read and write values that are no JSON. Pure.

What it says elsewhere counts: behind references, in parts that all hold, in alternatives.
"""

from collections.abc import Mapping
from functools import cached_property, reduce
from itertools import product
from typing import Any, Final, NamedTuple, TypeVar, cast

from nodes.asks.schema_annotations import MAX_SCHEMAS, TooManySchemas
from nodes.asks.schema_refs import SchemaDocument, UnresolvedReference

_T = TypeVar("_T")
_MAX_DEPTH: Final = 16
"""Of unions in unions, which clients choose; what is deeper is passed over."""
_MAX_WAYS: Final = 64
"""To write one tool's arguments: each is a part of its grammar."""
TEXT_TYPES: Final = frozenset({"string", "str", "text", "varchar", "char", "enum"})
_KINDS: Final[Mapping[type[Any], str]] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"
}  # fmt: skip
_OF_OBJECTS: Final = ("properties", "additionalProperties", "patternProperties", "required")
_OF_ARRAYS: Final = ("items", "prefixItems")


class Allowed(NamedTuple):
    """`types`: those that values may have, in the client's words; none if a schema is silent. `texts`: the only texts
    that may be, None for any; `others`: the same of values that are no texts. `is_open`: other types may be too.
    """

    types: frozenset[str] = frozenset()
    texts: tuple[str, ...] | None = None
    others: tuple[Any, ...] | None = None
    is_open: bool = False

    @property
    def is_text(self) -> bool:
        """Whether every value is a string as it stands, so that it can go out before its end is seen."""
        return self.types <= TEXT_TYPES and self.texts is None

    @property
    def other_types(self) -> frozenset[str]:
        """Types of which a value may be if it is no text; of those that are listed, if they are."""
        found = self.types - TEXT_TYPES
        if self.others is None:
            return found
        listed = {type_of(one) for one in self.others}
        return found & (listed | ({"number"} if "integer" in listed else set()))


class Way(NamedTuple):
    """A way to write a tool's arguments: schemas of values by name, the names that have to be there, the schema of
    values of other names if there is one.
    """

    properties: Mapping[str, Any]
    required: frozenset[str]
    rest: Any = None


class Parameters:
    """Of one tool. Clients choose what is looked at, so there is a limit to it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.document: Final = SchemaDocument(schema)
        # By identity, with the schema: it has to be there as long as its identity counts.
        self._known: dict[int, tuple[Any, Allowed]] = {}
        # The same while one schema is looked at; None: what is made of itself is being looked at.
        self._within: dict[int, Allowed | None] = {}
        self._is_circular = False
        self._num_seen = 0

    def allowed(self, schema: Any) -> Allowed:
        """What a schema of this tool says of values; that they are strings if it says nothing. Raises ValueError."""
        self._within, self._is_circular = {}, False
        said = self._allowed(schema, 0) or Allowed()
        return said if said.types else said._replace(types=frozenset({"string"}))

    def of_key(self, key: str) -> Allowed:
        """What the tool says of a parameter's value, in whatever way its arguments are written."""
        try:
            found = [way.properties[key] for way in self.ways if key in way.properties]
            return _either([self.allowed(one) for one in found or [way.rest for way in self.ways]])
        except ValueError:
            return Allowed(frozenset({"string"}))

    @property
    def names(self) -> frozenset[str]:
        """Names of parameters that the tool describes."""
        try:
            return frozenset(key for way in self.ways for key in way.properties)
        except ValueError:
            return frozenset()

    @cached_property
    def ways(self) -> list[Way]:
        """All of them. Raises ValueError if there are too many, or what they are cannot be read."""
        return [_way(parts) for parts in self._parts(self.document.whole, 0)]

    def _parts(self, schema: Any, depth: int) -> list[list[Mapping[str, Any]]]:
        """For each way the schemas of objects that hold together."""
        if not isinstance(schema, Mapping):
            return [[]]
        if depth > _MAX_DEPTH:
            raise ValueError("what its parameters are is nested too deeply")
        given = cast("Mapping[str, Any]", schema)
        together: list[list[list[Mapping[str, Any]]]] = [[[given]]]
        if "$ref" in given:
            together.append(self._parts(self.document.target(given), depth + 1))
        together += [self._parts(one, depth + 1) for one in listed_in(given, "allOf")]
        for key in ("anyOf", "oneOf"):
            if options := listed_in(given, key):
                together.append([way for one in options for way in self._parts(one, depth + 1)])
        if reduce(lambda number, ways: number * len(ways), together, 1) > _MAX_WAYS:
            raise ValueError(f"there are more than {_MAX_WAYS} ways to write them")
        return [[part for parts in chosen for part in parts] for chosen in product(*together)]

    def _allowed(self, schema: Any, depth: int) -> Allowed | None:
        """None: it is being looked at, as it is made of itself, or is too deep."""
        if schema is False:
            return Allowed(frozenset(), (), ())
        if not isinstance(schema, Mapping):
            return Allowed()
        if depth > _MAX_DEPTH:
            self._is_circular = True
            return None
        names = cast("Mapping[str, Any]", schema)
        if id(names) in self._known:
            return self._known[id(names)][1]
        if id(names) in self._within:
            found = self._within[id(names)]
            self._is_circular = self._is_circular or found is None
            return found
        self._num_seen += 1
        if self._num_seen > MAX_SCHEMAS:
            raise TooManySchemas("it has too many schemas")
        self._within[id(names)] = None
        said = self._within[id(names)] = self._said(names, depth)
        if said is not None and (not self._is_circular or depth == 0):
            self._known[id(names)] = names, said
        return said

    def _said(self, names: Mapping[str, Any], depth: int) -> Allowed | None:
        parts: list[Allowed | None] = [_of_itself(names)]
        if "$ref" in names:
            parts.append(self._pointed(names, depth))
        parts += self._each(listed_in(names, "allOf"), depth)
        for key in ("anyOf", "oneOf"):
            options = [one for one in self._each(listed_in(names, key), depth) if one is not None]
            parts.append(_either(options) if options else None if key in names else Allowed())
        said = reduce(_both, (part for part in parts if part is not None))
        if not said.types and said.texts is None:
            if None in parts:
                return None
            # Not all schemas name the type of what they speak of.
            shapes = (("object", _OF_OBJECTS), ("array", _OF_ARRAYS))
            said = said._replace(types=frozenset(kind for kind, keys in shapes if any(key in names for key in keys)))
        return _without_what_cannot_be(said)

    def _each(self, schemas: list[Any], depth: int) -> list[Allowed | None]:
        return [self._allowed(one, depth + 1) for one in schemas]

    def _pointed(self, schema: Mapping[str, Any], depth: int) -> Allowed | None:
        try:
            return self._allowed(self.document.target(schema), depth + 1)
        except UnresolvedReference:
            # Most references lead to one.
            return Allowed(frozenset({"object"}))


def _way(parts: list[Mapping[str, Any]]) -> Way:
    held: dict[str, list[Any]] = {}
    required: set[str] = set()
    rest: list[Any] = []
    named = [(part, _properties(part)) for part in parts]
    for part, properties in named:
        for key, schema in properties.items():
            held.setdefault(key, []).append(schema)
        names: Any = part.get("required", [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in cast("list[Any]", names)):
            raise ValueError("'required' is no list of names")
        required.update(cast("list[str]", names))
    for part, properties in named:
        others: Any = part.get("additionalProperties", True)
        if others is not True and "patternProperties" not in part:
            rest.append(others)
            for key in held.keys() - properties.keys():
                held[key].append(others)
    return Way({key: _together(schemas) for key, schemas in held.items()}, frozenset(required), _together(rest))


def _properties(part: Mapping[str, Any]) -> Mapping[str, Any]:
    properties: Any = part.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' is no object")
    return cast("Mapping[str, Any]", properties)


def _together(schemas: list[Any]) -> Any:
    return {"allOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else True


def listed_in(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The schemas or values under a key of a schema."""
    # What is no list is refused by the schema's own check.
    found: Any = schema.get(key)
    return cast("list[Any]", found) if isinstance(found, list) else []


def _of_itself(schema: Mapping[str, Any]) -> Allowed:
    """What a schema says without those in it."""
    kind: Any = schema.get("type")
    types = cast("list[Any]", kind) if isinstance(kind, list) else [kind] if isinstance(kind, str) else []
    named = frozenset(str(one).strip().lower() for one in types)
    listed = [schema["const"]] if "const" in schema else listed_in(schema, "enum") if "enum" in schema else None
    if listed is None:
        return Allowed(named)
    texts = tuple(one for one in listed if isinstance(one, str))
    others = tuple(one for one in listed if not isinstance(one, str))
    return Allowed(named or frozenset(map(type_of, listed)), texts, others)


def _both(one: Allowed, other: Allowed) -> Allowed:
    """What both say; what one leaves open the other one says."""
    texts, others = _in_both(one.texts, other.texts), _in_both(one.others, other.others)
    if not other.types or (other.is_open and one.types):
        return Allowed(one.types, texts, others, one.is_open)
    if not one.types or one.is_open:
        return Allowed(other.types, texts, others, other.is_open)
    found = one.types & other.types
    if "integer" in one.types | other.types and "number" in one.types | other.types:
        found |= {"integer"}
    return Allowed(found or one.types | other.types, texts, others)


def _in_both(one: tuple[_T, ...] | None, other: tuple[_T, ...] | None) -> tuple[_T, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    return tuple(value for value in one if value in other)


def _either(options: list[Allowed]) -> Allowed:
    types = frozenset(kind for option in options for kind in option.types)
    is_open = not all(option.types for option in options)
    return Allowed(
        types | {"string"} if types and is_open else types,
        _in_any([option.texts for option in options]),
        _in_any([option.others for option in options]),
        is_open and bool(types),
    )


def _in_any(options: list[tuple[_T, ...] | None]) -> tuple[_T, ...] | None:
    known = [option for option in options if option is not None]
    return tuple(value for option in known for value in option) if len(known) == len(options) else None


def _without_what_cannot_be(said: Allowed) -> Allowed:
    """With no texts where only other types may be, and the reverse."""
    if not said.types:
        return said
    texts = said.texts if said.types & TEXT_TYPES else ()
    return said._replace(
        texts=texts and tuple(dict.fromkeys(texts)), others=() if said.types <= TEXT_TYPES else said.others
    )


def type_of(value: Any) -> str:
    """The type of a value that JSON says."""
    return _KINDS.get(type(cast("object", value)), "object")
