"""Numbered steps between the scheduler and its worker: at most two plans unacknowledged, sent again if need be.

    adopt -> adopted -> step 1, step 2 -> result 1 -> step 3 -> result 2 -> ...

Step N+1 is sent before the result of step N is here, so that the worker never waits for the scheduler; a row whose
input is what step N draws has token -1. A plan is one step or, while a batch decodes and nothing else is to be done,
several in a row, which are told in one message and are steps like any others from then on. Results are taken in step
order, the first one of each step; one that comes before its turn is not kept: the worker has it, and answers again.

A worker whose answer does not fit the plan, or that is there and answers nothing, is no longer believed: it is fenced,
which counts as a death for the sequences in its steps, and its next incarnation goes on.

The worker may be a group of tensor-parallel ranks (`ranks.py`): all are adopted, get the same steps, and must answer.

Losses between the two are repaired by sending the unacknowledged steps again: when a result overtakes an earlier one,
when none comes for a while, and when the worker (this or its next incarnation) has been adopted again. A step sent
again has the same rows, those of ended sequences included; only placeholders whose token is known by now are filled in,
because a new worker has not seen the step that drew it. After every `Adopted`, even by the same incarnation, the
worker's table is assumed to be empty: the first row of each sequence that is sent again opens it, with all its pages.
Pure; owned by the core.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Final

import msgspec

from mesh.address import Address
from mesh.transport.base import Channel
from nodes.protocol import Adopt, Adopted, Fence, StepMismatch, StepPlan, StepResult
from nodes.protocol.steps import RowColumn
from nodes.scheduler.asks import ASK_RETRY_S
from nodes.scheduler.batch.step import Acknowledged, Step
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.books import Books
from nodes.scheduler.events import Announce, FenceWorker, ReadyPeer, Tag
from nodes.scheduler.sequence import Sequence, Stage
from nodes.scheduler.worker_link.ranks import AdoptedRanks, Disagreement
from nodes.scheduler.worker_link.result_check import (
    DISAGREED,
    EARLY,
    MALFORMED,
    NOT_OURS,
    NOT_SENT,
    REFUSALS,
    REPEATED,
    find_problem,
)
from nodes.scheduler.worker_link.step_times import StepTimes
from nodes.trace_notes import STEP, step_size

ADOPT: Tag = ("adopt", "")
"""Tag of the ask to rank 0; those to other ranks name the rank."""
REPEAT = "repeat_step"
WORKER_LOST = "worker_lost"
NEVER = float("inf")
ADOPT_TIMEOUT_S = 5.0
"""A worker answers when the step of an earlier scheduler is done; most are by then, and it is asked again."""
STEP_REPEAT_S = 2.0
"""Without a result for so long a step is sent again, then after twice as long: rare while steps are merely long."""
ADOPT_AGAIN_AFTER = 8
MAX_SILENCES = 2
"""A worker that so many times leaves a step unanswered, however often it is sent, is fenced, not adopted again."""
PATIENCE = 4.0
"""A worker died with a step: its successor gets so many times as long for that step."""
MAX_DEATHS = 2
"""Once a sequence has been part of so many worker deaths, its steps are not sent again."""


class _Sent:
    __slots__ = ("ends_plan", "plan", "previous", "step")

    def __init__(self, plan: StepPlan, step: Step, *, ends_plan: bool) -> None:
        self.plan = plan
        self.step = step
        self.ends_plan = ends_plan
        self.previous: Acknowledged | None = None


_PROMPT_TOKENS: Final = 8
"""Tokens for each row from which on a step counts as one of prompts: of those a few rows that decode are no part."""


class Pipeline:
    """Steps in flight to one worker."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._epoch = books.address.epoch
        self._sent: list[_Sent] = []
        self._repeat_s = STEP_REPEAT_S
        self._times = StepTimes(books.config)
        self.pace = StepPace(books.config.max_step_s, books.config.page_size)
        self.ranks = AdoptedRanks(books.config.ranks)
        self.adopted: Adopted | None = None
        self._worker_epoch = 0
        self.table = 0
        """Number of the worker's table: every `Adopted` starts a new one, assumed to be empty."""
        self._fenced: dict[str, Fence] = {}
        self._num_silences = 0
        self._is_mismatched = False
        self.last_step = 0
        self.newest: Step | None = None
        """The last step, as it was composed; if the same batch decodes on, its rows are reused."""
        self.num_refused: dict[str, int] = dict.fromkeys(REFUSALS, 0)
        self.num_fenced = 0
        self.steps_s = 0.0
        self.num_mismatches = 0
        self.num_repeated_steps = 0
        self.num_recomputed_tokens = 0

    @property
    def num_inflight(self) -> int:
        return len(self._sent)

    @property
    def is_computing(self) -> bool:
        """A worker is there and has steps. A dead one does not count: on a leaving host it is not started again."""
        return self.adopted is not None and bool(self._sent)

    @property
    def can_send(self) -> bool:
        return self.adopted is not None and sum(one.ends_plan for one in self._sent) < self._books.config.pipeline_depth

    def adopt(self, now: float) -> None:
        """Ask the worker until it answers that it is ours, which it does once its running step is done."""
        self.adopted = None
        self.ranks.begin()
        self._books.deadlines.clear((REPEAT, ""))
        # `set_default`: adopting begins anew with every rank that is lost, and must not give the worker another 60 s
        # each time.
        self._books.deadlines.set_default((WORKER_LOST, ""), now + self._books.config.worker_lost_timeout_s)
        # Answered only when the running step is over, so the ask has a timeout of its own (5 s) and is repeated
        # forever: the deadline above decides when to give up.
        for rank, actor_id in enumerate(self.ranks.worker_ids):
            self._books.asks.start(
                _adopt_tag(rank),
                actor_id,
                Adopt(scheduler_epoch=self._epoch, next_step=self.last_step + 1 - len(self._sent)),
                timeout_s=ADOPT_TIMEOUT_S,
                retry_s=ASK_RETRY_S,
                give_up_at=NEVER,
            )

    def take_adopted(self, tag: Tag, adopted: Adopted, now: float) -> Adopted | None:
        """A rank has answered the ask of `tag`. Returns the whole group's answer if this was the last one missing.

        An incarnation that was fenced is fenced again, and the rank is asked until another incarnation answers.
        """
        # The adoption was begun anew meanwhile, so it is not known any more for which ranks this answer speaks.
        if tag not in self._books.asks:
            return None
        rank = int(tag[1] or 0)
        actor_id = self.ranks.worker_ids[rank]
        fenced = self._fenced.get(actor_id)
        # It answers, so it has not heard that it was fenced: tells may be lost.
        if fenced is not None and fenced.worker_epoch == adopted.worker_epoch:
            self._books.outbox.add(FenceWorker(actor_id, fenced))
            self._books.asks.failed((tag,), now)
            return None
        for stale in self.ranks.take_adopted(rank, adopted):
            self._books.asks.failed((_adopt_tag(stale),), now)
        whole = self.ranks.whole()
        if whole is not None:
            # Only now, and not rank by rank: any of them may have to answer again for a later group.
            for rank in range(len(self.ranks.worker_ids)):
                self._books.asks.answered(_adopt_tag(rank))
        return whole

    def announcement(self, state: str | None, *, worker_ready: bool) -> Announce:
        """What the mesh is told of this scheduler; `state` None: unchanged."""
        worker = self._books.worker
        return Announce(state, worker_ready, self._books.numerics, () if worker is None else tuple(worker.asks))

    def on_adopted(self, adopted: Adopted, now: float) -> list[Step]:
        """Returns the steps that are not sent again: too many workers died in one, or a sequence of it has ended."""
        is_new = adopted.worker_epoch > self._worker_epoch
        self._worker_epoch = adopted.worker_epoch
        self.adopted = self._books.worker = adopted
        self._repeat_s = STEP_REPEAT_S
        self.table += 1
        if is_new:
            self._num_silences, self._is_mismatched = 0, False
        self._books.deadlines.clear((WORKER_LOST, ""))
        # The same incarnation adopted again has not died, so its steps are evidence against nobody. Nor is a row sent
        # again that nobody wants any more: its request may kill workers, and be computed by another group now.
        if is_new and (self._blame() or self._has_ended()):
            steps = [sent.step for sent in self._sent]
            # Their numbers are used again: no worker has them any more, and a gap would be a step that never has a
            # result.
            self.last_step -= len(steps)
            self._sent.clear()
            return steps
        if is_new:
            self._allow_more_time()
        for sent in self._sent:
            sent.step = sent.step.opened_in(self.table)
            sent.plan = msgspec.structs.replace(sent.plan, opens=sent.step.opens)
        self.send_again(now)
        return []

    def _allow_more_time(self) -> None:
        """The deadline itself may have been what ended the predecessor, and its successor is cold."""
        for sent in self._sent:
            sent.plan = msgspec.structs.replace(sent.plan, timeout_s=PATIENCE * sent.plan.timeout_s)

    def _blame(self) -> bool:
        """True if a sequence has seen too many deaths. These steps may have been computed: they count as recomputed."""
        self.num_recomputed_tokens += sum(len(sent.step.token_ids) for sent in self._sent)
        hit = self.unanswered()
        for sequence in hit:
            sequence.num_deaths += 1
        return any(sequence.num_deaths >= MAX_DEATHS for sequence in hit)

    def _has_ended(self) -> bool:
        return any(sequence.stage is Stage.ENDED for sequence in self.unanswered())

    def unanswered(self) -> list[Sequence]:
        """The sequences of steps that are not answered, each once."""
        return list({sequence.row_id: sequence for sent in self._sent for sequence in sent.step.sequences}.values())

    def has_died(self, worker: Address) -> bool:
        """Of an incarnation that a supervisor has reaped: it was the one adopted last, and none has followed it.

        One that is only cut off is not dead, and adopted again at once.
        """
        return self.adopted is None and self.ranks.was_whole_with(worker)

    def on_worker_lost(self, worker: Address, now: float) -> None:
        """A rank is gone or cut off. The loss of an incarnation before the adopted one is ignored."""
        # Membership and link losses are reported independently, so the loss of an old incarnation may be reported after
        # the new one is adopted.
        if self.adopted is None or self.ranks.rank_of(worker) >= 0 or self.ranks.is_older(*worker):
            self.adopt(now)

    def on_members(self, ready: Mapping[str, ReadyPeer], now: float) -> None:
        """Members changed. A rank that is in a later incarnation than the one that answered was lost unnoticed."""
        for actor_id in self.ranks.worker_ids:
            peer = ready.get(actor_id)
            if peer is not None and self.ranks.is_older(actor_id, peer.epoch):
                self.adopt(now)
                return

    def send(self, steps: Items[Step], now: float) -> None:
        """Send the next steps as one plan; `can_send` must hold. All but the first are the same rows, a position on."""
        assert self.can_send, "the worker already has its maximum of plans"
        self.newest = steps[-1]
        # Of the first one for all: a position more on each row is far below what a deadline allows for.
        timeout_s = self._times.timeout_s(*_size(steps[0]))
        plans: list[_Sent] = []
        for step in steps:
            self.last_step += 1
            plan = StepPlan(scheduler_epoch=self._epoch, step=self.last_step, timeout_s=timeout_s, opens=step.opens)
            plans.append(_Sent(plan, step, ends_plan=step is steps[-1]))
        self._sent += plans
        self._emit(plans[0], len(steps))
        self._repeat_s = STEP_REPEAT_S
        self._books.deadlines.set_default((REPEAT, ""), now + self._repeat_s)

    def on_result(self, worker: Address, result: StepResult, now: float) -> Acknowledged | None:
        """The oldest unacknowledged step, if this is its result; else the result is refused, and counted."""
        rank = self.ranks.rank_of(worker)
        if self.adopted is None or rank < 0 or result.scheduler_epoch != self._epoch:
            return self._refuse(NOT_OURS)
        # Below 0: acknowledged before; at or above the number in flight: never sent. Both are only counted, since
        # repeats are normal.
        index = result.step - (self.last_step + 1 - len(self._sent))
        if index < 0:
            return self._refuse(REPEATED)
        if index >= len(self._sent):
            return self._refuse(NOT_SENT)
        # After the range check, so that answers of ranks are held only for steps in flight, at most 16.
        gathered = self.ranks.gather(rank, result)
        if gathered is None:
            return None
        if isinstance(gathered, Disagreement):
            self._fence(gathered.text, now)
            return self._refuse(DISAGREED)
        result = gathered
        if index > 0:
            # Results come in order, so the previous one is lost, or its step was. This one will come again, too.
            self.send_again(now)
            return self._refuse(EARLY)
        sent = self._sent[0]
        if problem := find_problem(sent.step, result, self.adopted.vocab_size):
            self._fence(problem, now)
            return self._refuse(MALFORMED)
        del self._sent[0]
        num_rows, num_tokens, num_pages = _size(sent.step)
        self._times.observe(num_rows, num_tokens, num_pages, result.elapsed_s)
        if num_tokens >= _PROMPT_TOKENS * num_rows:
            self._books.prefills.observe(num_tokens, result.elapsed_s)
        took_us = int(result.elapsed_s * 1e6)
        self.steps_s += took_us / 1e6
        self._books.outbox.step(STEP, result.step, step_size(num_rows, num_tokens), took_us)
        self.pace.observe(num_rows, num_tokens, result.elapsed_s)
        acknowledged = _acknowledge(sent, result)
        self._num_silences, self._is_mismatched = 0, False
        self._repeat_s = STEP_REPEAT_S
        if self._sent:
            # What it drew is an input of the step in flight: needed only if that one is sent again, so it is not filled
            # in now.
            self._sent[0].previous = acknowledged
            self._books.deadlines.set((REPEAT, ""), now + self._repeat_s)
        else:
            self._books.deadlines.clear((REPEAT, ""))
        return acknowledged

    def on_mismatch(self, worker: Address, mismatch: StepMismatch, now: float) -> None:
        """The worker has not run a step: it has other sequences, or other pages of them, than we assume.

        Adopted again it gets all of them. If that does not help, one side has a fault that nothing here can repair.
        """
        first = self.last_step + 1 - len(self._sent)
        # A mismatch about a step that already has its result answers a repeat, and says nothing about the table now.
        is_ours = self.ranks.rank_of(worker) >= 0 and mismatch.scheduler_epoch == self._epoch
        if self.adopted is None or not is_ours or not first <= mismatch.step <= self.last_step:
            return
        self.num_mismatches += 1
        if self._is_mismatched:
            self._fence(f"adopted again, it still cannot run step {mismatch.step}: {mismatch.reason}", now)
            return
        self._is_mismatched = True
        self.adopt(now)

    def _refuse(self, reason: str) -> None:
        self.num_refused[reason] += 1

    def _fence(self, reason: str, now: float) -> None:
        """Stop believing the adopted incarnation: its successor gets all steps that it was sent."""
        assert self.adopted is not None, "only an adopted worker can be fenced"
        self.num_fenced += 1
        for actor_id, epoch in self.ranks.addresses():
            fence = Fence(scheduler_epoch=self._epoch, worker_epoch=epoch, reason=reason)
            self._fenced[actor_id] = fence
            self._books.outbox.add(FenceWorker(actor_id, fence))
        self._books.outbox.add(self.announcement(None, worker_ready=False))
        self.adopt(now)

    def on_repeat_due(self, now: float) -> None:
        """No result for a while: step or result may be lost. Harmless if the worker is only slow.

        If repeating does not help, the worker may not know us, because it was replaced unnoticed: it is adopted.
        """
        if not self._sent or self.adopted is None:
            return
        # 2 s doubled up to 16: 30 s without an answer, by which time a hanging step would have ended its worker.
        if self._repeat_s >= ADOPT_AGAIN_AFTER * STEP_REPEAT_S:
            self._num_silences += 1
            if self._num_silences >= MAX_SILENCES:
                self._fence(f"step {self._sent[0].plan.step} was sent repeatedly and never answered", now)
            else:
                self.adopt(now)
            return
        self._repeat_s *= 2
        self.send_again(now)

    def send_again(self, now: float) -> None:
        """Send every unacknowledged step, with what is known by now filled in."""
        if self.adopted is None:
            return
        for sent in self._sent:
            if sent.previous is not None:
                sent.step = sent.step.filled_in(sent.previous.drawn())
                sent.previous = None
            self._emit(sent)
            self.num_repeated_steps += 1
        if self._sent:
            self._books.deadlines.set((REPEAT, ""), now + self._repeat_s)

    def _emit(self, sent: _Sent, num_steps: int = 1) -> None:
        step, plan = sent.step, sent.plan
        if num_steps > 1:
            plan = msgspec.structs.replace(plan, num_steps=num_steps)
        buffers = [memoryview(column).cast("B") for column in (step.rows, step.token_ids, step.page_ids)]
        for actor_id in self.ranks.worker_ids:
            self._books.outbox.tell(actor_id, plan, Channel.DATA, buffers)


