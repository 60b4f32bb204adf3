"""Order of steps, idempotency, adoption: everything a worker decides, without running anything.

    scheduler epoch   the one that adopted last; steps of all others are refused
    queue             steps that have arrived and wait for the one before them
    running           steps that have begun: one, or up to `depth` with a `PipelinedRunner`
    results           the last few answers: a step that arrives again gets its answer again
    table             the sequences that the scheduler has opened, and their pages (`sequence_table.py`)

A scheduler adopts before it sends. Adoption by a new epoch drops the queue, forgets the results and empties the table;
it is answered when the running step is done, because until then that step still writes pages. `Adopt.next_step` names
the first step; if it is 0, the first step to arrive that needs no predecessor comes first.

With a depth of two a step begins while the one before still runs: an input that the earlier step has yet to draw is
named by its row there, and the runner fills it in on the device. Steps end in the order in which they began.

A step with a sequence that is not open, or with a gap in its pages, is not run: the scheduler is told (`StepMismatch`).
"""

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from mesh.errors import STALE_EPOCH
from mesh.runtime.effects import Refuse, Reply
from mesh.transport.base import Buffer
from nodes.asks import DrawnModel
from nodes.models.spec import ModelSpec
from nodes.protocol import Adopt, Adopted, RowError, StepMismatch, StepPlan, StepResult
from nodes.protocol.steps import Open
from nodes.worker.steps.check import Draws, check_rows
from nodes.worker.steps.columns import NO_ROWS, Columns, Limits, num_rows_of, read_columns, slots_of, stands_alone
from nodes.worker.steps.consecutive import taken_apart
from nodes.worker.steps.sequence_table import SequenceTable
from nodes.worker.steps.step import NO_ROWS as NO_RUNNABLE
from nodes.worker.steps.step import RunnableStep, StepOutcome, spread

MAX_QUEUED: Final = 16
"""What a scheduler has on its way: `pipeline_depth` (2) plans of `MAX_STEPS` (8). More are repeats and confusion."""
NUM_KEPT_RESULTS: Final = 16
"""A scheduler repeats only unanswered steps, which are as many; results of 256 rows have a few KB."""


STEP_REFUSALS: Final = ("not_ready", "mismatch", "wrong_epoch", "too_old", "too_far", "bad_plan")
"""Why a step is not run: the first two by the actor, the others in `StepRefused`."""


class StepArrived(NamedTuple):
    """A plan has arrived from the scheduler `sender`, `at` a time of the actor's clock."""

    sender: str
    plan: StepPlan
    buffers: Sequence[Buffer]
    at: float = 0.0
    is_followed: bool = False
    """Another step of the same plan comes after it."""


class AdoptArrived(NamedTuple):
    """A scheduler wants to adopt the worker; `call` is the actor's own token for the answer."""

    adopt: Adopt
    call: Any


class StepDone(NamedTuple):
    """The oldest running step has ended."""

    outcome: StepOutcome
    elapsed_s: float


Event = StepArrived | AdoptArrived | StepDone


class RunStep(NamedTuple):
    """Run this, which came `at` with these `opens`, then report `StepDone`."""

    runnable: RunnableStep
    opens: Sequence[Open] = ()
    at: float = 0.0


class SendResult(NamedTuple):
    """Tell the scheduler; `may_wait`: it may wait a little for the next one, which is about to be computed."""

    actor_id: str
    result: StepResult
    may_wait: bool = False


class StepRefused(NamedTuple):
    """A plan was dropped: `wrong_epoch`, `too_old`, `too_far`, `bad_plan` (of several steps, and not of one batch that
    decodes). The scheduler sends it again if it still matters.
    """

    step: int
    reason: str


class TellMismatch(NamedTuple):
    """A step cannot be run as it is: tell the scheduler, or, in a group of ranks, end: others may have begun it."""

    actor_id: str
    mismatch: StepMismatch


Command = RunStep | SendResult | TellMismatch | StepRefused | Reply | Refuse


class _Running(NamedTuple):
    sender: str
    plan: StepPlan
    num_rows: int
    runnable: RunnableStep
    errors: list[RowError]
    columns: Columns
    is_followed: bool = False


