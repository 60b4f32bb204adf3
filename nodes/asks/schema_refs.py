"""What a `$ref` of a JSON schema points to, for all who look into schemas. Pure.

By JSON pointer (RFC 6901), anchor or `$id`. Nothing is fetched: a reference leads to a schema of its document, or
nowhere.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, cast
from urllib.parse import unquote, urljoin

AnySchema: TypeAlias = Mapping[str, Any] | bool
_SHOWN_CHARS: Final = 100
"""Of a reference, in an error: most have 20, and clients choose how long they are."""


class UnresolvedReference(ValueError):
    """A `$ref` leads to no schema of its document; says which."""

    def __init__(self, reference: Any, why: str) -> None:
        super().__init__(f"'$ref' is '{str(reference)[:_SHOWN_CHARS]}', {why}")


class _Names(NamedTuple):
    """`schemas` by URI, with `#` and an anchor or without; `bases`: the URI that references begin from, by identity."""

    schemas: dict[str, Mapping[str, Any]]
    bases: dict[int, str]


class SchemaDocument:
    """A schema with all that is in it, where references are looked up."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self.whole: Final = whole

    def target(self, schema: Mapping[str, Any]) -> AnySchema:
        """The schema that the `$ref` of a schema of this document points to. Raises UnresolvedReference."""
        reference: Any = schema["$ref"]
        if not isinstance(reference, str):
            raise UnresolvedReference(reference, "which is no text")
        part, _, fragment = reference.partition("#")
        schemas, bases = self._names
        base = bases.get(id(schema), "")
        uri = _joined(base, part)
        starts = [one for one in (schemas.get(uri), None if part else self.whole) if one is not None]
        if not starts:
            raise UnresolvedReference(reference, "which is outside of the schema")
        for start in starts:
            # A fragment is decoded before it is a pointer. Not every writer encodes it: then it is as it stands.
            for pointer in (unquote(fragment), fragment):
                found = _at(start, pointer) if pointer[:1] in ("", "/") else schemas.get(f"{uri}#{pointer}")
                if isinstance(found, Mapping | bool):
                    return cast("AnySchema", found)
        raise UnresolvedReference(reference, "where the schema has none")

    def follow(self, schema: AnySchema) -> AnySchema:
        """`schema`, or what it leads to if it is nothing but a `$ref`. Raises UnresolvedReference."""
        seen: set[int] = set()
        while isinstance(schema, Mapping) and "$ref" in schema and len(schema) == 1:
            if id(schema) in seen:
                raise UnresolvedReference(schema["$ref"], "which leads back to itself")
            seen.add(id(schema))
            schema = self.target(schema)
        return schema

    @cached_property
    def _names(self) -> _Names:
        names = _Names({}, {})
        left: list[tuple[Any, str]] = [(self.whole, "")]
        # Not by recursion: clients choose how deep it is.
        while left:
            one, base = left.pop()
            if isinstance(one, list):
                left += [(inner, base) for inner in cast("list[Any]", one)]
            if not isinstance(one, Mapping):
                continue
            schema = cast("Mapping[str, Any]", one)
            own: Any = schema.get("$id")
            if isinstance(own, str) and own[:1] != "#":
                base = _joined(base, own.removesuffix("#"))
                names.schemas.setdefault(base, schema)
            # Before there were anchors, an id with `#` was one.
            anchors = ["#" + schema[key] for key in ("$anchor", "$dynamicAnchor") if isinstance(schema.get(key), str)]
            for anchor in (*anchors, own):
                if isinstance(anchor, str) and anchor[:1] == "#":
                    names.schemas.setdefault(base + anchor, schema)
            names.bases[id(schema)] = base
            left += [(inner, base) for inner in schema.values()]
        return names


def _joined(base: str, part: str) -> str:
    try:
        return urljoin(base, part) if part else base
    # What is no URI is a name like others.
    except ValueError:
        return part


def _at(whole: Any, pointer: str) -> Any:
    """What a pointer leads to; None if nothing."""
    found = whole
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = cast("Mapping[str, Any]", found).get(key)
        elif isinstance(found, list) and key.isdecimal() and len(key) < 10 and int(key) < len(cast("list[Any]", found)):
            found = cast("list[Any]", found)[int(key)]
        else:
            return None
    return found
