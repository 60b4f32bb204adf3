"""Threads that do one kind of blocking work, in the order in which it was given."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from typing_extensions import override


class Lane(Protocol):
    """Where work is done that may block."""

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work`, which does not raise, once that given before it has at least begun."""
        ...

    def close(self) -> None:
        """Return when all work has been done; nothing may be submitted afterwards."""
        ...


class ThreadLane(Lane):
    """`num_threads` threads; with one, work is also done in order. How much waits is bounded by who submits it."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Daemons: a disk that hangs must not keep a process from ending.
        names = [name] if num_threads == 1 else [f"{name}-{number}" for number in range(num_threads)]
        self._threads = [threading.Thread(target=self._run, name=one, daemon=True) for one in names]
        for thread in self._threads:
            thread.start()

    @override
    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    @override
    def close(self) -> None:
        self._let_end()
        for thread in self._threads:
            thread.join()

    def _let_end(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            # Not kept until the next one comes: it holds views of pools, which can then not be unmapped.
            del work
