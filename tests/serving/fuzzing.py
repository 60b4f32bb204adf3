"""Bodies drawn from the server's own schema, one or two of their values replaced by what nobody should send."""

import http.client
import json
from typing import Any, NamedTuple

from hypothesis import strategies as st

from nodes.gateway.fields.unsupported import NEUTRAL_VALUES

Schema = dict[str, Any]

# JSON as text: what `json.dumps` would not write is among it.
HOSTILE = (
    "null", "true", "0", "-1", "1.5", "1e400", "-1e-400", "NaN", "Infinity", "-0", "9" * 400, str(2**63), str(-(2**63)),
    str(2**31 - 1), str(2**128), '""', '"\\ud800"', '"\\udc00\\ud800x"', '"\\u0000"', '"' + "x" * 5000 + '"',
    '"\\ud83d\\ude00"', "[]", "{}", "[null]", "[[]]", "[[],[]]", '{"":null}', "[" + "0," * 20_000 + "0]", "{",
    "[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600, '"unended', "[1,]", '["a", 1, [2]]',
    '{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}', '"{{ 7*7 }}{% for i in range(10**9) %}"',
)  # fmt: skip
LONGEST_TEXT = 40
ENDS = (
    b"data: [DONE]", b"event: response.completed", b"event: response.incomplete", b"event: message_stop",
)  # fmt: skip
"""How a stream begins its last event."""


class Route(NamedTuple):
    """One operation of the document."""

    method: str
    path: str
    body: Schema | None
    statuses: frozenset[int]


def routes_of(document: dict[str, Any]) -> list[Route]:
    routes: list[Route] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody")
            schema = body["content"]["application/json"]["schema"] if body else None
            statuses = frozenset(map(int, operation["responses"]))
            routes.append(Route(method.upper(), path, schema, statuses))
    return routes


def valid(schema: Schema, schemas: dict[str, Schema]) -> st.SearchStrategy[Any]:
    """Values that the schema allows, small ones."""
    if "$ref" in schema:
        return valid(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        # To leave a field out says the same as null.
        return st.one_of([valid(choice, schemas) for choice in schema["anyOf"] if choice.get("type") != "null"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "string":
            longest = min(schema.get("maxLength", LONGEST_TEXT), LONGEST_TEXT)
            return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=longest)
        case "integer":
            return st.integers(schema.get("minimum", 0), min(schema.get("maximum", 300), 300))
        case "number":
            low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 1)
            return st.floats(low, high, exclude_min="exclusiveMinimum" in schema)
        case "boolean":
            return st.booleans()
        case "array":
            items = valid(schema.get("items", {}), schemas)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" in schema:
            return objects(schema, schemas)
        case "object":
            keys = st.from_regex(r"\A[0-9a-z]{1,3}\Z")
            return st.dictionaries(keys, valid(schema.get("additionalProperties", {}), schemas), max_size=3)
        case _:
            return st.none()


def served_fields(schema: Schema) -> dict[str, Schema]:
    """Without those that are only declared to be refused, which a test of the validation goes through."""
    return {name: field for name, field in schema["properties"].items() if name not in NEUTRAL_VALUES}


def objects(schema: Schema, schemas: dict[str, Schema]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the required fields and a few of the others."""
    fields, required = served_fields(schema), schema.get("required", ())
    strategies = {name: valid(field, schemas) for name, field in fields.items() if name != "model"}
    if schema["title"] == "ContentPart":
        strategies["type"] = st.just("text")
    must = {name: strategies.pop(name) for name in required}
    few = st.lists(st.sampled_from(sorted(strategies)), max_size=4, unique=True) if strategies else st.just([])
    return few.flatmap(lambda names: st.fixed_dictionaries(must | {name: strategies[name] for name in names}))


@st.composite
def bodies(draw: st.DrawFn, schema: Schema, schemas: dict[str, Schema]) -> bytes:
    """A body: valid, or with hostile values in some fields, fields twice, bytes cut off or replaced."""
    body = draw(valid(schema, schemas))
    fields = [(name, json.dumps(value)) for name, value in body.items()]
    names = sorted(served_fields(schemas[schema["$ref"].rpartition("/")[2]]))
    for _ in range(draw(st.integers(0, 2))):
        fields.append((draw(st.sampled_from(names)), draw(st.sampled_from(HOSTILE))))
    if draw(st.integers(0, 3)) == 0 and fields:
        fields.append(draw(st.sampled_from(fields)))
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields) + "}"
    data = text.encode("utf-8", "surrogatepass")
    match draw(st.integers(0, 9)):
        case 0:
            return data[: draw(st.integers(0, len(data)))]
        case 1:
            at = draw(st.integers(0, len(data)))
            return data[:at] + draw(st.binary(max_size=8)) + data[at:]
        case _:
            return data


class Exchange(NamedTuple):
    status: int
    content_type: str
    body: bytes


class Client:
    """One connection at a time, kept as long as the server keeps it."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Exchange:
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        return Exchange(response.status, response.headers.get("content-type", ""), response.read())

    def close(self) -> None:
        self._connection.close()


def check(exchange: Exchange, statuses: frozenset[int], what: object) -> None:
    """The status is one that the document names and no 5xx, and an error has its surface's form, in a stream too."""
    assert exchange.status in statuses, (exchange, what)
    assert exchange.status < 500, (exchange, what)
    if exchange.status >= 400:
        check_error(json.loads(exchange.body), what)
    elif exchange.content_type.startswith("text/event-stream"):
        events = [event for event in exchange.body.split(b"\n\n") if event]
        assert events[-1].startswith(ENDS), (exchange.body[-500:], what)
        told = [json.loads(event.partition(b"data: ")[2]) for event in events if event != ENDS[0]]
        assert all("error" not in event and event.get("type") != "error" for event in told), what
    elif exchange.content_type.startswith("application/json"):
        json.loads(exchange.body)


def check_error(answer: Any, what: object) -> None:
    error = answer["error"]
    if answer.get("type") == "error":
        assert set(answer) == {"type", "error", "request_id"}, (answer, what)
        assert set(error) == {"type", "message"}, (answer, what)
        assert error["message"], what
        return
    assert set(answer) == {"error"}, (answer, what)
    assert set(error) - {"request_id"} == {"message", "type", "param", "code"}, (answer, what)
    assert isinstance(error["message"], str), what
    assert error["message"], what
    assert isinstance(error["type"], str), what
    assert error["param"] is None or isinstance(error["param"], str), what
