"""What every test leaves as it has found it, and how many examples it draws."""

import asyncio
import inspect
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from mesh.simulation import virtual_time

# Here and not in a folder's conftest: what a test draws shall not depend on which folders are run with it. No deadline,
# since that tells how busy a machine is: a test of cli/ failed by it where cores were short.
settings.register_profile("kvmesh", deadline=None, max_examples=80, stateful_step_count=40)
settings.load_profile("kvmesh")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, inside of its first argument if that is a function that runs it.

    Such a fixture opens something, a mesh or a world of agents, on a loop of its choice, and gives it to the test; what
    it opens besides takes the place of the next arguments, if the test has any.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    # By the signature: fixtures that a test uses without taking them are no arguments of it.
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    if arguments and inspect.isfunction(arguments[0]):
        arguments[0](lambda *opened: pyfuncitem.obj(*(*opened, *arguments[len(opened) :])[: len(arguments)]))
    else:
        run = virtual_time.run if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
        run(pyfuncitem.obj(*arguments))
    return True


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands, actors and simulations set the log of the whole process, levels included."""
    yield
    structlog.reset_defaults()
