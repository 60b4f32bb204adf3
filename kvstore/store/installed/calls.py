"""Calls into somebody else's code, in threads of ours, none of which is waited for longer than a deadline.

A call that has not returned by then is abandoned, with its thread and with what it was given: nobody knows whether it
will ever return, nor what it writes until then. So a call gets only what it may keep for ever, and four abandoned ones
are the end: no more calls are made. What a call returns afterwards is not looked at.

All methods are called by one thread, the owner's, and only `wait` and `close` block. The owner calls `poll` whenever
it was woken: by threads whose calls have ended, and by `later` when a deadline has passed.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from typing_extensions import override

from kvstore.store.lanes import Lane, ThreadLane

Result = TypeVar("Result")

DONE: Final = "done"
RAISED: Final = "raised"
INVALID: Final = "invalid"
ABANDONED: Final = "abandoned"
NOT_MADE: Final = "not_made"
"""Not begun within the deadline, since those before it took too long; or the store is off by now."""
OUTCOMES: Final = (DONE, RAISED, INVALID, ABANDONED, NOT_MADE)
MOST_ABANDONED: Final = 4
"""Each keeps a thread and up to 8 MiB until the process ends. One may be an accident of the network; four are not."""
_WAITING: Final = 256
"""Calls of one name that may wait: at a millisecond each, the last one's answer would come after a quarter second."""


class InvalidAnswer(Exception):
    """A call returned something other than what it is to return."""


class Told(Protocol):
    """As `threading.Event`."""

    def set(self) -> None:
        """Wake who waits, now or next time."""
        ...

    def clear(self) -> None:
        """Let the next one wait."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, `timeout` seconds at most."""
        ...


