"""Makes `mesh_under_test` importable beside the tests, and runs coroutines that may leave nothing behind."""

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("mesh", deadline=None, max_examples=80, stateful_step_count=40)
settings.load_profile("mesh")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run():
    """Run a coroutine function on a fresh loop; tasks left over fail the test."""

    def runner(main, loop_factory=None):
        async def wrapped():
            await main()
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            assert not left, f"tasks left over: {left}"

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(wrapped())

    return runner
