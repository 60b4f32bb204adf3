"""Limits of the system: read, raised, asked for by trying, and found in errors."""

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from mesh.errors import LimitReached
from mesh.runtime import process_limits
from mesh.runtime.process_limits import (
    ADDRESS_SPACE,
    CPU_TIME,
    DATA,
    FILE_SIZE,
    FILES,
    FILES_OF_ALL,
    LIMITS,
    PROCESSES,
    STACK,
    TASKS,
    Limits,
    limit_met,
    peers_that_fit,
    read_limits,
    require_room,
)

TIGHT = Limits(
    {FILES: 64, FILES_OF_ALL: 9, PROCESSES: 40, TASKS: 40, ADDRESS_SPACE: 1 << 20, DATA: 1 << 20, STACK: 1 << 16,
     FILE_SIZE: 0, CPU_TIME: 1},
    {PROCESSES: 39, TASKS: 20},
)  # fmt: skip
MEMORY_ONLY = Limits({ADDRESS_SPACE: 1 << 20}, {})
ROOMY = Limits({FILES: 65_536, PROCESSES: 96_000, TASKS: 4096, STACK: 8 << 20}, {PROCESSES: 300, TASKS: 50})


def os_error(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (os_error(errno.EMFILE), FILES),
        (os_error(errno.ENFILE), FILES_OF_ALL),
        (zmq.ZMQError(errno.EMFILE), FILES),
        (os_error(errno.EFBIG), FILE_SIZE),
        # The group has 20 left, the user 1: either may be it, and the tighter kind of bound is named first.
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), TASKS),
        (RuntimeError("can't start new thread"), TASKS),
        (os_error(errno.ENOMEM), ADDRESS_SPACE),
        (MemoryError(), ADDRESS_SPACE),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ADDRESS_SPACE),
    ],
)
def test_an_error_is_about_a_limit(monkeypatch, error, limit):
    monkeypatch.setattr(process_limits, "read_limits", lambda: TIGHT)
    met = limit_met(error)
    assert isinstance(met, LimitReached)
    assert f"the limit of {limit.name} (`{limit.shown_by}`) is {limit.amount(TIGHT.values[limit])}" in met.message
    assert limit.do in met.message
    wrapped = RuntimeError("the port cannot be listened on")
    wrapped.__cause__ = error
    assert limit.name in limit_met(wrapped).message, "what led to it counts"
    assert limit_met(met) is met


@pytest.mark.parametrize(
    ("words", "limits", "limit"),
    [
        ("Too many open files (src/ipc_listener.cpp:297)", TIGHT, FILES),
        ("Too many open files in system", TIGHT, FILES_OF_ALL),
        ("Resource temporarily unavailable (src/thread.cpp:241)", MEMORY_ONLY, ADDRESS_SPACE),
        ("libgomp: Thread creation failed: Resource temporarily unavailable", TIGHT, TASKS),
        ("terminate called after throwing an instance of 'std::bad_alloc'", TIGHT, ADDRESS_SPACE),
        ("signal 24 (SIGXCPU)", TIGHT, CPU_TIME),
        ("signal 25 (SIGXFSZ)", TIGHT, FILE_SIZE),
        ("signal 11 (SIGSEGV)", TIGHT, STACK),
        ("signal 11 (SIGSEGV)", MEMORY_ONLY, ADDRESS_SPACE),
        ("signal 6 (SIGABRT)", MEMORY_ONLY, ADDRESS_SPACE),
        ("signal 6 (SIGABRT)", ROOMY, None),
        ("signal 11 (SIGSEGV)", ROOMY, None),
        ("MemoryError", ROOMY, None),
        ("can't start new thread", ROOMY, None),
        ("File too large", ROOMY, None),
        ("no peer answers", TIGHT, None),
    ],
)
def test_the_last_words_of_a_process_are_about_a_limit_that_may_be_it(words, limits, limit):
    assert limits.met_in(words) is limit


def test_what_is_left_of_a_limit():
    assert (TIGHT.left(PROCESSES), TIGHT.left(TASKS), TIGHT.left(FILES), ROOMY.left(CPU_TIME)) == (1, 20, 64, None)
    assert "39 are there" in TIGHT.explain(PROCESSES)


