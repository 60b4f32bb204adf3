"""An asyncio event loop whose clock jumps to the next timer when nothing is runnable.

Hours of heartbeats, leases and back-offs pass in milliseconds, and every run of the same program takes the same path:
nothing sleeps, there are no threads and no sockets, and tasks are numbered and hash by their number, so that even a
`set` of tasks is iterated in the same order each time. Used by the tests and by every seeded simulation of a mesh; the
idea comes from trio's `MockClock(autojump_threshold=0)`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast

from mesh.testing.processes import RUNNING_PROCESS, Killed, SimulatedProcess

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Timers may run early by up to this much. asyncio's default, the real clock's resolution, differs between machines.
_CLOCK_RESOLUTION_S = 1e-9


class VirtualTimeError(Exception):
    """Base of the errors that end a run on virtual time."""


class Deadlock(VirtualTimeError):
    """Nothing is runnable, no timer is set, and the main task has not ended: nothing can ever happen again."""


class TimeLimit(VirtualTimeError):
    """The virtual clock passed its limit: the program keeps running (heartbeats, say) without ever ending."""


class Livelock(VirtualTimeError):
    """Callbacks follow each other without end at one instant."""


class RealWorld(VirtualTimeError):
    """The program asked for a thread, which has no place in virtual time."""


class UnhandledErrors(VirtualTimeError):
    """Exceptions that no task or callback handled; `errors` holds them."""

    def __init__(self, contexts: list[dict[str, Any]]) -> None:
        self.errors = [context["exception"] for context in contexts if context.get("exception") is not None]
        lines = [f"{context.get('message')}: {context.get('exception')!r}" for context in contexts]
        super().__init__("; ".join(lines))


class _NumberedTask(asyncio.Task[Any]):
    """A task that hashes by its number, so that sets of tasks iterate in the same order in every run."""

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        # Before the base class's constructor, which puts the task into a set.
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _Jump:
    """Takes the place of `asyncio`'s selector: instead of waiting, it advances the clock."""

    def __init__(self, loop: "VirtualTimeLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.jump(timeout)
        return []

    def close(self) -> None:
        return


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop on virtual time. `run_until_complete` raises a `VirtualTimeError` if the run cannot end well.

    `limit_s` bounds the virtual clock, `steps_per_instant` the loop iterations without progress of the clock, of which
    a simulated mesh takes 34 at most; a million took nine seconds.
    `inline_executor`: `run_in_executor` calls its function at once, on the loop; otherwise it raises `RealWorld`.
    """

    def __init__(
        self, *, limit_s: float = 86_400.0, inline_executor: bool = False, steps_per_instant: int = 20_000
    ) -> None:
        self._now = 0.0
        super().__init__()
        self._limit_s = limit_s
        self._inline_executor = inline_executor
        self._steps_per_instant = steps_per_instant
        self._steps_left = steps_per_instant
        self._num_tasks = 0
        self._thread = threading.get_ident()
        self._selector = _Jump(self)
        self._clock_resolution = _CLOCK_RESOLUTION_S
        self.unhandled: list[dict[str, Any]] = []
        self.set_task_factory(_new_task)
        self.set_exception_handler(_collect)

    def time(self) -> float:
        return self._now

    def next_task_number(self) -> int:
        """The number of the next task; counts from 1 in each loop, so names in logs are the same in every run."""
        self._num_tasks += 1
        return self._num_tasks

    def jump(self, timeout: float | None) -> None:
        """Called when the loop would wait (None: forever). Raises Deadlock, Livelock or TimeLimit, naming the tasks."""
        if timeout is None:
            raise Deadlock(f"nothing more can happen at t={self._now:.6f} s; waiting: {self._waiting()}")
        if timeout <= 0:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._steps_left = self._steps_per_instant
                raise Livelock(f"{self._steps_per_instant} loop iterations at t={self._now:.6f} s: {self._waiting()}")
            return
        self._steps_left = self._steps_per_instant
        # The timer's own time, not now + timeout, which rounding may place slightly before it.
        timers = cast("list[asyncio.TimerHandle]", getattr(self, "_scheduled"))  # noqa: B009 - asyncio's own heap
        self._now = max(self._now, timers[0].when())
        if self._now > self._limit_s:
            raise TimeLimit(f"not done at the limit of {self._limit_s} s of virtual time; waiting: {self._waiting()}")

    def _waiting(self) -> str:
        waiting = [(task.get_name(), task) for task in asyncio.all_tasks(self) if not task.done()]
        tasks = sorted(waiting, key=lambda entry: (entry[0], hash(entry[1])))
        parts: list[str] = []
        for name, task in tasks:
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "?"
            parts.append(f"{name} at {where}")
        return ", ".join(parts) or "no task"

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        if not self._inline_executor:
            raise RealWorld("run_in_executor needs a thread; pass inline_executor=True to run the call on the loop")
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - what an executor does: the error belongs to whoever awaits
            future.set_exception(error)
        return future

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call soon, as the simulated process that requests it, if there is one."""
        process = _process_of(context)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(process.step, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = _process_of(context)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, process.step, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RealWorld("another thread called into a loop on virtual time")
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no selector events to process; `asyncio` calls this once per iteration."""

    def _write_to_self(self) -> None:
        """Nothing ever sleeps, so nothing needs to be woken."""


def _process_of(context: Context | None) -> SimulatedProcess | None:
    """The process that owns a callback run in `context`; None stands for the current context, as in asyncio."""
    return RUNNING_PROCESS.get() if context is None else context.get(RUNNING_PROCESS)


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualTimeLoop)
    number = loop.next_task_number()
    if not options.get("name"):
        options["name"] = f"task-{number}"
    task = _NumberedTask(coroutine, number=number, loop=loop, **options)
    process = _process_of(options.get("context"))
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


def _collect(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualTimeLoop)
    if not isinstance(context.get("exception"), Killed):
        loop.unhandled.append(context)


def run(main: Coroutine[Any, Any, T], *, limit_s: float = 86_400.0, inline_executor: bool = False) -> T:
    """Run `main` to its end on a new `VirtualTimeLoop`, cancel remaining tasks, and close the loop.

    Raises `UnhandledErrors` if a callback or a forgotten task failed, and what `main` raises before that.
    """

    def factory() -> VirtualTimeLoop:
        return VirtualTimeLoop(limit_s=limit_s, inline_executor=inline_executor)

    with asyncio.Runner(loop_factory=factory) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        try:
            result = runner.run(main)
        # Whatever ended it, an interrupt too: what failed before is most often the reason.
        except BaseException as error:
            if loop.unhandled:
                error.add_note(f"before that: {UnhandledErrors(loop.unhandled)}")
            raise
    if loop.unhandled:
        raise UnhandledErrors(loop.unhandled)
    return result
