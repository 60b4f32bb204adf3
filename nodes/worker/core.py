"""Order of steps, idempotency, adoption: everything a worker decides, without running anything.

    scheduler epoch   the one that adopted last; steps of all others are refused
    queue             steps that came and wait for the one before them
    running           steps that were begun: one, or as many as `depth` says with a `PipelinedRunner`
    results           the last few answers: a step that comes again gets its answer again

A scheduler adopts before it sends. Adoption by a new epoch drops the queue and forgets the results; it is answered when
the running step is done, because until then that step still writes pages. `Adopt.next_step` says which step comes
first; if it says 0, the first to arrive that needs no predecessor does.

With a depth of two a step is begun while the one before still runs: its placeholders then name rows of that step, and
the runner fills them in on the device. Steps end in the order in which they were begun.
"""

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from mesh.transport.base import Buffer
from nodes.protocol import Adopt, RowError, StepPlan, StepResult, StepRow
from nodes.worker.step import RunnableRow, RunnableStep, StepOutcome

MAX_QUEUED: Final = 16
NUM_KEPT_RESULTS: Final = 16


class StepArrived(NamedTuple):
    """A plan came, from the scheduler called `sender`."""

    sender: str
    plan: StepPlan
    buffers: Sequence[Buffer]


class AdoptArrived(NamedTuple):
    """A scheduler wants the worker; `call` is the actor's own token for the answer."""

    adopt: Adopt
    call: Any


class StepDone(NamedTuple):
    """The step that was begun first of those that run has ended."""

    outcome: StepOutcome
    elapsed_s: float


Event = StepArrived | AdoptArrived | StepDone


class RunStep(NamedTuple):
    """Run this; then say `StepDone`."""

    runnable: RunnableStep


class SendResult(NamedTuple):
    """Tell the scheduler."""

    actor_id: str
    result: StepResult


class AnswerAdopt(NamedTuple):
    """The worker is the caller's; `last_step` as in `Adopted`."""

    call: Any
    last_step: int


class RefuseAdopt(NamedTuple):
    """A later scheduler has the worker."""

    call: Any
    code: str
    message: str


class StepRefused(NamedTuple):
    """A plan was dropped: `wrong_epoch`, `too_old`, `too_far`. The scheduler sends it again if it still matters."""

    step: int
    reason: str


Command = RunStep | SendResult | AnswerAdopt | RefuseAdopt | StepRefused


class Limits(NamedTuple):
    """What a plan must keep to."""

    num_pages: int
    page_size: int
    vocab_size: int
    context_length: int
    max_batch_tokens: int


class _Queued(NamedTuple):
    sender: str
    plan: StepPlan
    buffers: Sequence[Buffer]


class _Running(NamedTuple):
    sender: str
    plan: StepPlan
    rows: Sequence[RunnableRow]
    errors: list[RowError]


