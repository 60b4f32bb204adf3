"""`cupy.cuda`: streams that are threads, and events that they reach."""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Self

from cupy.cuda import compiler, driver, runtime

__all__ = ["Event", "Stream", "compiler", "driver", "runtime"]

_numbers = itertools.count(1)
_entered = threading.local()


def current_stream() -> "Stream":
    """The stream that this thread has entered."""
    return _entered.streams[-1]


class Event:
    """A point in a stream, once it was recorded."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = next(_numbers)
        self._reached = threading.Event()
        self._reached.set()
        runtime.events[self.ptr] = self

    def __del__(self) -> None:
        runtime.events.pop(self.ptr, None)

    def record(self, stream: "Stream") -> None:
        self._reached = reached = threading.Event()
        stream.put(reached.set)

    @property
    def done(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


class CurrentStream:
    """The legacy default stream, and torch's current one: work is done at once when it is put in."""

    def put(self, work: Callable[[], None]) -> None:
        work()


runtime.streams[0] = CurrentStream()


class Stream:
    """Does what is put into it, one after the other, in a thread of its own."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = next(_numbers)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        runtime.streams[self.ptr] = self
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> Self:
        _entered.streams = [*getattr(_entered, "streams", []), self]
        return self

    def __exit__(self, *_: object) -> None:
        _entered.streams = _entered.streams[:-1]

    def _run(self) -> None:
        while True:
            self._work.get()()
