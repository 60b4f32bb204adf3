"""The last events of a core as data, so that a failure in the field can be replayed in a test.

`EventRecorder` keeps events unchanged, which costs half a microsecond each; only after a failure does `Writer` turn
them into data, and `Reader` turns that data back into events. Every value keeps its type by name. Only classes of
modules that the reader names can be made, so a forged log can build nothing else.

    struct, named tuple    {"_": "nodes.gateway.requests.events.Opened", field: value, …}
    bytes                  {"_": "bytes", "size": 12}          their content is never written
    anything else          {"_": "object", "number": 3}        for example a call: one object, one number
"""

import enum
import inspect
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import msgspec

Event = TypeVar("Event")

MAX_EVENTS: Final = 1000
"""Some hundred steps of a scheduler: what led to a failure is most often among them, and they fit the log (1 MB)."""
MAX_HELD_BYTES: Final = 4 << 20
"""Estimated size of the events kept in case of a failure: a busy gateway's thousand would take a hundred MB."""
MAX_WRITTEN_BYTES: Final = 1 << 20
"""Size of one failure in the log, which is rotated by size."""

LOOK_EVERY: Final = 32
"""How many events of a kind share one size estimate. They are mostly alike, and estimating one takes 10 µs, several
times a step. After a large one, the next one is estimated too."""
_LARGE_BYTES: Final = 65_536
"""32 events of this size, for which one estimate counts, are half of `MAX_HELD_BYTES`."""
_UNKNOWN: Final = (0, 0)

TAG: Final = "_"
_ITEM_BYTES: Final = 8
"""A pointer: small numbers are shared, and others are few."""
_STRUCT_BYTES: Final = 320
"""A struct of some ten fields with a short text or two; only its order of magnitude matters."""
_DEPTH: Final = 3
"""An event, its message, the message's items: large lists and buffers are no deeper."""

Redact = Callable[[str, Any], Any]
"""Maps a field's name and value to the value written in its place; called for each field before it becomes data."""


class Recorded(NamedTuple, Generic[Event]):
    """An event, and when it was handled, in seconds of the actor's clock."""

    at: float
    event: Event


def keep_all(_: str, value: Any) -> Any:
    return value


class EventRecorder(Generic[Event]):
    """A ring of the last events, bounded in number and, roughly, in size."""

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._events: deque[tuple[int, float, Event]] = deque()
        # For each kind of event: how many more to count with the last estimated size, and that size.
        self._sizes: dict[type, tuple[int, int]] = {}
        self._num_bytes = 0
        self.num_seen = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, at: float, event: Event) -> None:
        """Add an event; drop the oldest if they are too many or too large. The newest stays, whatever its size."""
        kind = type(event)
        num_left, size = self._sizes.get(kind, _UNKNOWN)
        if num_left:
            self._sizes[kind] = (num_left - 1, size)
        else:
            size = _estimate(event, _DEPTH)
            self._sizes[kind] = (LOOK_EVERY - 1 if size < _LARGE_BYTES else 0, size)
        events = self._events
        events.append((size, at, event))
        self.num_seen += 1
        self._num_bytes += size
        while len(events) > self._max_events or (self._num_bytes > self._max_bytes and len(events) > 1):
            self._num_bytes -= events.popleft()[0]

    def events(self) -> list[Recorded[Event]]:
        return [Recorded(at, event) for _, at, event in self._events]