class CallThread(ThreadLane):
    """A thread that may never come back; `close` does not wait for it, and lets it end when it does."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1)

    @override
    def close(self) -> None:
        self._let_end()


# By identity: one is looked for among those that run.
@dataclass(eq=False, slots=True)
class _Call(Generic[Result]):
    """One call, and the thread that it is in once it was begun. `since`: when it was asked for, then when it began."""

    name: str
    work: Callable[[], Result]
    then: Callable[[Result | None], None]
    since: float
    may_wait: bool = True
    thread: Lane | None = None


class BoundedCalls:
    """Calls by name; `threads` says how many of each name may run at once.

    `clock` tells seconds, `later(delay_s, work)` has `work` called by the owner's thread, `wake`, from any thread, has
    it call `poll`. `make_thread` makes a thread by its name; `told` is what `wait` waits for.
    """

    def __init__(
        self,
        threads: dict[str, int],
        deadline_s: float,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        wake: Callable[[], None],
        make_thread: Callable[[str], Lane] = CallThread,
        told: Told | None = None,
    ) -> None:
        self._threads = threads
        self._deadline_s = deadline_s
        self._clock = clock
        self._later = later
        self._wake = wake
        self._make_thread = make_thread
        self._told: Told = told or threading.Event()
        self._waiting: dict[str, deque[_Call[Any]]] = {name: deque() for name in threads}
        self._running: dict[str, list[_Call[Any]]] = {name: [] for name in threads}
        self._idle: dict[str, list[Lane]] = {name: [] for name in threads}
        # Filled by the calls' threads: a call, its outcome, what it returned or why it did not.
        self._ended: deque[tuple[_Call[Any], str, Any]] = deque()
        self._wakes_at: float | None = None
        self._is_closed = False
        self._num_abandoned = 0
        self.why_off = ""
        """Why no call is made any more; empty while some are."""
        self.last_failure = ""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Calls by name and outcome."""

    def submit(
        self,
        name: str,
        work: Callable[[], Result],
        then: Callable[[Result | None], None],
        *,
        may_wait: bool = False,
    ) -> None:
        """Have a thread do `work`, and `poll` call `then` with what it returned; None if it returned nothing in time.

        Unless it `may_wait` for those before it, it is not made if too many wait, or if it cannot begin within the
        deadline: then its result is of no use any more.
        """
        call = _Call(name, work, then, self._clock(), may_wait=may_wait)
        if self.why_off or self._is_closed or (not may_wait and len(self._waiting[name]) >= _WAITING):
            self._end_soon(call, NOT_MADE, None)
            return
        self._waiting[name].append(call)
        self._begin(name)
        self._arm()

    def poll(self) -> None:
        """Call `then` of the calls that are over, and begin others."""
        while self._ended:
            call, outcome, result = self._ended.popleft()
            # One that was abandoned is not among them: its end was told.
            running = self._running[call.name]
            if call.thread is not None:
                if call not in running:
                    continue
                running.remove(call)
                self._idle[call.name].append(call.thread)
            self._finish(call, outcome, result)
        self._abandon(self._clock())
        for name in self._threads:
            self._begin(name)
        self._arm()

    def tell(self) -> None:
        """Other work of the owner has ended: `wait` returns, and the owner is woken. From any thread."""
        self._told.set()
        self._wake()

    def wait(self) -> None:
        """Blocks until `poll` has something to do."""
        due = self._due()
        self._told.wait(None if due is None else max(0.0, due - self._clock()))
        self._told.clear()

    def close(self, name: str, last: Callable[[], None]) -> None:
        """Make no more calls but `last`, as one of `name`. Blocks, a deadline for what runs and one for `last`."""
        for waiting in self._waiting.values():
            waiting.clear()
        self._is_closed = True
        self._wait_for_running()
        self._waiting[name].append(_Call(name, last, lambda _: None, self._clock()))
        self._begin(name)
        self._wait_for_running()
        for threads in self._idle.values():
            while threads:
                threads.pop().close()

    # inside

    def _wait_for_running(self) -> None:
        while any(self._running.values()):
            self.wait()
            self.poll()

    def _begin(self, name: str) -> None:
        waiting, running, idle = self._waiting[name], self._running[name], self._idle[name]
        while waiting and len(running) < self._threads[name]:
            # First: if there can be no more threads, the call stays where its deadline is looked at.
            thread = idle.pop() if idle else self._make_thread(f"kv-store-{name}")
            call = waiting.popleft()
            call.thread = thread
            call.since = self._clock()
            running.append(call)
            call.thread.submit(lambda call=call: self._run(call))

    def _abandon(self, now: float) -> None:
        """Give up what runs for too long, and what has waited for too long."""
        for call in [call for calls in self._running.values() for call in calls]:
            if now < call.since + self._deadline_s or call.thread is None:
                continue
            # Python cannot end a thread. It is told to end once its call returns, and another one takes its place.
            self._running[call.name].remove(call)
            call.thread.close()
            self._num_abandoned += 1
            self.last_failure = f"{call.name} did not return within {self._deadline_s:g} s"
            self._finish(call, ABANDONED, None)
        if self._num_abandoned >= MOST_ABANDONED and not self.why_off:
            self.why_off = f"{self._num_abandoned} calls were given up, the last one because {self.last_failure}"
        for waiting in self._waiting.values():
            late = [call for call in waiting if self.why_off or self._is_late(call, now)]
            for call in late:
                waiting.remove(call)
                self._finish(call, NOT_MADE, None)

    def _is_late(self, call: _Call[Any], now: float) -> bool:
        return not call.may_wait and now >= call.since + self._deadline_s

    def _finish(self, call: _Call[Any], outcome: str, result: Any) -> None:
        self.counts[call.name, outcome] += 1
        if outcome in (RAISED, INVALID):
            self.last_failure = f"{call.name} {result}"
        # Whoever would hear of it is being torn down, and its pools may be gone.
        if not self._is_closed:
            call.then(result if outcome == DONE else None)

    def _arm(self) -> None:
        due = self._due()
        if due is not None and (self._wakes_at is None or due < self._wakes_at):
            self._wakes_at = due
            self._later(max(0.0, due - self._clock()), self._woken)

    def _woken(self) -> None:
        # Clocks differ: if it is a moment too early, `poll` has it called again.
        self._wakes_at = None
        self._wake()

    def _due(self) -> float | None:
        """When the next deadline is over."""
        running = (call for calls in self._running.values() for call in calls)
        waiting = (call for calls in self._waiting.values() for call in calls if not call.may_wait)
        return min((call.since + self._deadline_s for call in (*running, *waiting)), default=None)

    def _end_soon(self, call: _Call[Any], outcome: str, result: Any) -> None:
        self._ended.append((call, outcome, result))
        self.tell()

    # in the calls' threads

    def _run(self, call: _Call[Any]) -> None:
        try:
            result, outcome = call.work(), DONE
        except InvalidAnswer as error:
            result, outcome = f"returned {error}", INVALID
        # Whatever a stranger's code raises, SystemExit too: without an end its call would only be over at its deadline.
        except BaseException as error:  # noqa: BLE001 - it is told, in the words of the failure
            result, outcome = f"raised {type(error).__name__}: {error}", RAISED
        self._end_soon(call, outcome, result)


def truths(answer: object, count: int) -> list[bool]:
    """An answer that has one truth value for each of `count` hashes. Raises InvalidAnswer; called where it may hang."""
    try:
        values: Iterator[object] = iter(cast("Any", answer))
    except TypeError:
        raise InvalidAnswer(f"a {type(answer).__name__}") from None
    # One more than there may be, and no more of it: it may never end.
    found = [bool(value) for _, value in zip(range(count + 1), values, strict=False)]
    if len(found) != count:
        raise InvalidAnswer(
            f"{'fewer' if len(found) < count else 'more'} truth values than the {count} hashes asked for"
        )
    return found