def _adopt_tag(rank: int) -> Tag:
    return (ADOPT[0], str(rank)) if rank else ADOPT


def _size(step: Step) -> tuple[int, int, int]:
    """Rows, tokens and pages: all pages that the rows read, not only the few new ones.

    A position of a prompt that is read counts as another token: the head's product and what is read of it take 0.5 to
    2.5 times as long as a token's layers, in models of 0.3 to 0.6 billion parameters.
    """
    num_tokens = len(step.token_ids)
    # Steps that only decode read nothing, and are too many to look at each row.
    if num_tokens > len(step.sequences):
        spans = zip(step.sequences, step.column(RowColumn.START), step.column(RowColumn.COUNT), strict=True)
        num_tokens += sum(one.num_read_by(start, count) for one, start, count in spans if one.reading is not None)
    return len(step.sequences), num_tokens, sum(step.column(RowColumn.FIRST_PAGE)) + len(step.page_ids)


def _acknowledge(sent: _Sent, result: StepResult) -> Acknowledged:
    """A row that failed has drawn nothing, whatever the worker says."""
    errors = {error.row: error for error in result.errors}
    token_ids = result.token_ids
    if errors:
        token_ids = [-1 if row in errors else token_id for row, token_id in enumerate(token_ids)]
    return Acknowledged(sent.step, token_ids, errors, result.extras, result.prompt_extras, result.vectors)
