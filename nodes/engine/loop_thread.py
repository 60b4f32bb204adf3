"""The thread of an engine, with an event loop of its own: it runs whatever the thread that uses the engine does."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvloop

from nodes.engine.errors import EngineClosed, WrongLoop

if TYPE_CHECKING:
    import concurrent.futures

_STOP_S: Final = 5.0
"""A loop that is told to stop does so in its next turn; a thread that hangs is left to the end of the process."""

Result = TypeVar("Result")


class LoopThread:
    """A loop that runs from the start until `stop`. Coroutines come from any other thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        # A daemon, or a program that has forgotten its engine would never end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Run it there. Raises EngineClosed if the loop is stopped, WrongLoop on its own thread."""
        if threading.current_thread() is self._thread:
            work.close()
            raise WrongLoop("an engine cannot be used on its own thread, which would wait for itself: use another one")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise EngineClosed("this engine is closed: make another one") from None

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it there and wait; if the wait is interrupted (Ctrl-C), it is cancelled. Raises as `begin` does."""
        begun = self.begin(work)
        try:
            return begun.result()
        except BaseException:
            # Also what it raised itself, and then this does nothing.
            begun.cancel()
            raise

    def post(self, callback: Callable[[], object]) -> None:
        """Have it called there, soon; never, if the loop is stopped, or in a process that was forked from this one."""
        with contextlib.suppress(RuntimeError):
            if os.getpid() == self._pid:
                self._loop.call_soon_threadsafe(callback)

    def stop_after(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the loop once `last` has run there; nobody waits for that."""

        def begin() -> None:
            self._loop.create_task(last()).add_done_callback(lambda _: self._loop.stop())

        self.post(begin)

    def stop(self) -> None:
        """End the loop and wait for its thread. What is still running there is cancelled."""
        if self._thread.is_alive():
            self.post(self._loop.stop)
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
        finally:
            self._loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
