"""Numbered steps: two in flight, first result wins, replay with what is known filled in."""

from array import array

import pytest

from kvstore.cache.prefix_cache import PrefixCache
from mesh.address import Address
from mesh.runtime.effects import Ask, Tell
from nodes.protocol import Adopt, Adopted, Fence, RowError, StepMismatch, StepPlan, StepResult
from nodes.protocol.steps import RowColumn
from nodes.request import RequestSpec, Sampling
from nodes.scheduler.asks import ASK_RETRY_S, RETRY
from nodes.scheduler.batch.step import Step
from nodes.scheduler.books import Books
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Announce, Command, FenceWorker, ReadyPeer
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.pipeline import ADOPT, ADOPT_TIMEOUT_S, REPEAT, STEP_REPEAT_S, WORKER_LOST, Pipeline
from tests.nodes.scheduler.scheduler_world import NO_STOP
from tests.nodes.scheduler.test_restore import POOL
from tests.nodes.step_plans import column

CONFIG = SchedulerConfig(group="m", worker="w", agent="a", context_length=99)
W1, W2 = Address("w", 1), Address("w", 2)
DRAW = Sampling()


def sequence(slot: int) -> Sequence:
    one = Sequence(7 + slot, range(4), 3, RequestSpec(DRAW, NO_STOP), 0.0)
    one.slot, one.page_ids = slot, array("i", [slot + 1])
    return one


def sent_steps(commands: list[Command]) -> list[Tell]:
    return [one for one in commands if isinstance(one, Tell) and isinstance(one.message, StepPlan)]


class Bench:
    def __init__(self) -> None:
        books = Books(CONFIG, Address("m", 5), POOL, PrefixCache(9, 16, group="m", epoch=5))
        self.outbox, self.deadlines, self.asks = books.outbox, books.deadlines, books.asks
        self.pipeline = Pipeline(books)
        self.sequences: dict[int, Sequence] = {}

    def adopted(self, epoch: int = 1, now: float = 0.0) -> None:
        adopted = Adopted(worker_epoch=epoch, numerics="x", vocab_size=99)
        if (taken := self.pipeline.take_adopted(ADOPT, adopted, now)) is not None:
            self.pipeline.on_adopted(taken, now)

    def send(self, *slots: int, now: float = 0.0) -> None:
        """A step of the sequences in these slots: a known token of those that it opens, of others what they drew."""
        step = Step(array("i"), [], array("i"), array("i"), [])
        for slot in slots:
            one = self.sequences.setdefault(slot, sequence(slot))
            first = 1
            if one.table != self.pipeline.table:
                one.table, first = self.pipeline.table, 0
                step.opens.append(one.opening())
                step.page_ids.append(slot + 1)
            step.rows.extend((slot, one.number, 3, 1, 1, first, 1 - first))
            step.sequences.append(one)
            step.token_ids.append(-1 if first else 40 + slot)
        self.pipeline.send([step], now)

    def steps(self) -> list[tuple[int, list[int], list[int]]]:
        """Number, slots opened and input tokens of the steps sent since the last look."""
        return [
            (one.message.step, [opening.slot for opening in one.message.opens], list(one.buffers[1].cast("i")))
            for one in sent_steps(self.outbox.take())
        ]

    def result(self, step: int, tokens: list[int], worker: Address = W1, now: float = 0.0, **more):
        result = StepResult(**{"scheduler_epoch": 5, "step": step, "token_ids": tokens, **more})
        taken = self.pipeline.on_result(worker, result, now)
        return [] if taken is None else [taken.token_ids]


def bench() -> Bench:
    one = Bench()
    one.pipeline.adopt(0.0)
    one.adopted()
    one.outbox.take()
    return one


@pytest.fixture
def one() -> Bench:
    return bench()


def test_nothing_is_sent_before_the_worker_is_ours() -> None:
    one = Bench()
    assert not one.pipeline.can_send
    one.pipeline.adopt(0.0)
    assert one.outbox.take() == [Ask("w", Adopt(scheduler_epoch=5, next_step=1), ADOPT_TIMEOUT_S, ADOPT)]
    assert one.deadlines.at((WORKER_LOST, "")) is not None
    assert one.result(1, [1]) == []
    one.adopted()
    assert one.pipeline.can_send
    assert one.deadlines.next() is None