class WorkerCore:
    """The decisions of one worker; owned by `WorkerActor`."""

    def __init__(
        self, limits: Limits, depth: int = 1, end_token_ids: Collection[int] = (), spec: ModelSpec | None = None
    ) -> None:
        self._limits = limits
        self._depth = depth
        self._epoch = 0
        self._is_adopted = False
        self._next_step = 0
        self._table = SequenceTable(DrawnModel(limits.vocab_size, tuple(end_token_ids), spec))
        self._columns = NO_ROWS
        self._queue: dict[int, StepArrived] = {}
        self._results: dict[int, StepResult] = {}
        self._running: deque[_Running] = deque()
        self._adopting: list[AdoptArrived] = []
        self.adopted = Adopted(worker_epoch=0, numerics="", vocab_size=0)
        """What a scheduler that adopts this worker is answered."""
        self.is_draining = False
        # Separate from a drain, which is never undone.
        self.is_paused = False

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def scheduler_epoch(self) -> int:
        """The epoch that adopted last; 0: none yet."""
        return self._epoch

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def forget(self) -> None:
        """The pool is given up: everything computed is lost, and a scheduler that wants more has to adopt again."""
        self._is_adopted = False
        self._drop_everything()

    def handle(self, event: Event) -> list[Command]:
        """Take in one event; the commands are to be performed in order."""
        if isinstance(event, StepArrived):
            return self._on_step(event) if event.plan.num_steps == 1 else self._on_plan(event)
        if isinstance(event, AdoptArrived):
            return self._on_adopt(event)
        return self._on_done(event)

    def _on_plan(self, event: StepArrived) -> list[Command]:
        """Several steps at once: from here on each is one of its own."""
        steps = taken_apart(event.plan, event.buffers)
        if steps is None:
            return [StepRefused(event.plan.step, "bad_plan")]
        commands: list[Command] = []
        for number, (plan, buffers) in enumerate(steps, 1):
            commands += self._on_step(event._replace(plan=plan, buffers=buffers, is_followed=number < len(steps)))
        return commands

    def _on_step(self, event: StepArrived) -> list[Command]:
        plan = event.plan
        # Only an adoption empties the table, so a later scheduler's step must not run before it.
        if plan.scheduler_epoch != self._epoch or not self._is_adopted:
            return [StepRefused(plan.step, "wrong_epoch")]
        # Its result was lost: send it again. Computing it again would be idempotent, but not free.
        if (result := self._results.get(plan.step)) is not None:
            return [SendResult(event.sender, result)]
        if self._running and self._is_running(plan.step):
            return []
        if plan.step < max(self._next_step, 1):
            return [StepRefused(plan.step, "too_old")]
        self._queue[plan.step] = event
        if len(self._queue) > MAX_QUEUED:
            # Drop the farthest: the nearest may be the one that all others wait for.
            farthest = max(self._queue)
            del self._queue[farthest]
            return [StepRefused(farthest, "too_far"), *self._start_next()]
        return self._start_next()

    def _is_running(self, step: int) -> bool:
        # A step of the epoch before may still run under a number that the new scheduler uses too.
        return any(
            running.plan.step == step and running.plan.scheduler_epoch == self._epoch for running in self._running
        )

    def _on_adopt(self, event: AdoptArrived) -> list[Command]:
        epoch = event.adopt.scheduler_epoch
        # A scheduler that was replaced and does not know it: refuse it, so that it ends.
        if epoch < max(self._epoch, 1):
            message = f"scheduler epoch {epoch} has been replaced: the worker was adopted by epoch {self._epoch}"
            return [Refuse(event.call, STALE_EPOCH, message, known_epoch=self._epoch)]
        commands: list[Command] = []
        if epoch > self._epoch or not self._is_adopted:
            late = f"scheduler epoch {epoch} has adopted the worker in the meantime"
            commands += [Refuse(one.call, STALE_EPOCH, late, known_epoch=epoch) for one in self._adopting]
            self._adopting.clear()
            self._epoch, self._is_adopted = epoch, True
            self._next_step = event.adopt.next_step
            self._drop_everything()
        elif event.adopt.next_step > self._next_step:
            # The same scheduler, asking again: it has given up the steps before this one.
            self._next_step = event.adopt.next_step
            self._drop_queued_before(self._next_step)
        # Answered when nothing runs: the adopter reads the page table next, which a running step still changes.
        self._adopting.append(event)
        return commands + self._settle()

    def _drop_everything(self) -> None:
        """Forget what the previous scheduler has sent, and what it was answered."""
        self._queue.clear()
        self._results.clear()
        self._table.clear()

    def _on_done(self, event: StepDone) -> list[Command]:
        assert self._running, "a step ended that was not running"
        commands = self._end(event)
        # Steps that had nothing to run have waited for their turn.
        while self._running and not self._running[0].runnable.rows:
            commands += self._end(_NOTHING_RAN)
        return commands + self._settle()

    def _end(self, event: StepDone) -> list[Command]:
        running = self._running.popleft()
        plan = running.plan
        commands: list[Command] = []
        # A replaced scheduler gets no answer: its successor reads the page table, not its predecessor's messages.
        if plan.scheduler_epoch == self._epoch:
            result = _result(running, event)
            self._table.record(running.columns, result.token_ids)
            self._keep(result)
            self._next_step = max(self._next_step, plan.step + 1)
            # A row that has just been opened draws what its client has waited for since it called: that goes at once.
            may_wait = running.is_followed and not plan.opens and not self.is_draining
            commands.append(SendResult(running.sender, result, may_wait))
        return commands

    def _settle(self) -> list[Command]:
        if self._running:
            return self._start_next()
        answers: list[Command] = [Reply(waiting.call, self.adopted) for waiting in self._adopting]
        self._adopting.clear()
        return answers + self._start_next()

    def _start_next(self) -> list[Command]:
        commands: list[Command] = []
        while (queued := self._take_next()) is not None:
            running = self._resolve(queued)
            if isinstance(running, StepMismatch):
                return [*commands, TellMismatch(queued.sender, running)]
            self._running.append(running)
            if running.runnable.rows:
                commands.append(RunStep(running.runnable, queued.plan.opens, queued.at))
            elif len(self._running) == 1:
                return commands + self._on_done(_NOTHING_RAN)
        return commands

    def _take_next(self) -> StepArrived | None:
        """Take the step that may begin now out of the queue; None: there is none."""
        if self.is_draining or self.is_paused or len(self._running) >= self._depth:
            return None
        if self._running:
            last = self._running[-1].plan
            # A scheduler that waits to adopt, or has taken over, is answered before more steps begin.
            if self._adopting or last.scheduler_epoch != self._epoch:
                return None
            # Only the very next: with one missing in between, this one's inputs are not known.
            following = max(last.step + 1, self._next_step)
            if following in self._queue and self._looks_back(self._queue[following]):
                # It looks back at what the running step draws, which only the device knows so far.
                return None
            return self._queue.pop(following, None)
        step = self._next_step or self._first_step()
        if step not in self._queue:
            return None
        self._next_step = step
        self._drop_queued_before(step)
        return self._queue.pop(step)

    def _looks_back(self, queued: StepArrived) -> bool:
        return self._table.looks_back(queued.plan.opens, slots_of(queued.buffers))

    def _drop_queued_before(self, step: int) -> None:
        if min(self._queue, default=step) < step:
            self._queue = {number: queued for number, queued in self._queue.items() if number >= step}

    def _first_step(self) -> int:
        return min((step for step, queued in self._queue.items() if stands_alone(queued.buffers)), default=0)

    def _keep(self, result: StepResult) -> None:
        self._results[result.step] = result
        while len(self._results) > NUM_KEPT_RESULTS:
            del self._results[next(iter(self._results))]

    def _resolve(self, queued: StepArrived) -> _Running | StepMismatch:
        """Fill in placeholders and drop rows that cannot be run; what is left is safe to index with."""
        sender, plan, buffers, _, is_followed = queued
        columns = read_columns(plan, buffers, self._limits, self._columns)
        if isinstance(columns, str):
            num_rows = num_rows_of(buffers)
            errors = [RowError(row, "bad_step", columns) for row in range(num_rows)]
            nothing = RunnableStep(plan.step, NO_RUNNABLE, array("i"), array("i"), plan.timeout_s)
            return _Running(sender, plan, num_rows, nothing, errors, NO_ROWS, is_followed)
        self._columns = columns
        found = self._table.apply(plan.opens, columns)
        if isinstance(found, str):
            return StepMismatch(scheduler_epoch=plan.scheduler_epoch, step=plan.step, reason=found)
        # Placeholders refer to the step just before, and to no other one that may be running.
        before = self._running[-1] if self._running and self._running[-1].plan.step == plan.step - 1 else None
        rows, page_ids, errors = check_rows(self._limits, columns, found, _draws(before))
        runnable = RunnableStep(plan.step, rows, columns.token_ids, page_ids, plan.timeout_s)
        return _Running(sender, plan, len(found), runnable, errors, columns, is_followed)


