"""Each timeout, limit, pause, lock and broad `except` has its reason beside it (CONTRIBUTING.md).

A module's constant has a docstring below it, or a comment above or beside it; everything else has a comment. A comment
that only speaks to a tool (`noqa`, `pyright`) is none.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("mesh", "kvstore", "nodes", "cli")

_LIMIT: Final = re.compile(
    r"(^|_)(MAX|MOST|MIN|LEAST|NUM|TIMEOUT|INTERVAL|LIMIT|TICKS|GRACE|MARGIN|RETRIES|RETRY|TRIES|PAUSE|ROOM|DEPTH|SLACK"
    r"|SPARE|BACKLOG|EVERY|FACTOR|SHARE|RATIO|REMEMBERED|KEPT|SHOWN|POLLS|STEPS|PR)(_|$)|_(S|MS|BYTES|CHARS|TOKENS|FILES)$"
)
_TO_TOOLS: Final = re.compile(r"#\s*(noqa|pyright|type|pragma|fmt|ruff)\b[^-#]*$")
_LOCKS: Final = frozenset({"Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition"})
# Of each of these the first argument is a time.
_WAITS: Final = frozenset({"sleep", "timeout", "timeout_at", "settimeout", "call_later"})
_WAIT_KEYWORDS: Final = frozenset({"timeout", "timeout_s", "timeout_ms"})
_BROAD: Final = frozenset({"Exception", "BaseException"})


def unexplained(source: str) -> Iterator[tuple[int, str]]:
    """The places of a module that need a reason and have none: number and text of their lines."""
    tree, lines = ast.parse(source), source.splitlines()
    comments = _comments(source)

    def is_commented(number: int) -> bool:
        return number in comments or (number - 1 in comments and lines[number - 2].lstrip().startswith("#"))

    for number in _constants(tree.body):
        if not is_commented(number):
            yield number, lines[number - 1].strip()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            if not (is_commented(node.lineno) or is_commented(node.body[0].lineno)):
                yield node.lineno, lines[node.lineno - 1].strip()
        elif isinstance(node, ast.Call) and _needs_reason(node) and not is_commented(node.lineno):
            yield node.lineno, lines[node.lineno - 1].strip()


def _comments(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0] for token in tokens if token.type == tokenize.COMMENT and not _TO_TOOLS.fullmatch(token.string)
    }


def _constants(body: list[ast.stmt]) -> Iterator[int]:
    """Limits among a module's constants that have no docstring."""
    for node, after in zip_longest(body, body[1:]):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        is_told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if name.isupper() and _LIMIT.search(name) and _is_number(value) and not is_told:
            yield node.lineno


def _is_number(value: ast.expr) -> bool:
    """Whether this is a number, or arithmetic with one."""
    if not isinstance(value, ast.Constant | ast.BinOp | ast.UnaryOp):
        return False
    numbers = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return any(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)


def _is_broad(caught: ast.expr | None) -> bool:
    return caught is None or any(isinstance(node, ast.Name) and node.id in _BROAD for node in ast.walk(caught))


def _needs_reason(call: ast.Call) -> bool:
    """Whether this makes a lock, or waits for a time that is written here as a number other than 0."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    times = [*call.args[:1]] if name in _WAITS else []
    times += call.args[1:2] if name == "wait_for" else []
    times += [keyword.value for keyword in call.keywords if keyword.arg in _WAIT_KEYWORDS]
    return name in _LOCKS or any(isinstance(time, ast.Constant) and time.value for time in times)


def test_reasons_are_given() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, text in unexplained(path.read_text())
    ]
    assert not found, "no reason beside:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '_WAIT_S: Final = 2.0\n"""Less than a lease."""\n',
        "# Less than a lease.\n_WAIT_S: Final = 2.0\n",
        "_WAIT_S = 2.0  # less than a lease\n",
        "_GREETING: Final = 3\n",
        "_NAMES_MAX: Final = len(NAMES)\n",
        "try:\n    go()\nexcept Exception:  # noqa: BLE001 # it is a stranger's\n    pass\n",
        "try:\n    go()\nexcept Exception as error:\n    # It is a stranger's.\n    raise Mine from error\n",
        "try:\n    go()\nexcept OSError:\n    pass\n",
        "# Two threads write.\nlock = threading.Lock()\n",
        "time.sleep(_WAIT_S)\n",
        "async def turn():\n    await asyncio.sleep(0)\n",
        "",
    ],
)
def test_a_reason_is_found(source: str) -> None:
    assert list(unexplained(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "_WAIT_S: Final = 2.0\n",
        "_FIRST = 1\n_MAX_HOSTS: Final = 1 << 12\n",
        '"""A module."""\n\n_MAX_BYTES = 64 * KIB\n',
        "_WAIT_S: Final = 2.0  # noqa: X\n",
        "try:\n    go()\nexcept Exception as error:  # noqa: BLE001\n    print(error)\n",
        "try:\n    go()\nexcept (OSError, BaseException):\n    pass\n",
        "try:\n    go()\nexcept:\n    pass\n",
        "lock = asyncio.Lock()\n",
        "turns = Semaphore(4)\n",
        "time.sleep(0.5)\n",
        "async def go():\n    async with asyncio.timeout(3):\n        pass\n",
        "async def go():\n    await asyncio.wait_for(it, 3.0)\n",
        "mesh.ask(question, timeout_s=2.0)\n",
    ],
)
def test_a_reason_is_missed(source: str) -> None:
    assert len(list(unexplained(source))) == 1


def test_a_reason_that_is_taken_away_is_missed() -> None:
    source = (ROOT / "mesh/transport/names.py").read_text()
    without = re.sub(r'^(_FIRST_PAUSE_S: Final = .*\n)""".*?"""\n', r"\1", source, flags=re.MULTILINE)
    assert [text.split(":")[0] for _, text in unexplained(without)] == ["_FIRST_PAUSE_S"]
