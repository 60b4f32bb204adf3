"""One example of every message, with every field set, made from the types; and its golden vector."""

from typing import Any, Final

import msgspec
from msgspec import inspect

from kvstore.hashing import HASH_BYTES
from mesh.wire.frames import SYSTEM_CODEC, SystemMessage
from mesh.wire.header import PROTOCOL_VERSION, Header, Verb, encode_header
from mesh.wire.message import HotMessage
from nodes.protocol import HotNodeMessage, Load, NodeMessage
from nodes.roles import NODE_CODEC

CODECS: Final = {"system": SYSTEM_CODEC, "node": NODE_CODEC}


def message_types() -> list[tuple[str, type]]:
    """All messages that cross the wire: (`system` or `node`, class), in the order of their unions."""
    unions = (("system", SystemMessage), ("node", NodeMessage), ("node", HotNodeMessage))
    return [(protocol, kind) for protocol, union in unions for kind in union.__args__]


def sample(kind: type) -> Any:
    """An example whose values show their fields: a text is its field's name, a number the length of that name."""
    return _value(inspect.type_info(kind), kind.__name__)


def _value(info: inspect.Type, name: str) -> Any:
    match info:
        case inspect.StructType():
            return info.cls(**{field.name: _field(field) for field in info.fields})
        case inspect.ListType(item_type=inspect.UnionType() as union):
            return [_value(member, name) for member in union.types]
        case inspect.ListType():
            return [_value(info.item_type, name)]
        case inspect.DictType():
            return {_value(info.key_type, name): _value(info.value_type, name)}
        case inspect.UnionType():
            return _value(next(t for t in info.types if not isinstance(t, inspect.NoneType)), name)
        case inspect.IntType():
            return len(name)
        case inspect.FloatType():
            return len(name) + 0.5
        case inspect.BytesType():
            # As long as a hash, and four token ids: what a message checks of its bytes holds.
            return name.encode().ljust(HASH_BYTES, b"\0")
        case inspect.BoolType():
            return True
        case inspect.RawType():
            return msgspec.Raw(NODE_CODEC.encode(sample(Load)))
        case inspect.StrType() | inspect.AnyType():
            return name
        case _:
            raise TypeError(f"no example of {info} is known; add one here")


def _field(field: inspect.Field) -> Any:
    # Defaults are left out of maps, so an example shows another value.
    return False if field.default is True else _value(field.type, field.name)


def plain(value: Any) -> Any:
    """A message as JSON values: structs by field name, bytes as `{"hex": ...}`."""
    match value:
        case msgspec.Struct():
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case bytes() | msgspec.Raw():
            return {"hex": bytes(value).hex()}
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case _:
            return value


def body_vector(protocol: str, message: Any) -> dict[str, Any]:
    """A golden vector of one body."""
    form = "array" if isinstance(message, HotMessage) else "map"
    encoded = CODECS[protocol].encode(message)
    return {
        "protocol": protocol, "type": type(message).__name__, "form": form,
        "value": plain(message), "hex": encoded.hex(),
    }  # fmt: skip


def header_vectors() -> list[dict[str, Any]]:
    """A golden vector of the header of each verb."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = [
        Header(PROTOCOL_VERSION, v, 7, (1 << 32) + 3, 5, "custom-0", 2, 9, 1_500_000, int(v != Verb.TELL), 0, trace)
        for v in Verb
    ]
    return [{"verb": Verb(h.verb).name.lower(), "value": plain(h), "hex": encode_header(h).hex()} for h in headers]


def all_vectors() -> dict[str, Any]:
    """The content of `tests/golden/vectors.json`."""
    bodies = [body_vector(protocol, sample(kind)) for protocol, kind in message_types()]
    return {"protocol_version": PROTOCOL_VERSION, "headers": header_vectors(), "bodies": bodies}