_NOTHING_RAN: Final = StepDone(StepOutcome([]), 0.0)


def _draws(running: _Running | None) -> Draws:
    """What the running step will draw; empty if there is none."""
    if running is None:
        return {}
    slots, sequences = running.columns.slots, running.columns.sequences
    rows = [row for row in running.runnable.rows if row.draws]
    return {slots[row.row]: (sequences[row.row], row.row, row.end) for row in rows}


def _result(running: _Running, done: StepDone) -> StepResult:
    rows, outcome = running.runnable.rows, done.outcome
    token_ids = list(outcome.token_ids)
    beside = [list(some) for some in (outcome.extras, outcome.prompt_extras, outcome.vectors)]
    if len(rows) < running.num_rows:
        token_ids = [-1] * running.num_rows
        for number, token_id in zip(rows.numbers, outcome.token_ids, strict=True):
            token_ids[number] = token_id
        beside = [spread(some, rows.numbers, range(running.num_rows)) for some in beside]
    errors = [*running.errors, *outcome.errors]
    if len(errors) > 1:
        errors.sort(key=lambda error: error.row)
    plan = running.plan
    extras, prompt_extras, vectors = beside
    return StepResult(
        scheduler_epoch=plan.scheduler_epoch,
        step=plan.step,
        token_ids=token_ids,
        errors=errors,
        elapsed_s=done.elapsed_s,
        extras=extras,
        prompt_extras=prompt_extras,
        vectors=vectors,
    )