class WorkerCore:
    """The decisions of one worker; owned by `WorkerActor`."""

    def __init__(self, limits: Limits, depth: int = 1) -> None:
        self._limits = limits
        self._depth = depth
        self._epoch = 0
        self._is_adopted = False
        self._next_step = 0
        self._last_step = 0
        self._queue: dict[int, _Queued] = {}
        self._results: dict[int, StepResult] = {}
        self._running: deque[_Running] = deque()
        self._adopting: list[AdoptArrived] = []
        self.is_draining = False
        # Apart from a drain, which no resumption takes back.
        self.is_paused = False

    @property
    def is_running(self) -> bool:
        """A step runs."""
        return bool(self._running)

    @property
    def scheduler_epoch(self) -> int:
        """The epoch that adopted last; 0: none yet."""
        return self._epoch

    @property
    def num_queued(self) -> int:
        """Steps that wait."""
        return len(self._queue)

    def forget(self) -> None:
        """The pool is given up: whatever was computed is not there any more, and whoever wants more has to adopt."""
        self._is_adopted = False
        self._queue.clear()
        self._results.clear()

    def handle(self, event: Event) -> list[Command]:
        """Take in one event; the commands are to be performed in order."""
        if isinstance(event, StepArrived):
            return self._on_step(event)
        if isinstance(event, AdoptArrived):
            return self._on_adopt(event)
        return self._on_done(event)

    def _on_step(self, event: StepArrived) -> list[Command]:
        plan = event.plan
        if plan.scheduler_epoch != self._epoch or not self._is_adopted:
            return [StepRefused(plan.step, "wrong_epoch")]
        if (result := self._results.get(plan.step)) is not None:
            return [SendResult(event.sender, result)]
        if self._is_running(plan.step):
            return []
        if plan.step < max(self._next_step, 1):
            return [StepRefused(plan.step, "too_old")]
        self._queue[plan.step] = _Queued(event.sender, plan, event.buffers)
        if len(self._queue) > MAX_QUEUED:
            # The farthest goes: the nearest may be the one that all others wait for.
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
        if epoch < max(self._epoch, 1):
            message = f"scheduler epoch {epoch} is over: the worker was adopted by epoch {self._epoch}"
            return [RefuseAdopt(event.call, "stale_epoch", message)]
        commands: list[Command] = []
        if epoch > self._epoch or not self._is_adopted:
            commands += [
                RefuseAdopt(waiting.call, "stale_epoch", f"scheduler epoch {epoch} adopted the worker meanwhile")
                for waiting in self._adopting
            ]
            self._adopting.clear()
            self._epoch, self._is_adopted = epoch, True
            self._next_step = event.adopt.next_step
            self._queue.clear()
            self._results.clear()
        elif event.adopt.next_step > self._next_step:
            # The same scheduler, asking again: it has given up the steps before this one.
            self._next_step = event.adopt.next_step
            self._drop_queued_before(self._next_step)
        self._adopting.append(event)
        return commands + self._settle()

    def _on_done(self, event: StepDone) -> list[Command]:
        assert self._running, "a step ended that was not running"
        commands = self._end(event)
        # What had nothing to run has waited for its turn.
        while self._running and not self._running[0].rows:
            commands += self._end(_NOTHING_RAN)
        return commands + self._settle()

    def _end(self, event: StepDone) -> list[Command]:
        running = self._running.popleft()
        plan = running.plan
        self._last_step = plan.step
        commands: list[Command] = []
        # A scheduler that is over gets no answer: its successor reads the page table, not its mail.
        if plan.scheduler_epoch == self._epoch:
            result = _result(running, event)
            self._keep(result)
            self._next_step = max(self._next_step, plan.step + 1)
            commands.append(SendResult(running.sender, result))
        return commands

    def _settle(self) -> list[Command]:
        if self._running:
            return self._start_next()
        answers: list[Command] = [AnswerAdopt(waiting.call, self._last_step) for waiting in self._adopting]
        self._adopting.clear()
        return answers + self._start_next()

    def _start_next(self) -> list[Command]:
        commands: list[Command] = []
        while (queued := self._take_next()) is not None:
            runnable, errors = self._resolve(queued)
            self._running.append(_Running(queued.sender, queued.plan, runnable.rows, errors))
            if runnable.rows:
                commands.append(RunStep(runnable))
            elif len(self._running) == 1:
                return commands + self._on_done(_NOTHING_RAN)
        return commands

    def _take_next(self) -> _Queued | None:
        """The step that is to begin now, out of the queue."""
        if self.is_draining or self.is_paused or len(self._running) >= self._depth:
            return None
        if self._running:
            last = self._running[-1].plan
            # Who waits for the running steps is answered before more begin; so is a scheduler that took over.
            if self._adopting or last.scheduler_epoch != self._epoch:
                return None
            return self._queue.pop(max(last.step + 1, self._next_step), None)
        step = self._next_step or self._first_step()
        if step not in self._queue:
            return None
        self._next_step = step
        self._drop_queued_before(step)
        return self._queue.pop(step)

    def _drop_queued_before(self, step: int) -> None:
        self._queue = {number: queued for number, queued in self._queue.items() if number >= step}

    def _first_step(self) -> int:
        return min((step for step, queued in self._queue.items() if _stands_alone(queued.plan)), default=0)

    def _keep(self, result: StepResult) -> None:
        self._results[result.step] = result
        while len(self._results) > NUM_KEPT_RESULTS:
            del self._results[next(iter(self._results))]

    def _resolve(self, queued: _Queued) -> tuple[RunnableStep, list[RowError]]:
        """Fill placeholders and sort out rows that cannot be run; what is left is safe to index with."""
        plan = queued.plan
        problem = _shape_problem(plan, queued.buffers, self._limits.max_batch_tokens)
        if problem:
            errors = [RowError(row, "bad_step", problem) for row in range(len(plan.rows))]
            return RunnableStep(plan.step, [], array("i"), array("i"), plan.timeout_s), errors
        token_ids, page_ids = (_int32(buffer) for buffer in queued.buffers)
        rows: list[RunnableRow] = []
        errors: list[RowError] = []
        before = self._results.get(plan.step - 1)
        ahead = self._rows_drawing_in(plan.step - 1)
        token_offset = page_offset = 0
        for index, row in enumerate(plan.rows):
            # A step that is sent again may name the token by now.
            if row.from_row >= 0 and row.num_tokens == 1 and token_ids[token_offset] < 0:
                token_ids[token_offset] = _drawn(before, row.from_row)
            is_ahead = row.from_row in ahead and token_ids[token_offset] < 0
            error = self._row_problem(
                row,
                is_ahead,
                token_ids[token_offset : token_offset + row.num_tokens],
                page_ids[page_offset : page_offset + row.num_pages],
            )
            if error is not None:
                errors.append(RowError(index, *error))
            else:
                rows.append(
                    RunnableRow(
                        index, row.start, row.num_tokens, row.num_prompt_tokens,
                        token_offset, page_offset, row.num_pages, row.sampling, row.from_row if is_ahead else -1,
                        row.request_id,
                    )
                )  # fmt: skip
            token_offset += row.num_tokens
            page_offset += row.num_pages
        return RunnableStep(plan.step, rows, token_ids, page_ids, plan.timeout_s), errors

    def _rows_drawing_in(self, step: int) -> Collection[int]:
        """Rows that draw in `step`, if it runs: what a step that is begun behind it may follow."""
        running = self._running[-1] if self._running else None
        if running is None or running.plan.step != step:
            return ()
        return {row.row for row in running.rows if row.sampling is not None}

    def _row_problem(
        self, row: StepRow, is_ahead: bool, token_ids: "array[int]", page_ids: "array[int]"
    ) -> tuple[str, str] | None:
        limits = self._limits
        if row.from_row >= 0:
            if row.num_tokens != 1:
                return "bad_row", "a row that follows another has one input token"
            if token_ids[0] < 0 and not is_ahead:
                return "missing_input", f"row {row.from_row} of the step before drew no token that is known here"
        if row.start < 0 or row.start + row.num_tokens > limits.context_length:
            return "bad_row", f"positions up to {row.start + row.num_tokens} of a context of {limits.context_length}"
        if row.start + row.num_tokens > row.num_pages * limits.page_size:
            return "bad_row", f"{row.num_pages} pages do not hold {row.start + row.num_tokens} positions"
        if row.sampling is not None and row.start + row.num_tokens < row.num_prompt_tokens:
            return "bad_row", "a token is to be drawn before the prompt ends"
        if (min(token_ids) < 0 and not is_ahead) or max(token_ids) >= limits.vocab_size:
            return "bad_row", f"a token id is not in 0..{limits.vocab_size - 1}"
        if min(page_ids) < 1 or max(page_ids) >= limits.num_pages:
            return "bad_row", f"a page is not in 1..{limits.num_pages - 1}"
        return None


