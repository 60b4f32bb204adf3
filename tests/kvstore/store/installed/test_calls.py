"""Calls in real threads: what hangs is given up, with its thread, and what is given up four times is off."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.store.installed import calls as calls_module
from kvstore.store.installed.calls import BoundedCalls, InvalidAnswer, truths

DEADLINE_S = 0.1
LATE_S = 10.0
"""On a busy machine; what never ends is longer."""


class Owner:
    """Polls when it is woken."""

    def __init__(self, threads: dict[str, int] | None = None, deadline_s: float = DEADLINE_S) -> None:
        self.woken = threading.Event()
        self.timers: list[threading.Timer] = []
        self.free = threading.Event()
        self.results: list[Any] = []
        threads = threads or {"get": 1, "close": 1}
        self.calls = BoundedCalls(threads, deadline_s, time.monotonic, self.later, self.woken.set)

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, work)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def hang(self) -> str:
        self.free.wait()
        return "late"

    def call(self, work: Callable[[], Any], **options: Any) -> None:
        self.calls.submit("get", work, self.results.append, **options)

    def until(self, count: int) -> list[Any]:
        begun = time.monotonic()
        while len(self.results) < count:
            assert self.woken.wait(LATE_S), "nobody woke it"
            self.woken.clear()
            self.calls.poll()
            assert time.monotonic() - begun < LATE_S
        return self.results


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.free.set()
    owner.calls.close("close", lambda: None)
    for timer in owner.timers:
        timer.cancel()
    for thread in threading.enumerate():
        if thread.name.startswith("kv-store"):
            thread.join(LATE_S)
            assert not thread.is_alive(), "one that was given up ends once it can"


def raises() -> None:
    raise SystemExit(1)


def invalid() -> None:
    raise InvalidAnswer("nothing")


def test_calls_are_made_in_order_and_failures_are_none(owner: Owner) -> None:
    for work in (lambda: 1, raises, invalid, lambda: 2):
        owner.call(work)
    assert owner.until(4) == [1, None, None, 2]
    assert owner.calls.counts == {("get", "done"): 2, ("get", "raised"): 1, ("get", "invalid"): 1}
    assert owner.calls.last_failure == "get returned nothing"
    owner.calls.close("close", lambda: owner.results.append("closed"))
    assert owner.results[-1] == "closed"


def test_one_that_hangs_is_given_up_and_the_next_has_a_thread_of_its_own(owner: Owner) -> None:
    owner.call(owner.hang)
    owner.call(lambda: threading.current_thread().name, may_wait=True)
    assert owner.until(2) == [None, "kv-store-get"]
    owner.free.set()
    owner.call(lambda: 3)
    assert owner.until(3)[2] == 3, "what returned late is not looked at"
    assert not owner.calls.why_off
    assert owner.calls.counts["get", "abandoned"] == 1


def test_what_cannot_begin_in_time_is_not_made(owner: Owner) -> None:
    made: list[int] = []
    owner.call(owner.hang)
    owner.call(lambda: made.append(1))
    assert owner.until(2) == [None, None]
    assert owner.calls.counts["get", "not_made"] == 1
    assert not made


def test_four_that_hang_are_the_end(owner: Owner) -> None:
    for _ in range(6):
        owner.call(owner.hang, may_wait=True)
    assert owner.until(6) == [None] * 6
    assert "4 calls were given up, the last one because get did not return within 0.1 s" in owner.calls.why_off
    assert owner.calls.counts == {("get", "abandoned"): 4, ("get", "not_made"): 2}
    owner.call(lambda: "made")
    assert owner.until(7)[6] is None


def test_an_end_that_hangs_is_not_waited_for(owner: Owner) -> None:
    begun = time.monotonic()
    owner.call(owner.hang)
    owner.calls.close("close", owner.free.wait)
    assert 2 * DEADLINE_S <= time.monotonic() - begun < LATE_S
    assert owner.results == [], "nobody is told any more"
    owner.call(lambda: 1)
    owner.calls.poll()
    assert owner.results == []


def test_more_than_may_wait_are_not_made(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_WAITING", 2)
    for _ in range(4):
        owner.call(owner.hang)
    owner.calls.poll()
    assert owner.results == [None], "at once"


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "a NoneType"), ([True], "fewer"), ([1, 0, None], "more"), (iter(int, 1), "more"), (7, "a int")],
)
def test_what_is_no_answer(answer: Any, words: str) -> None:
    with pytest.raises(InvalidAnswer, match=words):
        truths(answer, 2)


@pytest.mark.parametrize("answer", [[True, False], (1, 0), iter(["x", ""]), {True: 1, False: 2}])
def test_what_is_an_answer(answer: Any) -> None:
    assert truths(answer, 2) == [True, False]
