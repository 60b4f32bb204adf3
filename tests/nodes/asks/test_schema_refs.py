"""References within a schema: each leads to the very schema that it names, or is refused by name."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.asks.schema_annotations import without_annotations
from nodes.asks.schema_refs import SchemaDocument, UnresolvedReference

DOCUMENT: Any = {
    "$id": "https://example.com/tool",
    "properties": {
        "g": {"type": "integer"},
        "list": {"type": "array", "items": {"title": "item"}},
        "either": {"anyOf": [{"title": "first"}, False]},
        "hello%20world": {"title": "as it stands"},
        "": {"title": "no name"},
    },
    "$defs": {
        "a/b": {"title": "slash"},
        "a b": {"title": "blank"},
        "a~b": {"title": "tilde"},
        "~1": {"title": "tilde and one"},
        "größe": {"title": "letters"},
        "Rate%": {"title": "percent"},
        "here": {"$anchor": "there", "title": "anchored"},
        "old": {"$id": "#before", "title": "anchored before there were anchors"},
        "inner": {"$id": "other", "$defs": {"x": {"title": "of the inner one"}}, "items": {"$ref": "#/$defs/x"}},
        "chain": {"$ref": "#/$defs/chained"},
        "chained": {"$ref": "#/$defs/a~1b"},
    },
    "definitions": {"a": {"title": "before $defs"}},
}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", DOCUMENT),
        ("", DOCUMENT),
        ("https://example.com/tool", DOCUMENT),
        ("#/properties/g", DOCUMENT["properties"]["g"]),
        ("https://example.com/tool#/properties/g", DOCUMENT["properties"]["g"]),
        ("#/properties/list/items", DOCUMENT["properties"]["list"]["items"]),
        ("#/properties/either/anyOf/0", DOCUMENT["properties"]["either"]["anyOf"][0]),
        ("#/properties/either/anyOf/1", False),
        ("#/properties/", DOCUMENT["properties"][""]),
        ("#/properties/hello%20world", DOCUMENT["properties"]["hello%20world"]),
        ("#/%24defs/a~1b", DOCUMENT["$defs"]["a/b"]),
        ("#/$defs/a%7E1b", DOCUMENT["$defs"]["a/b"]),
        ("#/$defs/a%20b", DOCUMENT["$defs"]["a b"]),
        ("#/$defs/a b", DOCUMENT["$defs"]["a b"]),
        ("#/$defs/a~0b", DOCUMENT["$defs"]["a~b"]),
        ("#/$defs/~01", DOCUMENT["$defs"]["~1"]),
        ("#/$defs/gr%C3%B6%C3%9Fe", DOCUMENT["$defs"]["größe"]),
        ("#/$defs/Rate%25", DOCUMENT["$defs"]["Rate%"]),
        ("#/$defs/Rate%", DOCUMENT["$defs"]["Rate%"]),
        ("#there", DOCUMENT["$defs"]["here"]),
        ("#before", DOCUMENT["$defs"]["old"]),
        ("other#/$defs/x", DOCUMENT["$defs"]["inner"]["$defs"]["x"]),
        ("/other", DOCUMENT["$defs"]["inner"]),
        ("#/definitions/a", DOCUMENT["definitions"]["a"]),
    ],
)
def test_references(reference: str, found: Any) -> None:
    whole = {**DOCUMENT, "items": {"$ref": reference}}
    target = SchemaDocument(whole).target(whole["items"])
    assert target is whole if found is DOCUMENT else target is found


def test_a_reference_begins_at_the_schema_with_an_id_that_it_is_in() -> None:
    inner = DOCUMENT["$defs"]["inner"]
    assert SchemaDocument(DOCUMENT).target(inner["items"]) is inner["$defs"]["x"]


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("#/$defs/none", "where the schema has none"),
        ("#/$defs/a/b", "where the schema has none"),
        ("#/properties/either/anyOf/2", "where the schema has none"),
        ("#/properties/either/anyOf/-1", "where the schema has none"),
        ("#/properties/either/anyOf", "where the schema has none"),
        ("#/properties/g/type", "where the schema has none"),
        ("#nowhere", "where the schema has none"),
        ("/$defs/a", "which is outside of the schema"),
        ("schema.json#/$defs/a", "which is outside of the schema"),
        ("http://[", "which is outside of the schema"),
        (7, "which is no text"),
    ],
)
def test_references_to_nothing_are_refused_by_name(reference: Any, why: str) -> None:
    whole = {**DOCUMENT, "items": {"$ref": reference}}
    with pytest.raises(UnresolvedReference) as caught:
        SchemaDocument(whole).target(whole["items"])
    assert str(caught.value) == f"'$ref' is '{reference}', {why}"


def test_what_leads_back_to_itself() -> None:
    whole = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(UnresolvedReference, match="leads back to itself"):
        SchemaDocument(whole).follow(whole["$defs"]["a"])
    assert SchemaDocument(DOCUMENT).follow(DOCUMENT["$defs"]["chain"]) is DOCUMENT["$defs"]["a/b"]


def test_a_copy_is_complete_in_itself() -> None:
    node: Any = {
        "$ref": "#/definitions/Node",
        "$schema": "https://json-schema.org/draft-07/schema#",
        "definitions": {
            "Node": {"title": "t", "properties": {"next": {"$ref": "#"}, "n": {"$ref": "#/definitions/a~1b%20c"}}},
            "a/b c": {"type": "integer", "description": "d"},
            "unused": {"type": "string"},
        },
    }
    assert without_annotations(node) == {
        "$ref": "#/$defs/0",
        # llguidance knows each dialect by one name.
        "$schema": "http://json-schema.org/draft-07/schema",
        "$defs": {
            "0": {"properties": {"next": {"$ref": "#"}, "n": {"$ref": "#/$defs/1"}}},
            "1": {"type": "integer"},
        },
    }
    assert without_annotations({"$schema": "https://example.com/dialect", "type": "object"}) == {"type": "object"}
    of_one = without_annotations(node["definitions"]["Node"]["properties"]["next"], SchemaDocument(node))
    assert of_one["$ref"] == "#/$defs/0"
    assert of_one["$defs"]["0"] == {"$ref": "#/$defs/1"}


KEYS = st.text(st.sampled_from('ab/~%#01 ?ß"$'), max_size=4)
TREES = st.recursive(
    st.just({}),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=12,
)


def schemas_in(tree: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        yield way, tree
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from schemas_in(inner, (*way, str(key)))


@given(TREES, st.sampled_from(["", "/", "/$~!()", "/$~!()#?% ß"]))
def test_every_pointer_leads_to_the_schema_that_it_was_made_for(tree: Any, safe: str) -> None:
    whole: dict[str, Any] = {"x": tree}
    document = SchemaDocument(whole)
    for way, schema in schemas_in(whole):
        pointer = "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in way)
        # Only what is not decoded by accident may stand as it is.
        fragment = quote(pointer, safe=safe if "%" not in safe or "%" not in pointer else "/")
        assert document.target({"$ref": "#" + fragment}) is schema
