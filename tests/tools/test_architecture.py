"""The house rules that a linter does not know: sizes, names, and who may import what."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from kvstore.store.installed.plugins import InstalledStore
from kvstore.transfer.base import Transport
from kvstore.transfer.paired.link import LinkMaker, PairLink

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = ("mesh", "kvstore", "nodes", "cli")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYTHING = SOURCES + sorted(
    p for folder in ("benchmarks", "tools", "examples") for p in (ROOT / folder).rglob("*.py")
)

TORCH_FOLDERS = ("nodes/worker/",)
TORCH_FILES = ("cli/supervisor/forks/zygote.py",)
CUPY_FILES = (
    "kvstore/pool/cuda/memory.py",
    "kvstore/transfer/paired/nccl.py",
    "nodes/worker/cuda/own_kernels.py",
    "nodes/worker/cuda/nccl_collectives.py",
)
TORCH_FREE_WORKER_FILES = ("nodes/worker/core.py", "nodes/worker/executor/echo.py", "nodes/worker/config.py")
ZMQ_FILES = ("mesh/transport/zeromq.py", "mesh/transport/zeromq_", "mesh/membership/keys.py")
ASYNCIO_FREE = re.compile(
    r"(^|/)(core|sequence|admission|batching|pipeline|grants|orders|streams|policy|allocator|radix_tree|page_table"
    r"|prefix_cache|eviction|hashing|session|plan|credit|table|topics|header|codec|supervision|requests"
    r"|validation|incremental|stop_strings|routing|topology)\.py$"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(path: Path) -> set[str]:
    """Dotted names of all that a file imports, type checking and local imports included."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@cache
def imported(path: Path) -> frozenset[str]:
    """Top-level names of all modules that a file imports."""
    return frozenset(name.split(".")[0] for name in named(path))


# Each rule looks at all files in one test and lists what breaks it: a test a file made half of the suite's number, and
# xdist's messages for them took longer than the looking.
def test_files_and_functions_are_short() -> None:
    broken = [relative(path) for path in EVERYTHING if path.read_text().count("\n") > 600]
    broken += [
        f"{relative(path)}: {node.name}"
        for path in EVERYTHING
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not broken, (
        "a file is one idea in at most 600 lines, a function has under 60: split where the subject splits"
    )


def test_names_say_something() -> None:
    nothing = re.compile(r"^(utils?|helpers?|common|misc|manager)\.py$|_v\d+\.py$")
    assert not [relative(path) for path in EVERYTHING if nothing.search(path.name)]


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {relative(path).removesuffix(".py").replace("/", "."): path for path in SOURCES}
    graph = {module: named(path) & modules.keys() for module, path in modules.items()}
    # Raises CycleError, which names the modules: one part takes from another what it needs, and not its owner.
    TopologicalSorter(graph).prepare()


def test_torch_and_zeromq_stay_in_their_files() -> None:
    with_torch = [relative(path) for path in SOURCES if "torch" in imported(path)]
    assert not [name for name in with_torch if not name.startswith(TORCH_FOLDERS + TORCH_FILES)]
    assert not set(with_torch) & set(TORCH_FREE_WORKER_FILES)
    with_zmq = [relative(path) for path in SOURCES if "zmq" in imported(path)]
    assert not [name for name in with_zmq if not name.startswith(ZMQ_FILES)], "only the transport knows ZeroMQ"


def test_docstrings_say_more_than_where_to_look() -> None:
    # What implements a protocol inherits it, and `@override` tells the linter whose docstring counts.
    pointing = re.compile(r"See (`[^`]+`|the module)[^.]*\.?$")
    found = [
        f"{relative(path)}:{node.lineno}: {node.name}"
        for path in EVERYTHING
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and pointing.match(ast.get_docstring(node) or "")
    ]
    assert not found, "say it, or inherit what says it and mark it with `@override`"


def test_what_others_use_says_what_it_is() -> None:
    # Inside a folder a good name is enough, and a line that repeats it is one more to keep true.
    modules = {relative(path).removesuffix(".py").replace("/", "."): path for path in SOURCES}
    exported = {
        (module, alias.name)
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (module := node.module) in modules
        if modules[module].parent != path.parent
        for alias in node.names
    }
    silent = [
        f"{module}: {node.name}"
        for module, path in modules.items()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (module, node.name) in exported and not ast.get_docstring(node)
    ]
    silent += [
        f"{module}: {node.name}.{method.name}"
        for module, path in modules.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base).split("[")[0] for base in node.bases} & {"Protocol", "ABC"}
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        # A property of a protocol is a field, which its class says.
        if not method.decorator_list or "abstractmethod" in ast.unparse(method.decorator_list[-1])
        if not method.name.startswith("_") and not ast.get_docstring(method)
    ]
    assert not silent, "another folder imports it, or implements it: say what it is"


