"""Order, idempotency and adoption of steps, by event lists and against an unreliable scheduler."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.runtime.effects import Refuse, Reply
from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.protocol import Adopt, RowError, StepMismatch, StepResult
from nodes.protocol.steps import MAX_SLOTS, Open
from nodes.request import Sampling
from nodes.worker.core import (
    MAX_QUEUED,
    NUM_KEPT_RESULTS,
    AdoptArrived,
    RunStep,
    SendResult,
    StepArrived,
    StepDone,
    StepRefused,
    TellMismatch,
    WorkerCore,
)
from nodes.worker.steps.columns import Limits
from nodes.worker.steps.step import StepOutcome
from tests.nodes.step_plans import Row, plan_of
from tests.nodes.worker.torch_running import asking

LIMITS = Limits(num_pages=100, page_size=4, vocab_size=50, context_length=64, max_batch_tokens=32)


def rows_of(*rows: dict[str, object]) -> list[Row]:
    """Rows of sequences 1, 2, ... in slots 0, 1, ..., each with a page of its own, unless something else is said."""
    return [
        Row(**{"sequence": slot + 1, "slot": slot, "pages": (slot + 1,), **fields}) for slot, fields in enumerate(rows)
    ]


def arrived(step: int, epoch: int = 1, rows: list[Row] | None = None, **fields: object) -> StepArrived:
    """A step of `rows`, or of one with these fields."""
    return StepArrived("s", *plan_of(step, rows_of(fields) if rows is None else rows, epoch))


def follows(*slots: int, start: int = 1) -> list[Row]:
    """The sequences of these slots go on with what they drew."""
    return [Row(slot + 1, [-1], (), start, slot=slot, first_page=1, opens=False) for slot in slots]


def adopt(epoch: int = 1, next_step: int = 0, call: object = "call") -> AdoptArrived:
    return AdoptArrived(Adopt(scheduler_epoch=epoch, next_step=next_step), call)


def done(*token_ids: int, errors: tuple[RowError, ...] = ()) -> StepDone:
    return StepDone(StepOutcome(token_ids, errors), 0.5)


def adopted(next_step: int = 0) -> WorkerCore:
    core = WorkerCore(LIMITS)
    assert core.handle(adopt(next_step=next_step)) == [Reply("call", core.adopted)]
    return core


def ran(commands: list) -> list[int]:
    return [command.runnable.step for command in commands if isinstance(command, RunStep)]


def codes(commands: list) -> list[str]:
    """Of the rows that failed, in the only result."""
    (sent,) = [command for command in commands if isinstance(command, SendResult)]
    return [error.code for error in sent.result.errors]


@pytest.fixture
def core() -> WorkerCore:
    return adopted(next_step=1)


@pytest.fixture
def ahead() -> WorkerCore:
    """It begins a step while another runs."""
    core = WorkerCore(LIMITS, depth=2)
    assert core.handle(adopt()) == [Reply("call", core.adopted)]
    return core


def test_step_runs_and_is_answered(core: WorkerCore) -> None:
    (command,) = core.handle(arrived(1))
    assert command.runnable.token_ids.tolist() == [1]
    assert command.runnable.page_ids.tolist() == [1]
    assert command.runnable.rows[0].end == 1
    assert command.runnable.rows[0].output_position == 0
    assert core.is_running
    result = StepResult(scheduler_epoch=1, step=1, token_ids=[9], elapsed_s=0.5)
    assert core.handle(done(9)) == [SendResult("s", result)]
    assert not core.is_running
    assert core.handle(arrived(1)) == [SendResult("s", result)]


def test_steps_of_nobody_and_of_others_are_refused() -> None:
    assert WorkerCore(LIMITS).handle(arrived(1, epoch=0)) == [StepRefused(1, "wrong_epoch")]
    assert adopted().handle(arrived(1, epoch=2)) == [StepRefused(1, "wrong_epoch")]


def test_steps_wait_for_the_one_before() -> None:
    core = adopted(next_step=5)
    assert core.handle(arrived(7)) == []
    assert core.handle(arrived(6)) == []
    assert core.handle(arrived(4)) == [StepRefused(4, "too_old")]
    assert core.num_queued == 2
    assert ran(core.handle(arrived(5))) == [5]
    assert core.handle(arrived(5)) == []
    assert ran(core.handle(done(1))) == [6]
    assert ran(core.handle(done(1))) == [7]


def test_without_next_step_the_first_that_stands_alone_begins() -> None:
    core = adopted()
    assert core.handle(arrived(4, rows=follows(0))) == []
    assert core.handle(arrived(6, rows=follows(0))) == []
    assert ran(core.handle(arrived(5))) == [5]
    commands = core.handle(done(3))
    assert ran(commands) == [6]
    core.handle(done(3))
    assert not core.is_running


def test_a_draining_worker_finishes_its_step_and_begins_no_other(core: WorkerCore) -> None:
    assert ran(core.handle(arrived(1))) == [1]
    core.is_draining = True
    assert core.handle(arrived(2)) == []
    assert core.handle(done(9)) == [
        SendResult("s", StepResult(scheduler_epoch=1, step=1, token_ids=[9], elapsed_s=0.5))
    ]
    assert not core.is_running
    assert core.num_queued == 1


def test_too_many_waiting(core: WorkerCore) -> None:
    for step in range(2, 2 + MAX_QUEUED):
        assert core.handle(arrived(step)) == []
    assert core.handle(arrived(99)) == [StepRefused(99, "too_far")]
    assert core.handle(arrived(2)) == []
    # A full queue must not shut out the one step that would empty it.
    commands = core.handle(arrived(1))
    assert commands[0] == StepRefused(1 + MAX_QUEUED, "too_far")
    assert ran(commands) == [1]


def test_a_placeholder_is_what_its_sequence_drew_for_that_position(core: WorkerCore) -> None:
    core.handle(arrived(1, rows=rows_of({}, {}, {"sampling": None, "prompt": 2})))
    core.handle(arrived(2, rows=[*follows(1, 0, 2), *rows_of({}, {}, {}, {"tokens": [4]})[3:]]))
    (command,) = [one for one in core.handle(done(8, 9, -1)) if isinstance(one, RunStep)]
    runnable = command.runnable
    assert runnable.token_ids.tolist() == [9, 8, -1, 4]
    assert [r.row for r in runnable.rows] == [0, 1, 3]
    assert [r.token_offset for r in runnable.rows] == [0, 1, 3]
    assert [runnable.page_ids[r.page_offset] for r in runnable.rows] == [2, 1, 4]
    (sent,) = core.handle(done(1, 2, 3))
    assert sent.result.token_ids == [1, 2, -1, 3]
    assert [(error.row, error.code) for error in sent.result.errors] == [(2, "missing_input")]
    core.handle(arrived(3, rows=follows(0, start=2)))
    core.handle(arrived(4, rows=follows(1)))
    *_, sent = core.handle(done(5))
    assert [error.code for error in sent.result.errors] == ["missing_input"], "it was drawn for position 2"


def test_a_placeholder_that_is_known_by_now() -> None:
    core = adopted(next_step=57)
    commands = core.handle(arrived(57, tokens=[6], start=1))
    assert commands[0].runnable.token_ids.tolist() == [6]


def test_old_results_are_forgotten(core: WorkerCore) -> None:
    for step in range(1, NUM_KEPT_RESULTS + 2):
        core.handle(arrived(step))
        core.handle(done(1))
    assert core.handle(arrived(1)) == [StepRefused(1, "too_old")]
    assert isinstance(core.handle(arrived(2))[0], SendResult)


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (arrived(1, start=61, tokens=[1] * 4, pages=range(1, 17)), "bad_row"),
        (arrived(1, start=-1), "bad_step"),
        (arrived(1, start=2**31 - 1), "bad_row"),
        (arrived(1, start=4), "bad_row"),
        (arrived(1, pages=[]), "bad_row"),
        (arrived(1, prompt=2), "bad_row"),
        (arrived(1, tokens=[50]), "bad_row"),
        (arrived(1, tokens=[-2]), "bad_row"),
        (arrived(1, tokens=[1, -1]), "bad_row"),
        (arrived(1, tokens=[-1]), "missing_input"),
        (arrived(1, pages=[0]), "bad_step"),
        (arrived(1, pages=[100]), "bad_step"),
        (arrived(1, pages=range(1, 18)), "bad_step"),
        (arrived(1, slot=MAX_SLOTS), "bad_step"),
        (arrived(1, slot=-1), "bad_step"),
        (arrived(1, sequence=-1), "bad_step"),
        (arrived(1, first_page=-1), "bad_step"),
        (arrived(1, tokens=[]), "bad_step"),
        (arrived(1, tokens=[1] * 33, pages=range(1, 10)), "bad_step"),
        (arrived(1)._replace(buffers=[*arrived(1).buffers[:2], b""]), "bad_step"),
        (arrived(1)._replace(buffers=[*arrived(1).buffers[:2], b"abcde"]), "bad_step"),
        (arrived(1)._replace(buffers=arrived(1).buffers[:1]), "bad_step"),
    ],
)
def test_plans_that_cannot_be_run_fail_by_row(core: WorkerCore, broken: StepArrived, code: str) -> None:
    (sent,) = core.handle(broken)
    assert [error.code for error in sent.result.errors] == [code]
    assert sent.result.token_ids == [-1]
    assert ran(core.handle(arrived(2))) == [2]


def test_a_slot_has_one_row_and_a_row_draws_once(core: WorkerCore) -> None:
    assert codes(core.handle(arrived(1, rows=rows_of({}, {"slot": 0, "sequence": 1})))) == ["bad_step"] * 2
    event = arrived(2)
    numbers = memoryview(bytearray(event.buffers[0])).cast("i")
    numbers[4] = 2
    (sent,) = core.handle(event._replace(buffers=[numbers, *event.buffers[1:]]))
    assert "draws more than one token" in sent.result.errors[0].message


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([Row(1, [2], (), 1, first_page=1, opens=False), Row(9, slot=1, opens=False)], "sequence 9 is not open"),
        ([Row(7, pages=[5], opens=False)], "sequence 7 is not open in slot 0"),
        ([Row(1, [2], [6], 1, first_page=2, opens=False)], "has 1 pages, but is given pages from number 2 on"),
        ([Row(2, [2], [6], first_page=1)], "has 0 pages, but is given pages from number 1 on"),
        ([Row(1, [2], (), 1, first_page=1, opens=False), Row(3, slot=-7, opens=True)], ""),
    ],
)
def test_a_step_of_what_is_not_known_is_not_run_and_told(rows: list[Row], words: str) -> None:
    """Nothing of it stays: the same step, as it should be, is run."""
    core = adopted(next_step=1)
    core.handle(arrived(1))
    core.handle(done(4))
    (told,) = core.handle(arrived(2, rows=rows))
    if not words:
        assert [error.code for error in told.result.errors] == ["bad_step"] * 2
        return
    assert (told.actor_id, told.mismatch.step, told.mismatch.scheduler_epoch) == ("s", 2, 1)
    assert words in told.mismatch.reason
    assert core.handle(arrived(3)) == [], "it waits for its turn"
    assert core.handle(arrived(2, rows=rows)) == [told], "asked again, it says so again"
    assert ran(core.handle(arrived(2, rows=follows(0)))) == [2]


@pytest.mark.parametrize("one", [Open(-1, 1, 1, Sampling()), Open(0, -1, 1, Sampling()), Open(0, 1, -1, Sampling())])
def test_what_cannot_be_opened_is_not(core: WorkerCore, one: Open) -> None:
    event = arrived(1)
    (told,) = core.handle(event._replace(plan=msgspec.structs.replace(event.plan, opens=[*event.plan.opens, one])))
    assert "cannot have slot" in told.mismatch.reason
    assert ran(core.handle(event)) == [1]


def pages_read(command: RunStep) -> list[int]:
    """Pages of its only row."""
    (row,) = command.runnable.rows
    return list(command.runnable.page_ids[row.page_offset :])


def test_pages_are_put_in_their_places_and_running_a_step_twice_leaves_what_once_leaves(core: WorkerCore) -> None:
    long = arrived(1, tokens=range(1, 9), pages=[11, 12], prompt=9, sampling=None)
    core.handle(long)
    core.handle(done(-1))
    again = Row(1, range(5, 9), [12, 13], 4, 9, None, first_page=1, opens=False)
    for step in (2, 3):
        (command,) = core.handle(arrived(step, rows=[again]))
        assert pages_read(command) == [11, 12]
        core.handle(done(-1))
    (command,) = core.handle(arrived(4, rows=[Row(1, [9], (), 8, 9, first_page=3, opens=False)]))
    assert pages_read(command) == [11, 12, 13]


def opening(event: StepArrived, *token_ids: int, slot: int = 0) -> StepArrived:
    """The same, of a sequence that looks back and had `token_ids` before."""
    penal = asking(RepetitionPenalty(1.5))
    opens = [
        msgspec.structs.replace(one, sampling=penal, token_ids=list(token_ids)) if one.slot == slot else one
        for one in event.plan.opens
    ]
    return event._replace(plan=msgspec.structs.replace(event.plan, opens=opens))


def histories(command: RunStep) -> list[list[int] | None]:
    return [None if row.history is None else row.history.tolist() for row in command.runnable.rows]


def test_who_looks_back_gets_all_its_tokens_by_position_however_often_a_step_comes(core: WorkerCore) -> None:
    # Two tokens are in pages that somebody else has computed; more are known than the first row has.
    rows = rows_of({"tokens": [3, 4], "start": 2, "prompt": 5, "sampling": None}, {})
    first = opening(arrived(1, rows=rows), 1, 2, 3)
    (command,) = core.handle(first)
    assert histories(command) == [[1, 2, 3, 4], None]
    core.handle(done(-1, 7))
    (command,) = core.handle(arrived(2, rows=[Row(1, [5], [21], 4, 5, first_page=1, opens=False), *follows(1)]))
    assert histories(command) == [[1, 2, 3, 4, 5], None]
    core.handle(done(9, 8))
    (command,) = core.handle(arrived(3, rows=[Row(1, [-1], (), 5, 5, first_page=2, opens=False)]))
    assert histories(command) == [[1, 2, 3, 4, 5, 9]], "what it drew is part of it"
    core.handle(done(6))
    again = opening(arrived(4, rows=rows[:1]), 1, 2, 3, 4, 5, 9)
    (command,) = core.handle(again)
    assert histories(command) == [[1, 2, 3, 4]], "what comes later is not"
    core.handle(done(-1))
    (told,) = core.handle(opening(arrived(5, rows=rows_of({"start": 2, "tokens": [3, 4]})), 1))
    assert "1 tokens of sequence 1 are known, but a row begins at 2" in told.mismatch.reason
    (command,) = core.handle(arrived(5, rows=[Row(7, [3], [7])]))
    assert histories(command) == [None], "another has its slot"


def test_who_looks_back_waits_for_what_the_step_before_draws() -> None:
    core = WorkerCore(LIMITS, depth=2)
    core.handle(adopt(next_step=1))
    assert ran(core.handle(opening(arrived(1, rows=rows_of({}, {}))))) == [1]
    assert core.handle(arrived(2, rows=follows(0))) == []
    _, command = core.handle(done(4, 5))
    assert histories(command) == [[1, 4]]
    core.handle(done(6))
    core.handle(arrived(3, rows=follows(1)))
    assert ran(core.handle(arrived(4, rows=follows(1, start=2)))) == [4], "the others are begun ahead"
    assert core.handle(opening(arrived(5, rows=rows_of({})))) == []
    broken = arrived(6)._replace(buffers=[b"abc"])
    assert core.handle(broken) == []


def test_an_open_replaces_and_another_epoch_begins_with_nothing(core: WorkerCore) -> None:
    core.handle(arrived(1))
    core.handle(done(4))
    other = Row(8, [3], [7], sampling=Sampling(seed=5), request_id="cmpl-8")
    (command,) = core.handle(arrived(2, rows=[other]))
    assert list(command.runnable.page_ids) == [7]
    assert command.runnable.rows[0].sampling == Sampling(seed=5)
    assert command.runnable.rows[0].sequence.request_id == "cmpl-8"
    core.handle(done(6))
    assert isinstance(core.handle(arrived(3, rows=follows(0)))[0], TellMismatch), "its slot is another's"
    core.handle(adopt(epoch=2, next_step=1))
    gone = Row(8, [3], [7], opens=False)
    (told,) = core.handle(arrived(1, epoch=2, rows=[gone]))
    assert told.mismatch == StepMismatch(scheduler_epoch=2, step=1, reason="sequence 8 is not open in slot 0")


def test_what_a_step_of_the_epoch_before_draws_is_not_recorded(core: WorkerCore) -> None:
    core.handle(arrived(1))
    core.handle(adopt(epoch=2, next_step=1))
    core.handle(done(4))
    alike = arrived(1, epoch=2, prompt=2, sampling=None)
    core.handle(alike)
    core.handle(done(-1))
    assert codes(core.handle(arrived(2, epoch=2, rows=follows(0)))) == ["missing_input"]


def test_what_is_drawn_for_whom_the_slot_had_before_is_not_recorded(ahead: WorkerCore) -> None:
    begun_ahead(ahead, arrived(1), arrived(2, sequence=5, prompt=2, sampling=None))
    ahead.handle(done(4))
    ahead.handle(done(-1))
    assert codes(ahead.handle(arrived(3, rows=[Row(5, [-1], (), 1, first_page=1, opens=False)]))) == ["missing_input"]


def test_empty_step_is_done_at_once() -> None:
    (sent,) = adopted().handle(arrived(1, rows=[]))
    assert sent.result == StepResult(scheduler_epoch=1, step=1, token_ids=[])


def test_adoption_waits_for_the_running_step_and_drops_the_queue() -> None:
    core = adopted(next_step=3)
    core.handle(arrived(3))
    core.handle(arrived(4))
    assert core.handle(adopt(epoch=2, next_step=3, call="new")) == []
    assert core.handle(arrived(3, epoch=1)) == [StepRefused(3, "wrong_epoch")]
    assert core.handle(arrived(3, epoch=2)) == []
    commands = core.handle(done(5))
    assert commands[0] == Reply("new", core.adopted)
    assert ran(commands) == [3]
    assert [command.result.scheduler_epoch for command in core.handle(done(5))] == [2]


def test_later_epochs_win(core: WorkerCore) -> None:
    core.handle(arrived(1))
    assert core.handle(adopt(epoch=3, call="third")) == []
    (refused,) = core.handle(adopt(epoch=2, call="second"))
    assert isinstance(refused, Refuse)
    assert (refused.call, refused.known_epoch) == ("second", 3)
    assert core.handle(adopt(epoch=3, call="third again")) == []
    refusals = core.handle(adopt(epoch=4, call="fourth"))
    assert [(command.call, command.known_epoch) for command in refusals] == [("third", 4), ("third again", 4)]
    assert core.handle(done(1)) == [Reply("fourth", core.adopted)]
    (refused,) = WorkerCore(LIMITS).handle(adopt(epoch=0))
    assert isinstance(refused, Refuse)


def test_adopting_again_keeps_what_is_still_wanted(core: WorkerCore) -> None:
    core.handle(arrived(2))
    core.handle(arrived(3))
    assert core.handle(adopt(next_step=1)) == [Reply("call", core.adopted)]
    assert core.num_queued == 2
    commands = core.handle(adopt(next_step=3))
    assert commands[0] == Reply("call", core.adopted)
    assert ran(commands) == [3]


def test_errors_of_rows_are_merged_in_order(core: WorkerCore) -> None:
    core.handle(arrived(1, rows=rows_of({}, {"tokens": [50]}, {})))
    (sent,) = core.handle(done(4, -1, errors=(RowError(2, "corrupt_page", ""), RowError(0, "x", ""))))
    assert [error.row for error in sent.result.errors] == [0, 1, 2]
    assert sent.result.token_ids == [4, -1, -1]


def test_what_goes_beside_a_token_is_answered_with_its_row(core: WorkerCore) -> None:
    core.handle(arrived(1, rows=rows_of({}, {"tokens": [50]}, {})))
    (sent,) = core.handle(StepDone(StepOutcome([4, 5], extras=[b"a", b"b"]), 0.0))
    assert sent.result.extras == [b"a", b"", b"b"]
    core.handle(arrived(2))
    assert core.handle(done(4))[0].result.extras == []


def test_an_ended_step_that_never_ran_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        adopted().handle(done(1))


def test_a_step_that_may_take_no_time_is_refused_row_by_row(core: WorkerCore) -> None:
    for step, timeout_s in enumerate([0.0, -1.0, float("nan")], 1):
        event = arrived(step)
        plan = msgspec.structs.replace(event.plan, timeout_s=timeout_s)
        (sent,) = core.handle(event._replace(plan=plan))
        assert [error.code for error in sent.result.errors] == ["bad_step"]
    (command,) = core.handle(event._replace(plan=msgspec.structs.replace(event.plan, step=4, timeout_s=7.0)))
    assert command.runnable.timeout_s == 7.0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(1, 12)),
            st.tuples(st.just("done"), st.just(0)),
            st.tuples(st.just("adopt"), st.integers(1, 4)),
        ),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_whatever_arrives_steps_run_in_order_once_per_epoch(events: list[tuple[str, int]], depth: int) -> None:
    """A scheduler of a rising epoch, whose steps come late, twice, and in any order; every third has nothing to run."""
    core = WorkerCore(LIMITS, depth)
    epoch, running, history, answered, waiting = 0, [], [], [], 0

    def take(commands: list) -> None:
        nonlocal waiting
        for command in commands:
            match command:
                case RunStep():
                    assert len(running) < depth, "no more steps at a time"
                    assert all(e == epoch for e, _ in running), "not beside those of another scheduler"
                    running.append((epoch, command.runnable.step))
                    history.append(running[-1])
                case SendResult():
                    result = command.result
                    if (result.scheduler_epoch, result.step) not in answered:
                        answered.append((result.scheduler_epoch, result.step))
                    assert result.token_ids == [-1 if result.step % 3 == 0 else result.step]
                case Reply():
                    waiting -= 1
                    assert not running, "what runs may still write pages"
                case Refuse():
                    waiting -= 1

    for kind, number in events:
        if kind == "send":
            tokens = [50] if number % 3 == 0 else [1]
            take(core.handle(arrived(number, epoch=max(epoch, 1), tokens=tokens)))
        elif kind == "adopt":
            epoch = max(epoch, number)
            waiting += 1
            take(core.handle(adopt(epoch=number, next_step=1)))
        elif running:
            take(core.handle(done(running.pop(0)[1])))
    while running:
        take(core.handle(done(running.pop(0)[1])))
    assert waiting == 0, "every adoption is answered once nothing runs"
    for number in {e for e, _ in history + answered}:
        steps = [step for e, step in answered if e == number]
        assert steps == list(range(1, len(steps) + 1)), "answered in order, each"
        begun = [step for e, step in history if e == number]
        assert begun == [step for step in range(1, max(begun, default=0) + 1) if step % 3]


def begun_ahead(core: WorkerCore, *commands_of: StepArrived) -> list[RunStep]:
    return [c for event in commands_of for c in core.handle(event) if isinstance(c, RunStep)]


def test_a_step_is_begun_behind_the_one_that_runs(ahead: WorkerCore) -> None:
    steps = [arrived(1, rows=rows_of({}, {})), *(arrived(n, rows=follows(1, 0, start=n - 1)) for n in (2, 3))]
    first, second = begun_ahead(ahead, *steps)
    assert [first.runnable.step, second.runnable.step] == [1, 2]
    assert [r.from_row for r in first.runnable.rows] == [-1, -1]
    assert [r.from_row for r in second.runnable.rows] == [1, 0]
    assert second.runnable.token_ids.tolist() == [-1, -1]
    assert ahead.num_queued == 1
    commands = ahead.handle(done(5, 6))
    assert isinstance(commands[0], SendResult)
    assert ran(commands) == [3]
    assert ahead.handle(done(7, 8))[0].result.token_ids == [7, 8]


def test_what_is_known_when_a_step_is_begun_is_filled_in_and_what_is_not_drawn_is_missing(ahead: WorkerCore) -> None:
    begun_ahead(ahead, arrived(1, rows=rows_of({}, {"tokens": [50]}, {"sampling": None, "prompt": 2})))
    (command,) = begun_ahead(ahead, arrived(2, rows=follows(0, 1, 2)))
    assert [(r.row, r.from_row) for r in command.runnable.rows] == [(0, 0)], "row 1 failed, and row 2 drew nothing"
    ahead.handle(done(4, -1))
    ahead.handle(done(5))
    (command,) = begun_ahead(ahead, arrived(3, rows=follows(0, start=2)))
    assert command.runnable.rows[0].from_row == -1
    assert command.runnable.token_ids.tolist() == [5]


def test_an_adoption_is_answered_before_more_is_begun(ahead: WorkerCore) -> None:
    begun_ahead(ahead, arrived(1))
    assert ahead.handle(adopt(call="again")) == []
    assert ahead.handle(arrived(2)) == []
    commands = ahead.handle(done(4))
    assert commands[1] == Reply("again", ahead.adopted)
    assert ran(commands) == [2]
    ahead.handle(adopt(epoch=2))
    assert ahead.handle(arrived(1, epoch=2)) == [], "not beside a step of the scheduler before"
    assert ran(ahead.handle(done(4))) == [1]


def test_a_step_with_nothing_to_run_waits_for_its_turn(ahead: WorkerCore) -> None:
    begun_ahead(ahead, arrived(1))
    assert ahead.handle(arrived(2, tokens=[50])) == []
    ahead.handle(arrived(3))
    commands = ahead.handle(done(4))
    assert [c.result.step for c in commands if isinstance(c, SendResult)] == [1, 2]
    assert ran(commands) == [3]


def test_a_batch_that_goes_on_is_looked_at_as_any_other(core: WorkerCore) -> None:
    """What was found for the step before is taken again: only while it is the same, and nothing else is believed."""
    core.handle(arrived(1, rows=rows_of({}, {})))
    core.handle(done(7, 8))
    (command,) = core.handle(arrived(2, rows=follows(0, 1)))
    assert [(row.row, row.start, row.token_offset, row.page_offset) for row in command.runnable.rows] == [
        (0, 1, 0, 0),
        (1, 1, 1, 1),
    ]
    assert command.runnable.token_ids.tolist() == [7, 8]
    core.handle(done(9, 10))
    gap = [row._replace(first_page=2) for row in follows(0, 1, start=2)]
    assert "is given pages from number 2" in core.handle(arrived(3, rows=gap))[0].mismatch.reason
    late = [row._replace(start=start) for row, start in zip(follows(0, 1), (2, 3), strict=True)]
    (command,) = core.handle(arrived(3, rows=late))
    assert command.runnable.token_ids.tolist()[0] == 9
    assert [error.code for error in core.handle(done(11))[0].result.errors] == ["missing_input"]
    # Slot 1 is somebody else's, in the middle of it.
    (command,) = core.handle(arrived(4, rows=[*follows(0, start=3), Row(5, pages=(9,), slot=1)]))
    core.handle(done(12, 13))
    assert "sequence 2 is not open" in core.handle(arrived(5, rows=follows(0, 1, start=4)))[0].mismatch.reason
    behind = [follows(0, start=4)[0], Row(5, [-1], (), 1, slot=1, first_page=1, opens=False)]
    (command,) = core.handle(arrived(5, rows=behind))
    assert [row.row for row in command.runnable.rows] == [1]
    assert [(error.row, error.code) for error in core.handle(done(14))[0].result.errors] == [(0, "bad_row")]
    core.handle(adopt(epoch=2, next_step=6))
    assert "is not open" in core.handle(arrived(6, epoch=2, rows=behind))[0].mismatch.reason