_NOTHING_RAN: Final = StepDone(StepOutcome([]), 0.0)


def _stands_alone(plan: StepPlan) -> bool:
    return all(row.from_row < 0 for row in plan.rows)


def _shape_problem(plan: StepPlan, buffers: Sequence[Buffer], max_batch_tokens: int) -> str:
    if len(buffers) != 2:
        return f"a step has the buffers token_ids and page_ids, this one has {len(buffers)}"
    if any(row.num_tokens < 1 or row.num_pages < 1 for row in plan.rows):
        return "a row has at least one token and one page"
    if not plan.timeout_s > 0:
        return f"a step may take some time, not {plan.timeout_s:g} s"
    num_tokens = sum(row.num_tokens for row in plan.rows)
    if num_tokens > max_batch_tokens:
        return f"{num_tokens} tokens are more than the {max_batch_tokens} that one step may have"
    num_pages = sum(row.num_pages for row in plan.rows)
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    if sizes != [4 * num_tokens, 4 * num_pages]:
        return f"buffers of {sizes} bytes do not hold {num_tokens} token ids and {num_pages} page ids"
    return ""


def _int32(buffer: Buffer) -> "array[int]":
    values = array("i")
    values.frombytes(buffer)
    return values


def _drawn(result: StepResult | None, row: int) -> int:
    return result.token_ids[row] if result is not None and row < len(result.token_ids) else -1


def _result(running: _Running, done: StepDone) -> StepResult:
    token_ids = [-1] * len(running.plan.rows)
    for row, token_id in zip(running.rows, done.outcome.token_ids, strict=True):
        token_ids[row.row] = token_id
    errors = sorted([*running.errors, *done.outcome.errors], key=lambda error: error.row)
    plan = running.plan
    return StepResult(
        scheduler_epoch=plan.scheduler_epoch,
        step=plan.step,
        token_ids=token_ids,
        errors=errors,
        elapsed_s=done.elapsed_s,
    )
