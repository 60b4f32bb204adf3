"""Whose doing an end is."""

import signal
from pathlib import Path

import pytest

from cli.supervisor.processes.exits import Exit, Exits, describe_exit, kernel_counts

KILLED = -signal.SIGKILL


class Kernel:
    """The files where it counts what it killed."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.system = folder / "vmstat"
        self.group = folder / "memory.events"
        self.count(self.system, 3)
        self.exits = Exits([self.system, self.group, folder / "not there"], lambda: self.now)

    def count(self, file: Path, number: int) -> None:
        file.write_text(f"oom_kill_disable 0\nlow 0\noom 9\noom_kill {number}\noom_group_kill 0\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_kill_that_the_kernel_does_not_count_is_somebody_elses(kernel: Kernel) -> None:
    assert kernel.exits.read(KILLED) == Exit("signal 9 (SIGKILL)", "SIGKILL", foreign=True)


@pytest.mark.parametrize("name", ["system", "group"])
def test_a_kill_while_the_count_of_system_or_control_group_grew_is_for_want_of_memory(
    kernel: Kernel, name: str
) -> None:
    kernel.count(getattr(kernel, name), 4)
    end = kernel.exits.read(KILLED)
    assert end == Exit("signal 9 (SIGKILL), out of memory", "out_of_memory", foreign=False)


def test_one_shortage_may_end_several_and_is_then_over(kernel: Kernel) -> None:
    kernel.count(kernel.system, 5)
    assert [kernel.exits.read(KILLED).foreign for _ in range(2)] == [False, False]
    kernel.now += 1.5
    assert kernel.exits.read(KILLED).foreign


@pytest.mark.parametrize(
    ("status", "cause"),
    [(0, "exit_0"), (3, "exit_3"), (-11, "SIGSEGV"), (-6, "SIGABRT"), (-7, "SIGBUS"), (-15, "SIGTERM")],
)
def test_every_other_end_is_the_actors_own(kernel: Kernel, status: int, cause: str) -> None:
    assert kernel.exits.read(status) == Exit(describe_exit(status)[0], cause, foreign=False)


def test_exits_in_words() -> None:
    assert describe_exit(0) == ("exit 0", "exit_0")
    assert describe_exit(-9) == ("signal 9 (SIGKILL)", "SIGKILL")
    assert describe_exit(-250) == ("signal 250", "signal_250")


def test_where_this_kernel_counts() -> None:
    assert kernel_counts()[0] == Path("/proc/vmstat")
    assert all(path.name in ("vmstat", "memory.events") for path in kernel_counts())
