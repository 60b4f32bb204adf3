"""Cancels that wait for their acknowledgement."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodes.gateway import cancels
from nodes.gateway.cancels import CancelLedger
from nodes.gateway.events import SendCancel
from nodes.request import AttemptRef

RETRY_S, GIVE_UP_S = 0.5, 30.0
SCHEDULERS, REQUESTS = st.sampled_from(["d0", "d1"]), st.sampled_from("abc")


def ledger() -> CancelLedger:
    return CancelLedger(retry_s=RETRY_S, give_up_s=GIVE_UP_S)


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


class Cancelling(RuleBasedStateMachine):
    """What is cancelled is under way, or will be sent, until it is acknowledged, given up, or its scheduler is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.book = ledger()
        self.now = 0.0
        self.owed: dict[tuple[str, str], tuple[int, float]] = {}
        self.unsent: set[tuple[str, str]] = set()
        self.under_way: list[SendCancel] = []
        self.retry_at: dict[str, float] = {}

    @rule(scheduler=SCHEDULERS, request_id=REQUESTS, attempt=st.integers(0, 2))
    def add(self, scheduler: str, request_id: str, attempt: int) -> None:
        self.book.add(scheduler, request_id, attempt, self.now)
        if self.owed.get((scheduler, request_id), (-1, 0.0))[0] < attempt:
            self.owed[scheduler, request_id] = (attempt, self.now + GIVE_UP_S)
            self.unsent.add((scheduler, request_id))

    @rule()
    def take(self) -> None:
        due = {scheduler for scheduler, at in self.retry_at.items() if at <= self.now}
        for key in [key for key, (_, until) in self.owed.items() if key[0] in due and until <= self.now]:
            del self.owed[key]
        for scheduler in due:
            del self.retry_at[scheduler]
        self.unsent.clear()
        self.under_way += self.book.take(self.now)
        assert self.book.take(self.now) == [], "once is enough"

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        sent = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.book.acknowledged(sent.scheduler, sent.attempts)
        for ref in sent.attempts:
            if self.owed.get((sent.scheduler, ref.request_id), (9, 0.0))[0] <= ref.attempt:
                del self.owed[sent.scheduler, ref.request_id]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        sent = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.book.failed(sent.scheduler, self.now)
        self.retry_at.setdefault(sent.scheduler, self.now + RETRY_S)

    @rule(scheduler=SCHEDULERS)
    def lose(self, scheduler: str) -> None:
        self.book.lost(scheduler)
        self.owed = {key: value for key, value in self.owed.items() if key[0] != scheduler}
        self.retry_at.pop(scheduler, None)

    @rule(by=st.sampled_from([0.1, 0.5, 31.0]))
    def pass_time(self, by: float) -> None:
        self.now += by

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert len(self.book) == len(self.owed)
        for (scheduler, request_id), (attempt, _) in self.owed.items():
            assert (
                (scheduler, request_id) in self.unsent
                or scheduler in self.retry_at
                or any(
                    one.scheduler == scheduler and AttemptRef(request_id, attempt) in one.attempts
                    for one in self.under_way
                )
            )


TestCancelling = Cancelling.TestCase
TestCancelling.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
