"""Counts lines of logic by folder, for revisions side by side. `python -m tools.lines [--depth N] [REV...]`.

A line of logic has code on it: blank lines, comments, docstrings, imports and `@override` marks do not count.
`worktree` stands for the files on disk, and is counted if no revision is named.
The last column is the change from the first revision to the last.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHIPPED_FOR_TESTS = ("mesh/simulation", "mesh/testing", "tools/tiny_model")
"""Shown apart: the SDK's means to test actors, and what made the bundled model. No running mesh has them."""
FOLDERS = ("mesh", "kvstore", "nodes", "cli", "tests", "benchmarks", "tools", "examples")
WORKTREE = "worktree"
_SILENT = frozenset((tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT))


def count_logic(source: str) -> int:
    """Lines of logic of one Python file."""
    apart: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            apart.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # It has replaced a docstring that only said whose method this is, and says no more than that.
            marks = (one for one in node.decorator_list if isinstance(one, ast.Name) and one.id == "override")
            apart.update(one.lineno for one in marks)
    with_code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT and token.type != tokenize.ENDMARKER:
            with_code.update(range(token.start[0], token.end[0] + 1))
    return len(with_code - apart)


def sources(revision: str) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of a revision in one of the folders."""
    listing = ["ls-files"] if revision == WORKTREE else ["ls-tree", "-r", "--name-only", revision]
    names = [name for name in _git(*listing).splitlines() if name.endswith(".py") and name.startswith(FOLDERS)]
    if revision == WORKTREE:
        yield from ((name, Path(name).read_text()) for name in names if Path(name).exists())
        return
    asked = "".join(f"{revision}:{name}\n" for name in names).encode()
    blobs = io.BytesIO(
        subprocess.run(["git", "cat-file", "--batch"], input=asked, capture_output=True, check=True).stdout
    )
    for name in names:
        num_bytes = int(blobs.readline().split()[2])
        yield name, blobs.read(num_bytes + 1).decode()


def count_by_folder(revision: str, depth: int) -> Counter[str]:
    """Lines of logic of each folder, and of all as `total` and `without tests`."""
    counts: Counter[str] = Counter()
    for name, source in sources(revision):
        folders = name.split("/")[:-1]
        lines = count_logic(source)
        apart = next((one for one in SHIPPED_FOR_TESTS if name.startswith(f"{one}/")), "")
        counts[apart or "/".join(folders[:depth])] += lines
        counts["total"] += lines
        if folders[0] != "tests":
            counts["without tests"] += lines
    return counts


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.lines", description=__doc__)
    parser.add_argument("revisions", nargs="*", default=[WORKTREE], metavar="REV")
    parser.add_argument("--depth", type=int, default=1, help="depth of folders: 2 shows mesh/transport")
    arguments = parser.parse_args()
    columns = {revision: count_by_folder(revision, arguments.depth) for revision in arguments.revisions}
    first, last = columns[arguments.revisions[0]], columns[arguments.revisions[-1]]
    print("| lines of logic |", " | ".join(columns), "| change |")
    print("|---|" + "---:|" * (len(columns) + 1))
    sums = ("without tests", "total")
    folders = sorted({folder for counts in columns.values() for folder in counts} - set(sums))
    for folder in [*folders, *sums]:
        cells = [f"{counts[folder]:,}" for counts in columns.values()]
        change = (last[folder] / first[folder] - 1) * 100 if first[folder] else float("inf")
        print(f"| {folder} |", " | ".join(cells), f"| {change:+.0f} % |")


if __name__ == "__main__":
    main()
