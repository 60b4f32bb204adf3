"""The house rules that a linter does not know: sizes, names, and who may import what."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mesh", "kvstore", "nodes", "cli")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYTHING = SOURCES + sorted(
    p for folder in ("benchmarks", "tools", "examples") for p in (ROOT / folder).rglob("*.py")
)

TORCH_FOLDERS = ("nodes/worker/",)
TORCH_FILES = ("cli/launch/zygote.py",)
CUPY_FILES = ("kvstore/cuda_memory.py", "kvstore/transfer/nccl_link.py", "nodes/worker/cuda/nccl_collectives.py")
TORCH_FREE_WORKER_FILES = ("nodes/worker/core.py", "nodes/worker/echo.py", "nodes/worker/config.py")
ZMQ_FILES = ("mesh/transport/zeromq.py", "mesh/transport/zeromq_")
ASYNCIO_FREE = re.compile(
    r"(^|/)(core|sequence|admission|batching|pipeline|grants|orders|streams|policy|allocator|radix_tree|page_table"
    r"|prefix_cache|eviction|hashing|session|plan|credit|calls|mailbox|membership|envelope|codec|supervision|requests"
    r"|validation|incremental|stop_strings|routing|topology)\.py$"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, type checking and local imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", EVERYTHING, ids=relative)
def test_file_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, "split the file where its subject splits"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is over 60 lines"


@pytest.mark.parametrize("path", EVERYTHING, ids=relative)
def test_name_says_something(path: Path) -> None:
    assert not re.search(r"^(utils?|helpers?|common|misc|manager)\.py$|_v\d+\.py$", path.name)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_heavy_imports_stay_in_their_files(path: Path) -> None:
    name, modules = relative(path), imported(path)
    if "torch" in modules:
        assert name.startswith(TORCH_FOLDERS + TORCH_FILES)
        assert name not in TORCH_FREE_WORKER_FILES
    if "zmq" in modules:
        assert name.startswith(ZMQ_FILES), "only the ZeroMQ transport knows ZeroMQ"
    if re.search(r"""(import |["'])cupy""", path.read_text()):
        assert name in CUPY_FILES, (
            "memory, pages by NCCL and sums by NCCL each have one file that knows CuPy, and imports it when first used"
        )
    assert not modules & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("path", [p for p in SOURCES if ASYNCIO_FREE.search(relative(p))], ids=relative)
def test_cores_are_pure(path: Path) -> None:
    assert not imported(path) & {"asyncio", "zmq", "torch", "uvloop", "threading", "socket", "subprocess", "time"}


def test_no_tabs_of_unfinished_work() -> None:
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, r"NotImplemented" + r"Error")))
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_one_file_knows_torch_memory_saver(path: Path) -> None:
    known = re.search(r"""(import |import_module\(["'])torch_memory_saver\b""", path.read_text())
    assert not known or relative(path) == "nodes/worker/cuda/memory_saver.py"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_one_file_knows_flashinfer(path: Path) -> None:
    known = re.search(r"""(import |import_module\(["'])flashinfer\b""", path.read_text())
    assert not known or relative(path) == "nodes/worker/cuda/flashinfer_backend.py"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_one_file_knows_the_hub(path: Path) -> None:
    assert "huggingface_hub" not in imported(path) or relative(path) == "cli/hub.py"
