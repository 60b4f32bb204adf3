"""What every test leaves as it has found it, and how many examples it draws."""

import asyncio
import gc
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

from mesh.simulation import virtual_time
from nodes.worker.environment import prepare_environment

# Before any test imports torch. With a second thread, steps of a small model took ten times as long beside another
# worker of xdist, and four times the cores: threads spin where those that they wait for could compute. Meshes that
# tests start have threads of their own choice.
prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Here and not in a folder's conftest: what a test draws shall not depend on which folders are run with it. No deadline,
# since that tells how busy a machine is: a test of cli/ failed by it where cores were short.
hypothesis.settings.register_profile("kvmesh", deadline=None, max_examples=80, stateful_step_count=40)
hypothesis.settings.load_profile("kvmesh")

TESTS = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: looking among them for what nobody holds took a third of their collection."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """What a file's tests have imported and cached stays, too.

    Each of a thousand tests looks for leaks by a collection, which took 0.7 s once models had been imported, and takes
    a hundredth of that among what its own file has made.
    """
    found = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return found


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is not going to run is not imported either, by each worker."""
    folder = collection_path.name
    is_left_out = folder in ("gpu", "real_models") and f"not {folder}" in config.option.markexpr
    return True if is_left_out and collection_path.parent == TESTS else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    """One worker collects backwards: what it has compiled the others load, from the middle on.

    In the same order each compiles everything, of the suite and of what it imports, which took 12 s of a core.
    """
    report = yield
    if WORKER == "gw1" and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not WORKER:
        return
    items.sort(key=lambda item: item.path)
    items[:] = in_turns(items)
    if "not slow" in config.option.markexpr:
        draw_fewer(items)


def in_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files that compute beside files that wait, and at the end those that take no time.

    Simulations come first: one file of them is a tenth of everything, and at the end one worker alone had it; nor do
    they mind, on virtual time, what else runs on this machine when CI begins. Tests of meshes wait for processes most
    of the time: one after the other at the end they left a core without work. Those of `serving` stay in a row, since
    they share meshes, which idle until another one is wanted.
    """
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    folders: dict[str, list[list[pytest.Item]]] = {}
    for path, of_file in by_file.items():
        folders.setdefault(path.relative_to(TESTS).parts[0], []).append(of_file)
    first = folders.pop("simulation", []) + folders.pop("chaos", []) + folders.pop("serving", [])
    waiting = folders.pop("process", [])
    computing = [of_file for folder in folders.values() for of_file in folder]
    # The last tenth of those that compute is left for the end.
    share = len(waiting) / max(1, len(computing) * 9 // 10)
    rest: list[list[pytest.Item]] = []
    for number, of_file in enumerate(computing):
        rest += waiting[int(number * share) : int((number + 1) * share)]
        rest.append(of_file)
    rest += waiting[int(len(computing) * share) :]
    return [item for of_file in first + rest for item in of_file]


def draw_fewer(items: list[pytest.Item]) -> None:
    """A third of the examples that properties name: in CI, which runs often and draws others each time.

    `make test-all`, `make coverage` and `pytest` by itself draw all of them.
    """
    functions = (item for item in items if isinstance(item, pytest.Function))
    properties = [item for item in functions if hypothesis.is_hypothesis_test(item.obj)]
    # By a private name, since what a decorator has set cannot be decorated again; a state machine has a public one.
    owners = {
        (item.cls, "settings") if hasattr(item.cls, "settings") else (item.obj, "_hypothesis_internal_use_settings")
        for item in properties
    }
    for owner, name in owners:
        drawn = getattr(owner, name)
        setattr(owner, name, hypothesis.settings(drawn, max_examples=-(-drawn.max_examples // 3)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, inside of its first argument if that opens something to be in.

    Such a fixture is an asynchronous context manager, of a mesh or a world of agents, which leaves no task behind; or a
    function that runs the test on a loop of its choice. What it opens besides takes the place of the next arguments.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    # By the signature: fixtures that a test uses without taking them are no arguments of it.
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    run = virtual_time.run if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
    if arguments and isinstance(arguments[0], AbstractAsyncContextManager):
        run(_inside(arguments[0], pyfuncitem.obj, arguments[1:]))
    elif arguments and inspect.isfunction(arguments[0]):
        arguments[0](lambda *opened: pyfuncitem.obj(*(*opened, *arguments[len(opened) :])[: len(arguments)]))
    else:
        run(pyfuncitem.obj(*arguments))
    return True


async def _inside(opened: AbstractAsyncContextManager[Any], test: Callable[..., Any], more: list[Any]) -> None:
    async with opened as found:
        await test(found, *more)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left over: {left}"


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a test's mark of this name says of what a fixture opens for it."""
    mark = request.node.get_closest_marker("settings")
    return mark.kwargs if mark else {}


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands, actors and simulations set the log of the whole process, levels included."""
    yield
    structlog.reset_defaults()
