"""Cancels that wait for their acknowledgement; how they are asked again is `mesh/calls/retrier.py`'s."""

import pytest

from mesh.runtime.deadlines import Deadlines
from nodes.gateway.requests import cancels
from nodes.gateway.requests.cancels import RETRY, CancelLedger
from nodes.gateway.requests.events import SendCancel
from nodes.request import AttemptRef

GIVE_UP_S = 30.0


class Book:
    """A ledger and what it has sent."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.sent: list[SendCancel] = []
        self.ledger = CancelLedger(self.deadlines, self.sent.append, give_up_s=GIVE_UP_S)

    def take(self, now: float) -> list[SendCancel]:
        while (key := self.deadlines.pop_due(now)) is not None:
            assert key[0] == RETRY
            self.ledger.retry(key[1])
        self.ledger.flush()
        sent = self.sent[:]
        self.sent.clear()
        return sent


@pytest.fixture
def book() -> Book:
    return Book()


def test_new_cancels_go_out_at_once_and_together(book: Book) -> None:
    book.ledger.add("d0", "a", 0, 0.0)
    book.ledger.add("d0", "b", 1, 0.0)
    book.ledger.add("d1", "c", 0, 0.0)
    assert book.take(0.0) == [
        SendCancel("d0", [AttemptRef("a", 0), AttemptRef("b", 1)]),
        SendCancel("d1", [AttemptRef("c", 0)]),
    ]
    assert book.take(0.0) == []
    assert len(book.ledger) == 3


def test_a_higher_attempt_replaces_and_a_lower_one_does_not(book: Book) -> None:
    book.ledger.add("d0", "a", 1, 0.0)
    book.ledger.add("d0", "a", 0, 0.0)
    assert book.take(0.0) == [SendCancel("d0", [AttemptRef("a", 1)])]
    book.ledger.add("d0", "a", 2, 0.0)
    assert len(book.ledger) == 1
    book.ledger.acknowledged("d0", [AttemptRef("a", 1), AttemptRef("zzz", 0)])
    assert len(book.ledger) == 1, "attempt 2 is still pending"
    book.ledger.acknowledged("d0", [AttemptRef("a", 2)])
    book.ledger.acknowledged("nobody", [AttemptRef("a", 2)])
    assert len(book.ledger) == 0


def test_a_failed_ask_is_repeated_with_all_of_its_scheduler_and_given_up(book: Book) -> None:
    book.ledger.add("d0", "a", 0, 0.0)
    book.take(0.0)
    book.ledger.failed("d0", 2.0)
    book.ledger.add("d0", "b", 0, 2.1)
    book.take(2.1)
    book.ledger.failed("d0", 2.2)
    assert book.take(2.4) == []
    assert book.take(2.5) == [SendCancel("d0", [AttemptRef("a", 0), AttemptRef("b", 0)])]
    book.ledger.failed("d0", 31.0)
    assert book.take(31.6) == [SendCancel("d0", [AttemptRef("b", 0)])]
    book.ledger.failed("d0", 33.0)
    assert book.take(40.0) == []
    assert len(book.ledger) == 0


def test_a_lost_scheduler_takes_its_cancels_with_it(book: Book) -> None:
    book.ledger.add("d0", "a", 0, 0.0)
    book.take(0.0)
    book.ledger.failed("d0", 0.0)
    book.ledger.lost("d0")
    book.ledger.lost("nobody")
    assert book.take(9.0) == []
    assert len(book.ledger) == 0


def test_large_batches_are_split(monkeypatch) -> None:
    monkeypatch.setattr(cancels, "MAX_PER_MESSAGE", 2)
    book = Book()
    for number in range(5):
        book.ledger.add("d0", str(number), 0, 0.0)
    assert [len(command.attempts) for command in book.take(0.0)] == [2, 2, 1]
