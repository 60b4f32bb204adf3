"""Simulated processes that share one virtual-time loop, and die or stop like processes of an operating system.

Everything that a process schedules (callbacks, timers, tasks, and what those schedule) belongs to it, because it runs
in a context that names the process. A killed process does nothing more, wherever it was: no callback, no `finally`. A
stopped one does nothing until it is resumed; then its timers are late. Its end of the network crashes or hangs with it.

    process = SimulatedProcess(Address("worker-0", 1), network, on_death)
    task = process.spawn(system.start())
    process.arm(7)              # dies at the seventh point from now: at a message, or in the middle of a store
    process.kill()              # dies now

Points are counted by the operations that a death can interrupt: in the tests' transports and page tables.
"""

import asyncio
import enum
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVarTuple, Unpack

from mesh.address import Address
from mesh.simulation.network import SimulatedNetwork

Ts = TypeVarTuple("Ts")

RUNNING_PROCESS: "ContextVar[SimulatedProcess | None]" = ContextVar("running_process", default=None)


class Killed(BaseException):
    """Unwinds what a process was doing when it died; the process must never catch this."""


class ProcessState(enum.Enum):
    """`ended`: dead, and its remaining tasks may be cleaned up when the loop closes."""

    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"
    ENDED = "ended"


class SimulatedProcess:
    """One process. `on_death` is called once, when it dies by itself at an armed point or by `kill`."""

    def __init__(
        self, address: Address, network: SimulatedNetwork, on_death: Callable[["SimulatedProcess"], None]
    ) -> None:
        self.address = address
        self.name = address.actor_id
        self._network = network
        self.state = ProcessState.RUNNING
        self._on_death = on_death
        self._points_left: int | None = None
        self.num_stops = 0
        # A dead process's tasks are kept until the end: if garbage-collected, they would run their `finally`.
        self.tasks: set[asyncio.Task[Any]] = set()
        self._late: list[tuple[Context, Callable[..., object], tuple[Any, ...]]] = []
        self._context = copy_context()
        self._context.run(RUNNING_PROCESS.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())

    def enter(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        self._context.copy().run(self.step, callback, *args)

    def step(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        if self.state in (ProcessState.DEAD, ProcessState.STOPPED):
            if self.state is ProcessState.STOPPED or _is_of_task(callback):
                self._late.append((copy_context(), callback, args))
            return
        try:
            callback(*args)
        except Killed:
            assert self.state is not ProcessState.RUNNING, "Killed was raised in a running process"

    def arm(self, points: int) -> None:
        """Die at the `points`-th point from now (1: the next one)."""
        self._points_left = points

    def disarm(self) -> None:
        self._points_left = None

    def is_last_point(self) -> bool:
        """Count one point. True: the process is to die in the middle of it, and the caller must call `die`."""
        if self._points_left is None or self.state is not ProcessState.RUNNING:
            return False
        self._points_left -= 1
        return self._points_left <= 0

    def die(self) -> None:
        """Die in the middle of what runs. Raises Killed."""
        self.kill()
        raise Killed(self.name)

    def kill(self) -> None:
        """Die between two callbacks."""
        if self.state in (ProcessState.RUNNING, ProcessState.STOPPED):
            self.state = ProcessState.DEAD
            self._points_left = None
            self._late = [entry for entry in self._late if _is_of_task(entry[1])]
            self._network.crash(self.address)
            self._on_death(self)

    def stop(self) -> None:
        if self.state is ProcessState.RUNNING:
            self._network.hang(self.address)
            self.state = ProcessState.STOPPED
            self.num_stops += 1

    def go_on(self) -> None:
        if self.state is ProcessState.STOPPED:
            self._network.resume(self.address)
            self.state = ProcessState.RUNNING
            self._call_late()

    def bury(self) -> None:
        """The run is over: cancel the remaining tasks of a dead process, which only now run again."""
        self.state = ProcessState.ENDED
        for task in list(self.tasks):
            task.cancel()
        self._call_late()

    def _call_late(self) -> None:
        late, self._late = self._late, []
        for context, callback, args in late:
            asyncio.get_running_loop().call_soon(callback, *args, context=context)


def _is_of_task(callback: Callable[..., object]) -> bool:
    """A task's step, or `gather`'s callback when one of its parts ends: without it the task could never end."""
    is_gather = getattr(callback, "__module__", "") == "asyncio.tasks"
    return is_gather or isinstance(getattr(callback, "__self__", None), asyncio.Task)