def _estimate(value: Any, depth: int) -> int:
    """Roughly the bytes that an event holds in memory; only lists, buffers and texts are ever large."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    fields = getattr(value, "__struct_fields__", None)
    if fields is not None:
        values: Iterable[Any] = [getattr(value, name) for name in fields]
    elif isinstance(value, tuple) and hasattr(cast("Any", value), "_fields"):
        values = cast("Iterable[Any]", value)
    elif isinstance(value, list | tuple) and value:
        items = cast("list[Any]", value)
        each = _ITEM_BYTES if isinstance(items[0], int | float) else max(_STRUCT_BYTES, _estimate(items[0], depth - 1))
        return len(items) * each
    elif isinstance(value, array):
        return 4 * len(cast("array[int]", value))
    else:
        return _ITEM_BYTES
    if depth <= 0:
        return _STRUCT_BYTES
    return _ITEM_BYTES + sum(_estimate(item, depth - 1) for item in values)


class Writer:
    """Turns values into data that JSON can carry. One per failure, as it numbers the objects that it cannot write."""

    def __init__(self, redact: Redact = keep_all) -> None:
        self._redact = redact
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def write(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, enum.Enum):
            return {TAG: _name(type(value)), "value": value.value}
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if value - value == 0.0 else {TAG: "float", "of": repr(value)}
        if isinstance(value, bytes | bytearray | memoryview):
            return {TAG: "bytes", "size": memoryview(cast("bytes", value)).nbytes}
        if isinstance(value, array):
            return {TAG: "array", "of": list(cast("array[int]", value))}
        return self._write_compound(value)

    def _write_compound(self, value: Any) -> Any:
        fields = getattr(value, "__struct_fields__", getattr(value, "_fields", None))
        if fields is not None:
            data: dict[str, Any] = {TAG: _name(cast("Any", type(value)))}
            data.update({name: self.write(self._redact(name, getattr(value, name))) for name in fields})
            return data
        if isinstance(value, list):
            return [self.write(item) for item in cast("list[Any]", value)]
        if isinstance(value, tuple | set | frozenset):
            name = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "frozenset"
            return {TAG: name, "of": [self.write(item) for item in cast("Iterable[Any]", value)]}
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return {TAG: "dict", "of": [[self.write(key), self.write(item)] for key, item in pairs]}
        number = self._numbers.setdefault(id(value), len(self._numbers) + 1)
        # While it is kept, no other object can have its id.
        self._kept.append(value)
        return {TAG: "object", "number": number, "type": type(value).__name__}

    def write_newest(self, events: list[Recorded[Any]], max_bytes: int = MAX_WRITTEN_BYTES) -> list[dict[str, Any]]:
        """As many of the newest events as fit in `max_bytes` of JSON, oldest first."""
        written: list[dict[str, Any]] = []
        for recorded in reversed(events):
            data = {"at": recorded.at, "data": self.write(recorded.event)}
            max_bytes -= len(msgspec.json.encode(data))
            if max_bytes < 0:
                break
            written.append(data)
        return written[::-1]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Opaque:
    """Stands for an object that was not written, such as a call. One for each number."""

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind} {self.number}>"


class Reader:
    """Turns data back into values. `modules`: those whose classes, own and imported, may be instantiated."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._types = {
            _name(kind): kind
            for module in [*modules, sys.modules["mesh.address"]]
            for _, kind in inspect.getmembers(module, inspect.isclass)
            if hasattr(kind, "__struct_fields__") or hasattr(kind, "_fields") or issubclass(kind, enum.Enum)
        }
        self._opaque: dict[int, Opaque] = {}

    def read(self, data: Any) -> Any:
        """The value of `data`; raises ValueError for a class from none of the modules. Bytes are all zeros."""
        if isinstance(data, list):
            return [self.read(item) for item in cast("list[Any]", data)]
        if not isinstance(data, dict):
            return data
        fields = dict(cast("dict[str, Any]", data))
        name = fields.pop(TAG)
        made = self._read_plain(name, fields)
        if made is not None:
            return made
        kind = self._types.get(name)
        if kind is None:
            raise ValueError(f"the class {name} is in none of the modules given for reading")
        if issubclass(kind, enum.Enum):
            return kind(fields["value"])
        return kind(**{field: self.read(value) for field, value in fields.items()})

    def _read_plain(self, name: str, fields: dict[str, Any]) -> Any:
        match name:
            case "bytes":
                return bytes(fields["size"])
            case "float":
                return float(fields["of"])
            case "array":
                return array("i", fields["of"])
            case "tuple" | "set" | "frozenset":
                make: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[name]
                return make(self.read(item) for item in fields["of"])
            case "dict":
                return {self.read(key): self.read(value) for key, value in fields["of"]}
            case "object":
                number = fields["number"]
                return self._opaque.setdefault(number, Opaque(number, fields["type"]))
            case _:
                return None
