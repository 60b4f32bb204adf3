"""The device's runner gives its pool up and computes over another one; its weights stay, or are backed up meanwhile."""

import contextlib
import importlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from nodes.model_spec import resolve_model
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda import load
from nodes.worker.cuda.graphs import DecodeGraphs
from nodes.worker.cuda.load import build_runner
from nodes.worker.cuda.memory_saver import load_memory_saver
from nodes.worker.errors import MemorySaverMissing
from nodes.worker.pool.view import PoolView
from nodes.worker.steps.step import RemappableRunner
from tests.nodes.worker.torch_running import Row, step

MODEL = "random:tiny-qwen3"
STEP = step(Row(0, [5, 6, 7], [3], prompt=3))


class Library:
    """Plays `torch_memory_saver.torch_memory_saver`."""

    def __init__(self) -> None:
        self.hook_mode = "preload"
        self.calls: list[Any] = []
        self.in_region = 0

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Generator[None]:
        self.calls.append(("region", tag, enable_cpu_backup, self.hook_mode))
        yield

    def pause(self, tag: str) -> None:
        self.calls.append(("pause", tag))

    def resume(self, tag: str) -> None:
        self.calls.append(("resume", tag))


def pool(incarnation: int) -> PagePool:
    layout = resolve_model(MODEL).kv_layout("float32")
    made = HeapHost().create("g", PoolInfo(group="g", num_pages=9, layout=layout, incarnation=incarnation))
    PoolView(made.pages_view, layout).pages.fill_(torch.nan)
    return made


def runner_over(first: PagePool, **options: Any) -> Any:
    config = WorkerConfig(group="g", model=MODEL, agent="a", dtype="float32", **options)
    return build_runner(resolve_model(MODEL), config, PoolView(first.pages_view, first.layout))[0]


@pytest.fixture(autouse=True)
def told_nothing() -> Generator[None, None, None]:
    """The library is told its mode once in a process, and each test has one of its own."""
    load_memory_saver.cache_clear()
    yield
    load_memory_saver.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found, others = Library(), importlib.import_module

    def imported(name: str, *arguments: Any) -> Any:
        return SimpleNamespace(torch_memory_saver=found) if name == "torch_memory_saver" else others(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", imported)
    return found


def test_another_pool_and_the_same_weights() -> None:
    first, second = pool(1), pool(2)
    runner = runner_over(first)
    assert isinstance(runner, RemappableRunner)
    drawn = runner.run(STEP)
    runner.unmap(backs_up=False)
    before = bytes(first.pages_view)
    # Views of the old pool are gone with the attention that had them: the memory can be unmapped.
    first.pages_view.release()
    runner.remap(second)
    assert runner.run(STEP) == drawn
    assert drawn.token_ids[0] >= 0
    page = 3 * second.layout.page_bytes
    written = slice(page, page + second.layout.page_bytes)
    assert bytes(second.pages_view[written]) == before[written], "keys and values are in the new pool"


def test_weights_are_backed_up_and_come_back_before_anything_is_built_on_them(library: Library) -> None:
    runner = runner_over(pool(1), memory_saver=True)
    assert library.calls == [("region", "weights", True, "torch")]
    runner.unmap(backs_up=True)
    seen: list[Any] = []
    over = runner.over
    runner.over = lambda view: (seen.append(list(library.calls)), over(view))[1]
    runner.remap(pool(2))
    assert seen == [[*library.calls[:2], ("resume", "weights")]]
    assert library.calls[1:] == [("pause", "weights"), ("resume", "weights")]
    runner.unmap(backs_up=False)
    runner.remap(pool(3))
    assert len(library.calls) == 3, "kept weights are neither paused nor resumed"


def test_the_mode_is_told_once(library: Library) -> None:
    saver = load_memory_saver()
    with saver.region():
        pass
    assert load_memory_saver() is saver


def test_graphs_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def capture(self: DecodeGraphs, network: Any, attention: Any, *more: Any) -> None:
        captured.append(attention.pool.pages.data_ptr())

    monkeypatch.setattr("nodes.worker.cuda.load.GraphRecorder", lambda _device: None)
    backends = load._backends

    def capturable(*arguments: Any) -> Any:
        kernels, attention, version = backends(*arguments)
        attention.can_capture = True
        return kernels, attention, version

    monkeypatch.setattr(load, "_backends", capturable)
    monkeypatch.setattr(DecodeGraphs, "__init__", capture)
    first, second = pool(1), pool(2)
    runner = runner_over(first)
    runner.unmap(backs_up=False)
    assert runner._graphs is None
    runner.remap(second)
    addresses = [PoolView(one.pages_view, one.layout).pages.data_ptr() for one in (first, second)]
    assert captured == addresses
    assert addresses[0] != addresses[1]


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = importlib.import_module

    def missing(name: str, *arguments: Any) -> Any:
        if name == "torch_memory_saver":
            raise ModuleNotFoundError("No module named 'torch_memory_saver'")
        return imported(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MemorySaverMissing, match="extra cuda12 or cuda13"):
        runner_over(pool(1), memory_saver=True)