def test_two_in_flight_and_results_in_order(one: Bench) -> None:
    one.send(0, 1)
    one.send(1, 0)
    assert not one.pipeline.can_send
    assert one.steps() == [(1, [0, 1], [40, 41]), (2, [], [-1, -1])]
    assert one.result(1, [5, 6]) == [[5, 6]]
    assert one.result(1, [7, 7]) == [], "the first result wins"
    assert one.result(2, [8, 9]) == [[8, 9]]
    assert one.result(2, [8, 9]) == []
    assert one.pipeline.num_inflight == 0
    assert one.deadlines.next() is None


def test_a_result_that_overtakes_shows_that_the_one_before_is_lost(one: Bench) -> None:
    one.send(0)
    one.send(0)
    sent = one.steps()
    assert one.result(2, [6]) == []
    assert one.steps() == sent, "a result before its turn is not kept"
    assert one.result(1, [5]) == [[5]]
    assert one.result(2, [7]) == [[7]]
    assert (one.pipeline.num_repeated_steps, one.pipeline.num_refused["early"]) == (2, 1)


def test_silence_is_broken_by_repeats_then_by_adopting_again(one: Bench) -> None:
    one.send(0, now=10.0)
    one.steps()
    assert one.deadlines.next() == 10.0 + STEP_REPEAT_S
    pauses = []
    now = 10.0
    for _ in range(3):
        now = one.deadlines.next()
        assert one.deadlines.pop_due(now) == (REPEAT, "")
        one.pipeline.on_repeat_due(now)
        assert one.steps() == [(1, [0], [40])]
        pauses.append(one.deadlines.next() - now)
    assert pauses == [4.0, 8.0, 16.0]
    one.deadlines.pop_due(now + 16.0)
    one.pipeline.on_repeat_due(now + 16.0)
    assert one.outbox.take() == [Ask("w", Adopt(scheduler_epoch=5, next_step=1), ADOPT_TIMEOUT_S, ADOPT)]
    one.adopted(now=now + 17.0)
    assert one.steps() == [(1, [0], [40])]
    assert one.deadlines.next() == now + 17.0 + STEP_REPEAT_S


def test_a_repeat_that_comes_too_late_does_nothing(one: Bench) -> None:
    one.pipeline.on_repeat_due(1.0)
    one.pipeline.adopt(1.0)
    one.outbox.take()
    one.pipeline.send_again(1.0)
    assert one.outbox.take() == []


def test_a_new_worker_gets_the_unacknowledged_steps_with_known_tokens_filled_in(one: Bench) -> None:
    one.send(0, 1)
    one.send(1, 0)
    one.result(1, [5, 6])
    one.send(1, 0, 2)
    one.steps()
    one.pipeline.on_worker_lost(W1, 3.0)
    ask = one.outbox.take()[0]
    assert ask.message == Adopt(scheduler_epoch=5, next_step=2)
    assert not one.pipeline.can_send
    one.adopted(epoch=2, now=4.0)
    sent = sent_steps(one.outbox.commands)
    assert [column(command.buffers, RowColumn.NUM_PAGES) for command in sent] == [[1, 1], [0, 0, 1]]
    assert one.steps() == [(2, [1, 0], [6, 5]), (3, [2], [-1, -1, 42])], "opened once, in the first step with a row"
    assert one.result(2, [7, 8], W1) == [], "the dead one's"
    assert one.result(2, [7, 8], W2) == [[7, 8]]
    one.pipeline.on_repeat_due(9.0)
    assert one.steps() == [(3, [2], [7, 8, 42])]
    one.pipeline.on_repeat_due(19.0)
    assert one.steps() == [(3, [2], [7, 8, 42])]


