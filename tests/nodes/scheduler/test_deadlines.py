"""One timer for everything, and asks that go on until they are answered."""

from nodes.scheduler.asks import RETRY, PersistentAsks
from nodes.scheduler.deadlines import Deadlines
from nodes.scheduler.events import Ask, Outbox


def test_keys_come_in_order_and_once() -> None:
    deadlines = Deadlines()
    deadlines.set(("b", ""), 2.0)
    deadlines.set(("a", ""), 1.0)
    assert deadlines.next() == 1.0
    assert deadlines.pop_due(0.5) is None
    assert [deadlines.pop_due(5.0) for _ in range(3)] == [("a", ""), ("b", ""), None]
    assert deadlines.next() is None
    assert len(deadlines) == 0


def test_a_moved_key_is_due_at_its_new_time_only() -> None:
    deadlines = Deadlines()
    deadlines.set(("a", ""), 1.0)
    deadlines.set(("a", ""), 3.0)
    assert deadlines.pop_due(2.0) is None
    deadlines.set_default(("a", ""), 9.0)
    assert deadlines.next() == 3.0
    assert deadlines.clear(("a", "")) is True
    assert deadlines.clear(("a", "")) is False
    assert deadlines.next() is None
    deadlines.set_default(("a", ""), 9.0)
    assert deadlines.next() == 9.0


def test_moving_a_key_for_ever_takes_no_memory() -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.set(("a", ""), float(index))
    assert len(deadlines._heap) < 100
    assert deadlines.pop_due(1e9) == ("a", "")
    assert deadlines.pop_due(1e9) is None


def asks() -> tuple[PersistentAsks, Outbox, Deadlines]:
    outbox, deadlines = Outbox(), Deadlines()
    return PersistentAsks(outbox, deadlines), outbox, deadlines


def start(pending: PersistentAsks, give_up_at: float = 10.0) -> None:
    pending.start(("close", "g 1"), "a", "message", timeout_s=2.0, retry_s=0.5, give_up_at=give_up_at)


def test_an_ask_is_repeated_until_it_is_answered() -> None:
    pending, outbox, deadlines = asks()
    start(pending)
    assert outbox.take() == [Ask("a", "message", 2.0, ("close", "g 1"))]
    assert pending.failed(("close", "g 1"), 2.0) is False
    assert deadlines.next() == 2.5
    key = deadlines.pop_due(2.5)
    assert key == (RETRY, "close g 1")
    pending.retry(key[1])
    assert len(outbox.take()) == 1
    assert ("close", "g 1") in pending
    assert pending.answered(("close", "g 1")) is True
    assert pending.answered(("close", "g 1")) is False
    pending.retry(key[1])
    assert outbox.take() == []
    assert len(pending) == 0


def test_an_ask_is_given_up_after_its_time() -> None:
    pending, _, deadlines = asks()
    start(pending)
    assert pending.failed(("close", "g 1"), 9.6) is True
    assert pending.failed(("close", "g 1"), 9.7) is False
    assert deadlines.next() is None


def test_an_ask_does_not_wait_for_the_pause_when_the_peer_is_back() -> None:
    pending, outbox, deadlines = asks()
    start(pending)
    outbox.take()
    pending.hurry("a")
    assert outbox.take() == [], "it is under way"
    pending.failed(("close", "g 1"), 2.0)
    pending.hurry("b")
    assert outbox.take() == []
    pending.hurry("a")
    assert len(outbox.take()) == 1
    assert deadlines.next() is None


def test_an_ask_that_nobody_wants_is_not_repeated() -> None:
    pending, outbox, deadlines = asks()
    start(pending)
    pending.failed(("close", "g 1"), 2.0)
    pending.stop(("close", "g 1"))
    assert deadlines.next() is None
    outbox.take()
    pending.hurry("a")
    assert outbox.take() == []
