"""Every world of a test is played to its end after it, and checked."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.nodes.scheduler.scheduler_world import World


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """After the test, in its own time: whatever it left under way ends, and then nothing may be held anywhere."""
    try:
        result = yield
        for world in list(World.unchecked):
            world.settle()
            world.check()
        return result
    finally:
        World.unchecked.clear()
