"""The ends of processes, and of calls that nobody waits for any more."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nodes.engine.errors import EngineClosed
from nodes.engine.inside import Inside
from nodes.engine.supervisor_process import ProcessEnd


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        yield other
        other.kill()


async def test_the_end_of_a_process_that_somebody_else_started_is_seen(other: subprocess.Popen[bytes]) -> None:
    before = os.listdir("/proc/self/fd")
    end, forgotten = ProcessEnd(other.pid), ProcessEnd(other.pid)
    forgotten.close()
    await asyncio.sleep(0.05)
    assert not end.done.done()
    other.kill()
    await asyncio.wait_for(end.done, 5)
    end.close()
    assert not forgotten.done.done()
    other.wait()
    assert ProcessEnd(other.pid).done.done()
    assert os.listdir("/proc/self/fd") == before


async def test_nothing_is_said_of_a_call_whose_caller_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    inside = object.__new__(Inside)
    inside._end, inside._running = None, set()
    call = asyncio.ensure_future(inside._run(asyncio.sleep(60)))
    await asyncio.sleep(0)
    # As Ctrl-C does it: the caller has given the call up, and the engine is closed before it ends.
    inside._fail(EngineClosed("closed"))
    await asyncio.wait([call])
    del call
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