def test_nothing_is_pickled() -> None:
    pickling = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert not [relative(path) for path in SOURCES if imported(path) & pickling]


def test_cores_are_pure() -> None:
    impure = {"asyncio", "zmq", "torch", "uvloop", "threading", "socket", "subprocess", "time"}
    cores = [path for path in SOURCES if ASYNCIO_FREE.search(relative(path))]
    assert not {relative(path): found for path in cores if (found := imported(path) & impure)}


def test_no_tabs_of_unfinished_work() -> None:
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, r"NotImplemented" + r"Error")))
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found, "\n".join(found)


def test_each_optional_library_is_known_in_one_place() -> None:
    # Memory, pages by NCCL and sums by NCCL each have one file that knows CuPy, and imports it when first used.
    places = {
        r"""(import |["'])cupy""": CUPY_FILES,
        r"""(import |import_module\(["'])torch_memory_saver\b""": ("nodes/worker/cuda/memory_saver.py",),
        r"""(import |import_module\(["'])pynvml\b""": ("cli/supervisor/device_memory.py",),
        r"""(import |import_module\(["'])flashinfer\b""": ("nodes/worker/cuda/flashinfer_backend.py",),
    }
    for mark, files in places.items():
        knowing = [relative(path) for path in SOURCES if re.search(mark, path.read_text())]
        assert not set(knowing) - set(files), f"{mark} stands elsewhere too"
    assert [relative(path) for path in SOURCES if "huggingface_hub" in imported(path)] == ["cli/hub/files.py"]


def test_what_a_page_names_by_file_and_function_is_there() -> None:
    missing = [path for path in re.findall(r"`(\w+/[\w/]*\.\w+)`", PAGE) if not (ROOT / path).exists()]
    for path, names in re.findall(r"`([\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+)", PAGE):
        known = {
            f"{node.name}.{part.name}" if part is not node else node.name
            for node in parsed(ROOT / path).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            for part in (node, *ast.walk(node))
            if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        missing += [f"{path}: {name}" for name in re.findall(r"`([\w.]+)`", names) if name not in known]
    assert not missing


def test_lines_of_the_page_are_short_except_in_tables() -> None:
    assert not [line for line in PAGE.splitlines() if len(line) > 120 and line[0] != "|"]


def chapter(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_names_every_folder_and_none_that_is_not_there() -> None:
    named: set[str] = set()
    for cell, text in re.findall(r"^\| (`.+?) \| (.+) \|$", chapter("Folders"), re.MULTILINE):
        places = re.findall(r"`([^`<]+?)/?`", cell)
        named |= {*places, *(f"{place}/{inner}" for place in places for inner in re.findall(r"`([\w/]+)/`", text))}
    assert not [path for path in named if not (ROOT / path).exists()]
    roles = {relative(path.parent) for path in (ROOT / "nodes").glob("*/actor.py")}
    files = (path for path in (*SOURCES, *(ROOT / "tests").glob("*/*.py")) if path.stat().st_size)
    assert not sorted({relative(path.parent) for path in files} - named - roles)


def test_the_page_names_all_that_a_kv_transport_must_have() -> None:
    text = chapter("Another KV transport")
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    assert {*re.findall(r"`(\w+)`", "".join(cells))} >= Transport.__abstractmethods__ | {"name", "kinds"}
    for seam in (LinkMaker, PairLink):
        [named] = re.findall(rf"`{seam.__name__}` [^(]*\(([^)]+)\)", text)
        methods = {name for name, member in vars(seam).items() if name[0] != "_" and callable(member)}
        assert {*re.findall(r"`(\w+)`", named)} == methods


def test_the_page_names_all_that_a_store_must_have() -> None:
    cells = re.findall(r"^\| `(\w+)` \|", chapter("Another store of pages"), re.MULTILINE)
    assert {*cells} == InstalledStore.__abstractmethods__ | {"close"}
