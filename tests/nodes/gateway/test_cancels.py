"""Cancels that wait for their acknowledgement."""

from nodes.gateway import cancels
from nodes.gateway.cancels import CancelLedger
from nodes.gateway.events import SendCancel
from nodes.request import AttemptRef


def ledger() -> CancelLedger:
    return CancelLedger(retry_s=0.5, give_up_s=30.0)


def test_new_cancels_go_out_at_once_and_together() -> None:
    book = ledger()
    book.add("d0", "a", 0, 0.0)
    book.add("d0", "b", 1, 0.0)
    book.add("d1", "c", 0, 0.0)
    assert book.take(0.0) == [
        SendCancel("d0", [AttemptRef("a", 0), AttemptRef("b", 1)]),
        SendCancel("d1", [AttemptRef("c", 0)]),
    ]
    assert book.take(0.0) == []
    assert len(book) == 3


def test_a_higher_attempt_replaces_and_a_lower_one_does_not() -> None:
    book = ledger()
    book.add("d0", "a", 1, 0.0)
    book.add("d0", "a", 0, 0.0)
    assert book.take(0.0) == [SendCancel("d0", [AttemptRef("a", 1)])]
    book.add("d0", "a", 2, 0.0)
    assert len(book) == 1
    book.acknowledged("d0", [AttemptRef("a", 1), AttemptRef("zzz", 0)])
    assert len(book) == 1, "attempt 2 is still pending"
    book.acknowledged("d0", [AttemptRef("a", 2)])
    book.acknowledged("nobody", [AttemptRef("a", 2)])
    assert len(book) == 0


def test_retries_wait_are_batched_and_give_up() -> None:
    book = ledger()
    book.add("d0", "a", 0, 0.0)
    book.take(0.0)
    book.failed("d0", 2.0)
    book.add("d0", "b", 0, 2.1)
    book.take(2.1)
    book.failed("d0", 2.2)
    assert book.take(2.4) == []
    assert book.take(2.5) == [SendCancel("d0", [AttemptRef("a", 0), AttemptRef("b", 0)])]
    book.failed("d0", 31.0)
    assert book.take(31.6) == [SendCancel("d0", [AttemptRef("b", 0)])]
    book.failed("d0", 33.0)
    assert book.take(40.0) == []
    assert len(book) == 0


def test_a_lost_scheduler_takes_its_cancels_with_it() -> None:
    book = ledger()
    book.add("d0", "a", 0, 0.0)
    book.failed("d0", 0.0)
    book.lost("d0")
    book.lost("nobody")
    assert book.take(9.0) == []
    assert len(book) == 0


def test_large_batches_are_split_and_the_ledger_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(cancels, "MAX_PENDING", 5)
    monkeypatch.setattr(cancels, "MAX_PER_MESSAGE", 2)
    book = ledger()
    for number in range(9):
        book.add("d0", str(number), 0, 0.0)
    assert len(book) == 5
    assert [len(command.attempts) for command in book.take(0.0)] == [2, 2, 1]