def test_every_limit_says_how_it_is_seen_and_raised():
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)
    assert all(limit.shown_by and limit.do for limit in LIMITS)
    assert STACK.amount(8 << 20) == "8,192 KiB"
    assert FILES.amount(4096) == "4,096"


def test_those_of_this_process_are_read():
    limits = read_limits()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits.values.get(FILES) == (None if soft == resource.RLIM_INFINITY else soft)
    for limit in limits.used:
        assert 0 < limits.used[limit] < limits.values[limit]


def test_room_is_given_back():
    before = os.listdir("/proc/self/fd")
    num_threads = len(os.listdir("/proc/self/task"))
    require_room(16, 3)
    assert os.listdir("/proc/self/fd") == before
    # A thread that was joined has left Python, and leaves the kernel's list a moment later.
    end_s = time.monotonic() + 5.0
    while (left := len(os.listdir("/proc/self/task"))) > num_threads and time.monotonic() < end_s:
        time.sleep(0.001)
    assert left == num_threads


@pytest.mark.parametrize("num_left", [0, 1, 15])
def test_no_room_for_descriptors_is_said_and_takes_none(num_left):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_left, hard))
    try:
        with pytest.raises(LimitReached, match="the limit of open files"):
            require_room(16, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_room_for_a_thread_is_said():
    """In a process of its own, as the limit cannot be raised again."""
    program = (
        "import resource; from mesh.runtime.process_limits import require_room; from mesh.errors import LimitReached\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096 + (4 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "try: require_room(4, 8)\n"
        "except LimitReached as error: print(error.message)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "the limit of address space (`ulimit -v`) is" in said.stdout


@pytest.mark.parametrize(
    ("num_files", "num_peers"), [(84, 2), (199, 13), (1024, 96), (65_536, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_as_many_peers_as_there_are_descriptors_for(monkeypatch, num_files, num_peers):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    assert peers_that_fit(4096) == num_peers
    assert peers_that_fit(1) == 1, "no more than are wished for"


@pytest.mark.parametrize("num_files", [0, 63, 83])
def test_no_room_for_two_peers_is_said(monkeypatch, num_files):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    with pytest.raises(LimitReached, match=f"open files .* is {num_files}: "):
        peers_that_fit(4096)


GROUPS = {
    "0::/a/b\n": {"": ("max", "90"), "a": ("50", "45"), "a/b": ("20", "1")},
    "9:memory:/x\n8:pids:/docker/1\n": {"pids": ("50", "45")},
}


@pytest.mark.parametrize("lines", GROUPS)
def test_the_group_with_least_left_counts(tmp_path, monkeypatch, lines):
    for group, (most, current) in GROUPS[lines].items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "pids.max").write_text(most)
        (tmp_path / group / "pids.current").write_text(current)
    (tmp_path / "cgroup").write_text(lines)
    monkeypatch.setattr(process_limits, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(process_limits, "_CGROUPS", Path(tmp_path))
    assert process_limits._tasks_of_group() == (50, 45)
    (tmp_path / "cgroup").unlink()
    assert process_limits._tasks_of_group() is None


@pytest.mark.parametrize(
    ("mapped", "capabilities", "is_exempt"),
    [
        ("0 0 4294967295", 0, os.getuid() == 0),
        ("0 0 4294967295", 1 << 24, True),
        ("0 0 4294967295", 1 << 21, True),
        # Root of a container without root of the machine.
        ("0 100000 65536", (1 << 41) - 1, False),
    ],
)
def test_whose_processes_are_not_counted(tmp_path, monkeypatch, mapped, capabilities, is_exempt):
    (tmp_path / "uid_map").write_text(f"  {mapped}\n")
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\nCapBnd:\t0\n")
    monkeypatch.setattr(process_limits, "_SELF", tmp_path)
    assert process_limits._is_exempt() == is_exempt
    (tmp_path / "status").unlink()
    assert not process_limits._is_exempt(), "who cannot see it is not"


def test_processes_of_a_user_are_counted(monkeypatch):
    monkeypatch.setattr(process_limits, "_is_exempt", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (90_000, 90_000))
    assert read_limits().used[PROCESSES] >= len(os.listdir("/proc/self/task"))

    def none(_path):
        raise os_error(errno.EMFILE)

    monkeypatch.setattr(os, "listdir", none)
    assert read_limits().used[PROCESSES] == 0
