"""Markdown made from the code, for the marked parts of `docs/protocol.md`."""

import inspect as pyinspect
import json
import re
from typing import Any, Final

from msgspec import NODEFAULT, inspect

from mesh.wire.header import Header, Verb
from tools.protocol_reference.samples import message_types

_MARK: Final = "<!-- generated: {} -->\n"
_END: Final = "<!-- end -->"
_DUMPED: Final = (0, 3, 8, 11)
"""Frames of the session that are shown byte by byte: hello, welcome, ask, reply."""


def fill(text: str, session: list[dict[str, Any]]) -> str:
    """`docs/protocol.md` with its marked parts rewritten."""
    parts = {"header": header_table(), "verbs": verb_table(), "session": session_list(session),
             "dump": dump(session), "messages": messages()}  # fmt: skip
    for name, content in parts.items():
        pattern = re.escape(_MARK.format(name)) + ".*?" + re.escape(_END)
        text, count = re.subn(pattern, lambda _, n=name, c=content: f"{_MARK.format(n)}{c}{_END}", text, flags=re.S)
        if count != 1:
            raise ValueError(f"docs/protocol.md has {count} parts {name!r} instead of one")
    return text


def header_table() -> str:
    """The fields of the header by their index."""
    info = inspect.type_info(Header)
    assert isinstance(info, inspect.StructType)
    rows = [f"| {i} | `{f.name}` | {_type(f.type)} | {_default(f)} |" for i, f in enumerate(info.fields)]
    return "| index | field | type | default |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def verb_table() -> str:
    """The numbers of the verbs."""
    return "\n".join(f"- `{int(verb)}` {verb.name.lower()}" for verb in Verb) + "\n"


def session_list(session: list[dict[str, Any]]) -> str:
    """One line per frame."""
    rows = [
        f"| {i} | {f['from']} → {f['to']} | {f['channel']} | {f['verb']} | `{f['type']}` | "
        f"{f['header']['message_id']} | {f['header']['correlation_id'] or ''} |"
        for i, f in enumerate(session)
    ]
    head = "| # | from → to | channel | verb | body | message id | answers |\n|---|---|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def dump(session: list[dict[str, Any]]) -> str:
    """Four frames byte by byte, with what they say."""
    blocks: list[str] = []
    for index in _DUMPED:
        frame = session[index]
        header, body = (bytes.fromhex(part) for part in frame["parts"])
        values = json.dumps(list(frame["header"].values()))
        blocks.append(
            f"Frame {index}: {frame['verb']}, {frame['from']} → {frame['to']}, {frame['channel']} channel\n\n"
            f"```\npart 0, header, {len(header)} bytes\n{_hexdump(header)}\n= {values}\n\n"
            f"part 1, body, {len(body)} bytes\n{_hexdump(body)}\n"
            f"= {json.dumps({'type': frame['type'], **_given(frame['body'])})}\n```\n"
        )
    return "\n".join(blocks)


def messages() -> str:
    """All messages and the structures inside of them."""
    blocks: list[str] = []
    nested: dict[type, None] = {}
    chapter = ""
    for protocol, kind in message_types():
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        title = _chapter(protocol, kind)
        if title != chapter:
            chapter = title
            blocks.append(f"### {chapter}\n")
        blocks.append(_block(info, nested))
    blocks.append("### Parts of messages\n")
    done: set[type] = set()
    while nested:
        kind = next(iter(nested))
        del nested[kind]
        if kind not in done:
            done.add(kind)
            info = inspect.type_info(kind)
            assert isinstance(info, inspect.StructType)
            blocks.append(_block(info, nested))
    return "\n".join(blocks)


def _chapter(protocol: str, kind: type) -> str:
    if protocol == "system":
        return "System bodies (`mesh/wire/frames.py`)"
    return {
        "kvstore.protocol": "KV memory (`kvstore/protocol.py`)",
    }.get(kind.__module__, f"Node bodies (`{kind.__module__.replace('.', '/')}.py`)")


def _block(info: inspect.StructType, nested: dict[type, None]) -> str:
    form = "array" if info.array_like else "map"
    tag = "" if info.tag is None else f', first element `"{info.tag}"`' if info.array_like else f", `type: {info.tag}`"
    doc = pyinspect.cleandoc(info.cls.__doc__ or "")
    rows: list[str] = []
    for index, field in enumerate(info.fields, 0 if info.tag is None else 1):
        _collect(field.type, nested)
        place = f"| {index} " if info.array_like else ""
        rows.append(f"{place}| `{field.name}` | {_type(field.type)} | {_default(field)} |")
    head = "| index | field | type | default |\n|---|---|---|---|" if info.array_like else (
        "| field | type | default |\n|---|---|---|"
    )  # fmt: skip
    table = f"\n{head}\n" + "\n".join(rows) + "\n" if rows else ""
    return f"#### {info.cls.__name__}\n\n{form}{tag}\n\n{doc}\n{table}"


def _collect(info: inspect.Type, nested: dict[type, None]) -> None:
    match info:
        case inspect.StructType():
            nested[info.cls] = None
        case inspect.ListType():
            _collect(info.item_type, nested)
        case inspect.DictType():
            _collect(info.value_type, nested)
        case inspect.UnionType():
            for member in info.types:
                _collect(member, nested)
        case _:
            pass


def _type(info: inspect.Type) -> str:
    match info:
        case inspect.StructType():
            return f"[{info.cls.__name__}](#{info.cls.__name__.lower()})"
        case inspect.ListType():
            return f"array of {_type(info.item_type)}"
        case inspect.DictType():
            return f"map {_type(info.key_type)} → {_type(info.value_type)}"
        case inspect.UnionType():
            return " or ".join(map(_type, info.types))
        case inspect.RawType():
            return "a body of the node protocol"
        case _:
            names = {"IntType": "int", "FloatType": "float", "StrType": "str", "BytesType": "bin", "BoolType": "bool",
                     "NoneType": "nil", "AnyType": "any"}  # fmt: skip
            return names[type(info).__name__]


def _default(field: inspect.Field) -> str:
    if isinstance(field.default, bytes):
        return f"{len(field.default)} bytes"
    if field.default is not NODEFAULT:
        return f"`{json.dumps(field.default)}`"
    if field.default_factory is not NODEFAULT:
        return f"`{json.dumps(field.default_factory())}`"
    return ""


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value not in (None, [], {})}


def _hexdump(data: bytes) -> str:
    lines: list[str] = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        lines.append(f"{start:04x}  {row.hex(' '):47}  {shown}")
    return "\n".join(lines)