def test_late_news_of_an_earlier_worker_is_no_news(one: Bench) -> None:
    one.pipeline.on_worker_lost(W1, 1.0)
    one.adopted(epoch=2)
    one.outbox.take()
    one.pipeline.on_worker_lost(W1, 2.0)
    assert one.pipeline.can_send
    assert one.outbox.take() == []
    one.pipeline.on_members({W2.actor_id: ReadyPeer("worker", 2)}, 2.0)
    assert one.outbox.take() == []
    one.pipeline.on_members({W2.actor_id: ReadyPeer("worker", 3)}, 2.0)
    assert [type(command) for command in one.outbox.take()] == [Ask]
    one.pipeline.on_worker_lost(W2, 2.0)
    one.outbox.take()
    one.pipeline.on_members({W2.actor_id: ReadyPeer("worker", 3)}, 2.0)
    assert one.outbox.take() == [], "it is asked already"


def test_an_answer_that_nobody_waits_for_changes_nothing(one: Bench) -> None:
    late = Adopted(worker_epoch=1, numerics="", vocab_size=99)
    assert one.pipeline.take_adopted(ADOPT, late, 1.0) is None
    assert one.pipeline.can_send


def test_adoption_is_asked_until_answered() -> None:
    one = Bench()
    one.pipeline.adopt(0.0)
    one.asks.failed((ADOPT,), 5.0)
    assert one.deadlines.pop_due(6.0) == (RETRY, "w")
    one.outbox.take()
    one.asks.retry("w")
    assert len(one.outbox.take()) == 1


def test_every_result_that_is_not_taken_is_counted(one: Bench) -> None:
    assert one.result(1, [5]) == [], "nothing was sent yet"
    one.send(0)
    one.send(0)
    for sender in (W2, Address("somebody", 1)):
        assert one.result(1, [5], sender) == []
    for epoch in (4, 6):
        assert one.result(1, [5], scheduler_epoch=epoch) == []
    for step in (2, 3, 2**63, -1, 0):
        assert one.result(step, [5]) == []
    assert one.result(1, [5]) == [[5]]
    assert one.result(1, [6]) == []
    refused = {reason: number for reason, number in one.pipeline.num_refused.items() if number}
    assert refused == {"not_ours": 4, "not_sent": 3, "early": 1, "repeated": 3}
    assert one.pipeline.can_send, "none of it is a reason to do without the worker"


def test_a_worker_whose_answer_is_none_to_its_plan_is_fenced(one: Bench) -> None:
    one.send(0, 1)
    one.send(1, 0)
    one.steps()
    assert one.result(1, [5], now=1.0) == []
    told, announced, asked = one.outbox.take()
    reason = "step 1 has 2 rows and was answered with 1 tokens"
    fence = Fence(scheduler_epoch=5, worker_epoch=1, reason=reason)
    assert (told, announced) == (FenceWorker("w", fence), Announce(None, worker_ready=False, numerics="x"))
    assert asked.message == Adopt(scheduler_epoch=5, next_step=1)
    assert not one.pipeline.can_send
    assert one.result(1, [5, 6]) == [], "what it says now is not believed either"
    again = Adopted(worker_epoch=1, numerics="", vocab_size=99)
    assert one.pipeline.take_adopted(ADOPT, again, 2.0) is None
    assert one.outbox.take() == [FenceWorker("w", fence)], "the first may be lost"
    assert one.deadlines.pop_due(2.0 + ASK_RETRY_S) == (RETRY, "w"), "and its successor is asked"
    one.adopted(epoch=2, now=3.0)
    assert [step for step, _, _ in one.steps()] == [1, 2]
    assert one.result(1, [5, 6], W2) == [[5, 6]]
    assert one.result(2, [7, 8], W2) == [[7, 8]]
    assert one.pipeline.num_fenced == 1


def test_a_worker_that_is_there_and_never_answers_is_fenced(one: Bench) -> None:
    one.send(0)
    now = 0.0
    for _ in range(100):
        now = one.deadlines.next()
        if one.deadlines.pop_due(now) == (REPEAT, ""):
            one.pipeline.on_repeat_due(now)
        sent = one.outbox.take()
        if any(isinstance(command, FenceWorker) for command in sent):
            break
        if any(isinstance(command, Ask) for command in sent):
            one.adopted(now=now)
    assert one.pipeline.num_fenced == 1
    assert now <= 60.0


