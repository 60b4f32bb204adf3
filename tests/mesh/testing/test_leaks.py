import asyncio
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from mesh.testing.leaks import SHM, LeakError, assert_no_leaks

OWN = f"kvmesh-leak-test-{os.getpid()}"
"""Other tests run beside this one and have segments of their own."""


def test_nothing_left_is_fine():
    with assert_no_leaks(shm_prefix=OWN), tempfile.TemporaryFile():
        pass


def test_each_kind_is_named():
    async def main():
        event = asyncio.Event()
        with assert_no_leaks(shm_prefix=OWN):
            task = asyncio.create_task(event.wait(), name="forgotten")
        await task

    with pytest.raises(LeakError, match="task forgotten"):
        asyncio.run(main())

    with pytest.raises(LeakError, match=r"fd \d+: /dev/null"), assert_no_leaks(shm_prefix=OWN):
        fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)

    segment = SHM / OWN
    try:
        with pytest.raises(LeakError, match=r"segment .*leak-test"), assert_no_leaks(shm_prefix=OWN):
            segment.touch()
    finally:
        segment.unlink()

    with pytest.raises(LeakError, match="child process"), assert_no_leaks(shm_prefix=OWN):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate(b"\n")


def test_what_goes_soon_is_waited_for():
    child = None

    def end():
        child.communicate(b"\n")

    ending = threading.Timer(0.1, end)
    with assert_no_leaks(shm_prefix=OWN, within_s=20):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        ending.start()
    ending.join()
    assert child.returncode == 0


def test_a_process_that_ends_while_it_is_looked_at_is_nobodys(monkeypatch):
    listdir = os.listdir
    # No pid is as large as that, so it is gone as a process is that ended between the listing and the look.
    monkeypatch.setattr(
        os, "listdir", lambda path: [*listdir(path), str(2**31 - 1)] if path == "/proc" else listdir(path)
    )
    with assert_no_leaks(shm_prefix=OWN):
        pass
