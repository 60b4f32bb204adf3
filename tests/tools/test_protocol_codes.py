"""The table of error codes in `docs/protocol.md` lists what the source sends, and nothing else."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/protocol.md").read_text().split("\n## Error codes\n")[1].split("\n## ")[0]
LISTED = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE))))

# What is called with a code. The worker's `StepRefused` goes no further than its log.
CARRIERS = re.compile(r"_?fail|_failed|fail_order|abort_all|Refus(e\w*|al)|Revoked|(?!Step)[A-Z]\w+(Refused|Failed)"
                      r"|PairUnmade|(Row|Remote|Transfer)Error|ErrorBody")  # fmt: skip
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
LOCAL = {"refused", "revoked"}
"""Reasons that an actor gives only itself."""


def test_the_table_has_all_codes_that_are_sent_and_no_others() -> None:
    sources = [path.read_text() for package in ("mesh", "kvstore", "nodes") for path in (ROOT / package).rglob("*.py")]
    constants: dict[str, ast.expr | None] = {}
    given: list[ast.expr] = []
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id.isupper():
            constants[node.target.id] = node.value
        elif isinstance(node, ast.Call):
            if CARRIERS.fullmatch(getattr(node.func, "id", getattr(node.func, "attr", ""))):
                given += [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            given += node.value.elts[:1]
    values = [constants.get(one.id) if isinstance(one, ast.Name) else one for one in given]
    codes = {one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    sent = {code for code in codes if CODE.fullmatch(code)} - LOCAL
    assert sent - LISTED == set()
    assert len(sent) > 60, "the scan no longer finds how codes are sent"
    assert {code for code in LISTED if not any(f'"{code}"' in source for source in sources)} == set()
