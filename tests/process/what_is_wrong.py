"""The table of "What is wrong?" in docs/watching.md: which commands find a fault, and what they have to print."""

import re
import shlex
import time
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).parents[2] / "docs/watching.md"
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


def ask(host, fault, is_so=bool, within_s=30.0):
    """What the commands of a fault print on this host, once it is what the document says, and `is_so`.

    Asked again until then: a fault shows after a while, and some pass.
    """
    row = rows()[fault]
    deadline = time.monotonic() + within_s
    while True:
        done = [host.meshctl(*command) for command in row.commands]
        told = "".join(one.stdout + one.stderr for one in done)
        missing = [sample for sample in row.prints if not re.search(pattern(sample), told)]
        if not missing and is_so(told):
            return told
        assert time.monotonic() < deadline, f"{missing or 'more'} of {fault} not in:\n{told}"