def test_a_slow_worker_is_not_fenced_for_it(one: Bench) -> None:
    """It answers each time just before it is asked again; only answers count, not how many steps wait for them."""
    one.send(0)
    for step in range(1, 8):
        # As after three repeats, each of which the worker would have to miss.
        one.pipeline._repeat_s = 16.0
        one.pipeline.on_repeat_due(step * 100.0)
        one.adopted(now=step * 100.0)
        assert one.result(step, [5]) == [[5]]
        one.send(0)
    assert one.pipeline.num_fenced == 0


def test_errors_of_rows_are_the_workers(one: Bench) -> None:
    one.send(0, 1, 2)
    error = RowError(1, "poisoned_request", "it raised")
    result = StepResult(scheduler_epoch=5, step=1, token_ids=[5, -1, 6], errors=[error])
    step = one.pipeline.on_result(W1, result, 0.0)
    assert step.errors == {1: error}


def test_a_placeholder_of_a_failed_row_is_computed_on_something(one: Bench) -> None:
    one.send(0, 1)
    one.send(0, 1)
    one.result(1, [-1, 6], errors=[RowError(0, "poisoned_request", "")])
    one.steps()
    one.pipeline.send_again(1.0)
    assert one.steps() == [(2, [], [0, 6])]


def test_what_a_new_worker_computes_again_is_counted(one: Bench) -> None:
    one.send(0, 1)
    one.send(0)
    one.pipeline.on_worker_lost(W1, 1.0)
    one.adopted(epoch=1)
    assert one.pipeline.num_recomputed_tokens == 0, "the same worker: it has done them, or will"
    one.pipeline.on_worker_lost(W1, 2.0)
    one.adopted(epoch=2)
    assert one.pipeline.num_recomputed_tokens == 3


def test_a_step_carries_a_deadline_by_what_steps_took_and_more_for_the_next_worker(one: Bench) -> None:

    def timeouts() -> list[float]:
        return [command.message.timeout_s for command in sent_steps(one.outbox.take())]

    one.send(0)
    assert timeouts() == [CONFIG.step_deadline_s + CONFIG.token_deadline_s]
    one.result(1, [5], elapsed_s=7.0)
    one.send(0)
    one.send(0)
    assert timeouts() == [70.0, 70.0]
    one.pipeline.on_worker_lost(W1, 1.0)
    one.adopted(epoch=2)
    assert timeouts() == [280.0, 280.0], "the deadline may have been what ended the one before"


def test_a_step_that_the_worker_cannot_run_is_told_all_over_again_and_the_second_time_it_is_fenced(one: Bench) -> None:
    one.send(0)
    one.send(1)
    one.result(1, [5])
    one.steps()

    def mismatch(step: int, worker: Address = W1, epoch: int = 5) -> list[object]:
        message = StepMismatch(scheduler_epoch=epoch, step=step, reason="sequence 8 is not open in slot 1")
        one.pipeline.on_mismatch(worker, message, 1.0)
        return one.outbox.take()

    assert mismatch(2, W2) == mismatch(2, epoch=4) == mismatch(1) == mismatch(3) == []
    assert mismatch(2) == [Ask("w", Adopt(scheduler_epoch=5, next_step=2), ADOPT_TIMEOUT_S, ADOPT)]
    assert mismatch(2) == [], "it is asked already"
    one.adopted()
    assert one.steps() == [(2, [1], [41])]
    fenced, *_ = mismatch(2)
    assert "still cannot run step 2: sequence 8 is not open in slot 1" in fenced.message.reason
    assert one.pipeline.num_mismatches == 2
    one.adopted(epoch=2)
    assert one.steps() == [(2, [1], [41])]
    assert isinstance(mismatch(2, W2)[0], Ask), "the next one is told again, too, before it is fenced"
    one.adopted(epoch=2)
    assert one.result(2, [6], W2) == [[6]]
    one.send(0)
    one.steps()
    assert isinstance(mismatch(3, W2)[0], Ask), "between the two a step was run"
