"""How commands print what they found: a table for people, JSON for programs."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

_GAP: Final = "  "


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def as_toml(table: Mapping[str, Any], path: str = "") -> str:
    """A TOML document of plain data. None is left out: TOML cannot express it."""
    lines = [f"{key} = {_toml_value(value)}\n" for key, value in table.items() if not isinstance(value, Mapping | None)]
    text = "".join(lines)
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            inner = f"{path}.{key}" if path else key
            text += f"\n[{inner}]\n{as_toml(cast('Mapping[str, Any]', value), inner)}"
    return text


def _toml_value(value: Any) -> str:
    # JSON and TOML write strings, numbers, booleans and lists of them alike.
    return msgspec.json.encode(value).decode()


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, dispensable: Sequence[str] = ()
) -> list[str]:
    """Print `table_lines`. Returns which columns were left out."""
    lines, left_out = table_lines(header, rows, width=width, dispensable=dispensable)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return left_out


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, dispensable: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Columns as wide as their content; and which `dispensable` ones were left out to fit `width`."""
    widths = {name: max(len(row[column]) for row in (header, *rows)) for column, name in enumerate(header)}
    left_out: list[str] = []
    for name in dispensable:
        if width is not None and sum(widths.values()) + len(_GAP) * (len(widths) - 1) > width:
            del widths[name]
            left_out.append(name)
    lines: list[str] = []
    for row in (header, *rows):
        cells = (cell.ljust(widths[name]) for name, cell in zip(header, row, strict=True) if name in widths)
        lines.append(_GAP.join(cells).rstrip())
    return lines, left_out


def printable(text: str) -> str:
    """As it is but for what would steer the terminal: texts from elsewhere must not."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def duration(seconds: float) -> str:
    """`12 s`, `3 m 20 s`, `5 h 1 m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} m"
