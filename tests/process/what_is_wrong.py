"""The table of "What is wrong?" in docs/operations.md: which commands find a fault, and what they have to print."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).parents[2] / "docs/operations.md"
MOST_COMMANDS = 2


class Row(NamedTuple):
    """One fault. `commands` are without `meshctl`; each of `prints` is in what one of them prints."""

    fault: str
    commands: list[list[str]]
    prints: list[str]
    do: str


def rows():
    """By fault."""
    section = DOCUMENT.read_text().partition("\n## What is wrong?\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    found = {}
    for line in lines:
        fault, _, ask, prints, do = (cell.strip() for cell in line.strip("|").split(" | "))
        commands = [shlex.split(span)[1:] for span in spans(ask) if span.startswith("meshctl ")]
        found[fault] = Row(fault, commands, spans(prints), do)
    return found


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


def pattern(sample):
    """What a sample stands for: with other numbers and more spaces, ms for s, and anything for `…`."""
    parts = re.findall(r"\d[\d,.]*|\s+|…|[^\d\s…]+", sample)
    stands_for = {"…": ".*", "s": "m?s", "ms": "m?s"}
    return "".join(
        r"\d[\d,.]*" if part[0].isdigit() else r"\s+" if part.isspace() else stands_for.get(part, re.escape(part))
        for part in parts
    )


def ask(host, fault):
    """What the commands of a fault print on this host, which has to be what the document says."""
    row = rows()[fault]
    told = ""
    for command in row.commands:
        done = host.meshctl(*command)
        told += done.stdout + done.stderr
    missing = [sample for sample in row.prints if not re.search(pattern(sample), told)]
    assert not missing, f"{missing} of {row.fault} not in:\n{told}"
    return told
