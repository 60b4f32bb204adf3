"""Supervised tasks: exceptions raised by an actor's code are counted and logged here.

An actor goes on after an exception in one handler; the log names the request that it was about, if known.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from mesh.errors import MeshError
from mesh.runtime.plain_structlog import structlog
from mesh.runtime.telemetry import Metrics

HANDLER_ERRORS: Final = "mesh_handler_errors_total"


class TaskSupervisor:
    """Runs callbacks, timers and tasks of one actor; an exception in one never ends another."""

    def __init__(self, log: structlog.stdlib.BoundLogger, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        # A dictionary, not a set: tasks are cancelled in the order they were spawned.
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def call(self, what: str, callback: Callable[..., None], *args: Any) -> None:
        """Run a callback. `what` names it in the log and metrics if it raises."""
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001
            # By design: here errors of callbacks and timers end, so that one never ends another.
            self.failed(what, error)

    def failed(self, what: str, error: BaseException, about: object = None) -> None:
        """Count and log an exception that ends here, with the request id of the message `about`, if it has one."""
        self._metrics.count(HANDLER_ERRORS, handler=what)
        request_id = getattr(about, "request_id", None)
        fields = {"request_id": request_id} if request_id else {}
        self._log.error("handler failed", handler=what, exc_info=error, **fields)

    def later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
        """Start a timer whose callback runs supervised."""
        what = getattr(callback, "__name__", "timer")
        return self._loop.call_later(max(0.0, delay_s), self.call, what, callback, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Start a task, which `close` cancels; an exception it raises is counted and logged."""
        task = self._loop.create_task(coroutine, name=name or coroutine.__name__)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    async def close(self) -> None:
        """Cancel all tasks except the current one, and wait until they have ended."""
        current = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not current]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                self._tasks.pop(task, None)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, MeshError):
            self._metrics.count(HANDLER_ERRORS, handler=task.get_name())
            self._log.warning("task failed", task=task.get_name(), error=str(error))
        elif error is not None:
            self.failed(task.get_name(), error)
