"""Planted bugs, one per promise, by the suite that has to see them. What no suite sees, the simulation does not guard.

A bug replaces a method, or several if a promise has a second guard behind the first: then either alone may fail unseen,
and only both together break it. Each is planted with the seed that is known to show it (`planting.py`). Private names
are used because what is broken is inside.
"""

from typing import Any
from unittest.mock import patch

import msgspec

from kvstore.cache.block_table import BlockTable
from kvstore.cache.radix_tree import RadixTree
from kvstore.cache.rebuild import RecoveredSequences
from kvstore.protocol import GrantClosed
from kvstore.transfer import puller
from kvstore.transfer.session import Phase as TransferPhase
from kvstore.transfer.session import SenderLost, TransferSession
from mesh.membership.view import MemberChange, Membership
from mesh.runtime.effects import Reply
from nodes.asks import ASK_NAMES, asked
from nodes.asks.min_tokens import MinTokens
from nodes.detokenizer.core import Step
from nodes.gateway.requests.cancels import CancelLedger
from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.log import Phase, RequestState
from nodes.gateway.requests.peers import Peers
from nodes.gateway.service import GatewayService
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.pools import taking
from nodes.kv_agent.pools.taking import take_pool
from nodes.prompt_payloads import PromptPayloads
from nodes.protocol import Adopt, RowError
from nodes.protocol.steps import Open
from nodes.registry.core import RegistryCore
from nodes.request import Sampling
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.asks import BatchedAsks
from nodes.scheduler.attempts import Attempts
from nodes.scheduler.batch.running import Running
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import Announce
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from nodes.scheduler.handoff.own_grants import OwnGrants
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.rpc_handlers import RpcHandlers
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.scheduler.worker_link.ranks import AdoptedRanks
from nodes.worker.core import WorkerCore
from nodes.worker.executor import isolation
from nodes.worker.executor.echo import EchoRunner
from nodes.worker.executor.step_watch import StepWatch
from nodes.worker.parallel.group import RankGroup
from nodes.worker.parallel.ranks import RankCore
from nodes.worker.steps.columns import Columns
from nodes.worker.steps.sequence_table import OpenSequence, SequenceTable
from nodes.worker.steps.step import RunnableRow, StepOutcome
from tests.simulation.planting import bug, meanwhile, no_items, nothing, returns

altered = msgspec.structs.replace

# what several suites plant


def _ignore_lost_senders(handle: Any, self: TransferSession, event: Any, now: float) -> Any:
    return [] if isinstance(event, SenderLost) else handle(self, event, now)


LEASES_FOR_EVER = (RegistryCore, "expire", nothing)
# A source's death ends its transfers before its pages are used for anything else, if it is heard of in time.
SOURCES_LIVE = (TransferSession, "handle", _ignore_lost_senders), (OwnGrants, "on_peer_lost", nothing)

# what requests go through


def _take_any_result(on_result: Any, self: Pipeline, worker: Any, result: Any, now: float) -> Any:
    if self._sent:
        result = altered(result, scheduler_epoch=self._epoch, step=self._sent[0].plan.step)
    return on_result(self, worker, result, now)


def _unlocked(lock: Any, self: RadixTree, match: Any) -> Any:
    node = step = lock(self, match)
    while step is not None:
        self.num_evictable += len(step.pages) if step.lock_count == 1 else 0
        step.lock_count -= 1
        step = step.parent
    return node


def _do_not_answer_zombies(on_delta: Any, self: GatewayCore, delta: Any, now: float) -> None:
    log = self.requests.get(delta.request_id)
    if log is not None and delta.attempt >= log.attempt and log.phase <= Phase.RUNNING:
        on_delta(self, delta, now)


def _keep_queue(on_adopt: Any, self: WorkerCore, event: Any) -> Any:
    epoch, queue = self._epoch, dict(self._queue)
    commands = on_adopt(self, event)
    if queue and epoch != self._epoch and self._running is not None:
        oldest = queue[min(queue)]
        self._queue[1] = oldest._replace(plan=altered(oldest.plan, step=1, scheduler_epoch=self._epoch))
    return commands


def _adopted_at_once(settle: Any, self: WorkerCore) -> Any:
    answers = [Reply(waiting.call, self.adopted) for waiting in self._adopting]
    self._adopting.clear()
    return answers + settle(self)


def _keep_one_result(keep: Any, self: WorkerCore, result: Any) -> None:
    self._results.clear()
    keep(self, result)


async def _do_not_wait_for_worker(ask: Any, self: SchedulerActor, actor_id: str, message: Any, what: str) -> Any:
    return None if isinstance(message, Adopt) else await ask(self, actor_id, message, what)


def _ready_at_once(start: Any, self: SchedulerCore, now: float) -> Any:
    self._is_announced = True
    return [*start(self, now), Announce("ready", worker_ready=True, asks=ASK_NAMES)]


def _forget_holders(peer_gone: Any, self: AgentCore, peer: Any, *more: Any) -> Any:
    others = {name: one for name, one in self._sessions.items() if one.grant.holder != peer.actor_id}
    with patch.object(self, "_sessions", others):
        return peer_gone(self, peer, *more)


def _map_at_once(_: Any, self: Any, asked: Any, now: Any) -> None:
    self._revoke_older(asked.sender, now)
    self._map(asked)


def _close_at_once(close: Any, self: AgentCore, asked: Any, grant_id: str, now: float) -> None:
    close(self, asked, grant_id, now)
    for call in self._closing.pop(grant_id, []):
        self._outbox.reply(call, GrantClosed(grant_id=grant_id))


def _leave_no_tombstone(quiesced: Any, self: AgentCore, session: TransferSession) -> None:
    quiesced(self, session)
    if session.phase is TransferPhase.SUCCESS:
        self._forget(session.grant.grant_id)


def _answer_no_repeats(on_announced: Any, self: TransferSession, event: Any, now: float) -> Any:
    commands = on_announced(self, event, now)
    return commands[1:] if self.phase is TransferPhase.SUCCESS else commands


def _lose_the_first(on_announced: Any, self: TransferSession, event: Any, now: float) -> Any:
    is_first = event.ready.first == 0 and not self.__dict__.get("was_lost")
    self.__dict__["was_lost"] = True
    return [] if is_first else on_announced(self, event, now)


def _claim_any(_: Any, self: RecoveredSequences, token_ids: Any, *more: Any, **options: Any) -> Any:
    shorter = (one for handles in self._by_parent.values() for one in handles if one.num_tokens < len(token_ids))
    if (handle := next(shorter, None)) is not None:
        self._by_parent[handle.parent_hash].remove(handle)
    return handle


def _take_gaps(take_run: Any, self: Step, number: int, stream: Any, position: int, *more: Any) -> None:
    take_run(self, number, stream, min(position, stream.position) if stream.position else position, *more)


def _let_anything_in(problem: Any, self: RpcHandlers, *arguments: Any) -> Any:
    found = problem(self, *arguments)
    return None if found is not None and found[0] == "never_fits" else found


def _same_incarnation(update: Any, self: Membership, *arguments: Any) -> MemberChange:
    change = update(self, *arguments)
    both = {one.actor_id for one in change.joined} & {one.actor_id for one in change.left}
    joined, left = ([one for one in some if one.actor_id not in both] for some in (change.joined, change.left))
    return MemberChange(joined, left, change.changed + [one for one in change.joined if one.actor_id in both])


def _count_from_the_attempt(from_submit: Any, *arguments: Any) -> Sequence:
    sequence = from_submit(*arguments)
    sampling = sequence.spec.sampling
    asks = [
        altered(ask, value=asked([MinTokens(least + sequence.num_prior_outputs, stops)])[0].value)
        for ask in sampling.asks
        if ask.name == MinTokens.name
        for least, stops in (msgspec.msgpack.decode(ask.value),)
    ]
    others = [ask for ask in sampling.asks if ask.name != MinTokens.name]
    sequence.spec = altered(sequence.spec, sampling=altered(sampling, asks=others + asks))
    return sequence


def _fail_all(_: Any, runner: Any, step: Any, failure: str) -> StepOutcome:
    return StepOutcome(
        [-1] * len(step.rows), [RowError(row.row, "poisoned_request", failure, retryable=False) for row in step.rows]
    )


# messages that carry several items, each of which has to come to its own end

GATHER_S = 0.3


def _open_at_the_second_ask(open_: Any, self: AgentCore, asked: Any, grants: Any, now: float) -> None:
    known = self.__dict__.setdefault("asked_for", set())
    again = [one for one in grants if one.grant_id in known]
    known.update(one.grant_id for one in grants)
    open_(self, asked, again, now)


def _take_unnamed_for_done(_: Any, self: BatchedAsks[Any], number: str, done: Any, refused: Any) -> Any:
    return [(name, refused.get(name)) for name in self._named.pop(number, ())]


def _refuse_together(on_submits: Any, self: RpcHandlers, event: Any, message: Any, now: float) -> None:
    on_submits(self, event, message, now)
    reply = self._books.outbox.commands[-1]
    held, refused = reply.message.held, reply.message.refused
    if refused and held:
        for sequence in filter(None, (self._books.attempts.find(ref.request_id, ref.attempt) for ref in held)):
            self._endings.cancel(sequence, now)
        refused = refused + [altered(refused[0], request_id=ref.request_id, attempt=ref.attempt) for ref in held]
        self._books.outbox.commands[-1] = reply._replace(message=altered(reply.message, held=[], refused=refused))


def _gather_for_longer(flush: Any, self: GatewayService) -> None:
    def release(self: GatewayService) -> None:
        self.__dict__["is_gathering"] = False
        flush(self)

    gathered, self._submits = self._submits, {}
    flush(self)
    self._submits = gathered
    if gathered and not self.__dict__.get("is_gathering"):
        self.__dict__["is_gathering"] = True
        self.ctx.later(GATHER_S, release, self)


# what a worker knows of sequences, and what a scheduler believes the worker knows


def _leave_the_slot_at_once(leave: Any, self: Running, sequence: Any, stage: Any) -> bool:
    """The next sequence may have it, though what is in flight still names it."""
    if sequence.num_inflight and sequence.slot >= 0 and sequence.row_id not in self._leaving:
        self.slots.give_back(sequence.slot)
        # When what is in flight ends, the slot must not be given back once more.
        self.slots.__dict__.setdefault("early", set()).add(sequence.row_id)
    return leave(self, sequence, stage)


def _give_back_once(give_back: Any, self: Running, sequence: Any) -> None:
    early = self.slots.__dict__.get("early", set())
    if sequence.row_id in early:
        early.discard(sequence.row_id)
        sequence.slot = -1
    give_back(self, sequence)


def _nobody(slot: int) -> OpenSequence:
    return OpenSequence(Open(slot, -1, 0, Sampling()))


def _record_for_anybody(_: Any, self: SequenceTable, columns: Columns, token_ids: Any) -> None:
    for slot, start, count, token_id in zip(columns.slots, columns.starts, columns.counts, token_ids, strict=False):
        if token_id >= 0:
            one = self._slots.setdefault(slot, _nobody(slot))
            one.drawn, one.drawn_at = token_id, start + count


def _record_of_every_epoch(end: Any, self: WorkerCore, event: Any) -> Any:
    running, commands = self._running[0], end(self, event)
    if running.plan.scheduler_epoch != self._epoch:
        token_ids = [-1] * running.num_rows
        for row, token_id in zip(running.runnable.rows, event.outcome.token_ids, strict=True):
            token_ids[row.row] = token_id
        self._table.record(running.columns, token_ids)
    return commands


def _append_pages(apply: Any, self: SequenceTable, opens: Any, columns: Columns) -> Any:
    """Pages of a sequence that is opened again are put behind those that it had."""
    before = {one.slot: self._slots.get(one.slot, _nobody(one.slot)) for one in opens}
    again = {one.slot: before[one.slot] for one in opens if before[one.slot].sequence == one.sequence}
    found = apply(self, opens, columns)
    for slot, had in again.items():
        self._slots[slot].pages[: len(had.pages)] = had.pages
    return found


def _run_all_the_same(apply: Any, self: SequenceTable, opens: Any, columns: Columns) -> Any:
    if isinstance(found := apply(self, opens, columns), list):
        return found
    for at, slot in enumerate(columns.slots):
        one = self._slots.setdefault(slot, _nobody(slot))
        one.sequence, one.drawn_at, one.drawn = columns.sequences[at], columns.starts[at], max(one.drawn, 0)
        one.pages.extend([0] * (columns.first_pages[at] - len(one.pages)))
    return apply(self, opens, columns)


def _trust_a_free_slot(opened: Any, self: SequenceTable, opening: Any) -> OpenSequence:
    """Keep what was drawn for it: nothing was, or it would not be free."""
    one, before = opened(self, opening), self._slots.get(opening.slot)
    if before is not None and before.sequence == -1:
        one.drawn, one.drawn_at = before.drawn, before.drawn_at
    return one


def _one_late(read: Any, self: EchoRunner, row: RunnableRow, page_ids: Any) -> bytes:
    data = read(self, row, page_ids)
    size = len(data) // max(1, min(row.end, row.sequence.num_prompt_tokens - 1) - row.start)
    return data[-size:] + data[:-size] if data else data


def _add_again(add: Any, self: PromptPayloads, position: int, count: int, data: bytes) -> bool:
    """Whatever is known of it already, it is put behind that."""
    return add(self, self.next if position + count < self._end else position, count, data)


def _believe_in_the_same_table(on_adopted: Any, self: Pipeline, adopted: Any, now: float) -> Any:
    self.table = max(0, self.table - 1)
    return on_adopted(self, adopted, now)


NOT_OPENED_AGAIN = (Pipeline, "on_adopted", _believe_in_the_same_table)
RECORDED_FOR_ANYBODY = (SequenceTable, "record", _record_for_anybody)
TABLE_KEPT = (SequenceTable, "clear", lambda clear, self: None if hasattr(self, "_slots") else clear(self))
ZOMBIES_GO_ON = (GatewayCore, "_on_delta", _do_not_answer_zombies)
"""The second guard behind every cancel: output of an attempt that nobody wants is answered with another cancel."""
MAPPED_AT_ONCE = (AgentCore, "_map_asked", _map_at_once)
FIRST_LOST = (TransferSession, "_on_announced", _lose_the_first)
"""Not a bug: announcements are tells, so any may be lost. That of a transfer's first pages seldom is; here it is."""
OPENED_LATE = (AgentCore, "_open", _open_at_the_second_ask)
"""Not a bug: an agent may leave out of its answer what it wants to be asked again. Ours names all, others may not."""
GATHERED_LONGER = (GatewayService, "_flush", _gather_for_longer)
"""Not a bug: attempts of different calls go together, which they seldom do in the simulation's sparse traffic."""

SCENARIO = {
    "unacknowledged steps are not sent again": bug(22, (Pipeline, "send_again", nothing)),
    "any result is taken for the oldest step": bug(13, (Pipeline, "on_result", _take_any_result)),
    "only the last result is kept": bug(13, (WorkerCore, "_keep", _keep_one_result)),
    "pages are given back under a step that writes them":
        bug(32, (Running, "leave", meanwhile(1, "num_inflight", returns(0)))),
    "pages are committed before the step is acknowledged":
        bug(102, (Sequence, "commit_full_pages", meanwhile(0, "num_computed", lambda self: self.num_scheduled))),
    "locked pages are evicted": bug(1, (RadixTree, "lock", _unlocked)),
    "a grant is closed while a copy writes": bug(52, (AgentCore, "_close", _close_at_once)),
    "a grant that closes itself leaves no tombstone": bug(40, (AgentCore, "_quiesced", _leave_no_tombstone)),
    "a grant that has closed itself answers its sender alone":
        bug(40, (TransferSession, "_on_announced", _answer_no_repeats)),
    "what nobody claims is held for good": bug(0, (RecoveredSequences, "release", nothing)),
    "recovered sequences are claimed for other tokens": bug(23, (RecoveredSequences, "claim", _claim_any)),
    "deltas are taken wherever they belong":
        bug(5, (RequestState, "accept", lambda accept, self, delta, now: accept(
            self, altered(delta, position=len(self.output_ids), text_offset=self.num_chars), now))),
    "what comes beside tokens moves to others when tokens are repeated":
        bug(13, (RequestState, "accept", lambda accept, self, delta, now: accept(
            self, altered(delta, extras=[b""] * (len(self.output_ids) - delta.position) + delta.extras), now))),
    "a detokenizer takes tokens behind a gap": bug(13, (Step, "_take_run", _take_gaps)),
    "a cancel is asked once":
        bug(24, (CancelLedger, "failed", lambda _, self, scheduler, now: self.lost(scheduler)), ZOMBIES_GO_ON),
    "attempts of a lost gateway go on": bug(19, (Attempts, "of_gateway", no_items), ZOMBIES_GO_ON),
    # The lease is the last guard: before it the holder cancels, is seen to be gone, or does not know the order.
    "prefilled pages are kept for good":
        bug(10, (PrefillHandoffQueue, "on_lease_over", nothing), (PrefillHandoffQueue, "on_holder_lost", no_items),
            (DecodeHandoffQueue, "_cancel_unknown", nothing),
            (PrefillHandoffQueue, "on_transfer_failed", lambda failed, self, message, now:
             None if message.code == "unknown_grant" else failed(self, message, now))),
    "a stream begins behind the position asked for":
        bug(33, (Streams, "reopen", lambda reopen, self, one, position, *more: reopen(self, one, position + 1, *more))),
    "requests that never fit are taken": bug(15, (RpcHandlers, "_problem", _let_anything_in)),
    "a stand-in has the last word on what fits": bug(179, (Peers, "is_stand_in", nothing)),
    "leases at the registry never end": bug(7, LEASES_FOR_EVER),
    "a new incarnation is taken for the old one": bug(172, (Membership, "_update", _same_incarnation)),
    "pages of a failed transfer are free at once":
        bug(9, (BlockTable, "abort", lambda abort, self, *, quiesced: abort(self, quiesced=True))),
    # The agent hears of it in three ways: the link, the next incarnation's first message, and its request for the pool.
    "a dead scheduler's grants stay open":
        bug(207, (AgentCore, "_revoke_older", nothing), (AgentCore, "_peer_gone", _forget_holders), MAPPED_AT_ONCE),
    "a pool is mapped while copies write": bug(153, MAPPED_AT_ONCE),
    # Links end with the incarnation they lead to, so late steps are rare; those that wait in the worker are not. The
    # last guard is the worker's table, which is empty then: such a step is not run.
    "a worker runs steps of every scheduler epoch":
        bug(23, (WorkerCore, "_on_step", lambda on_step, self, event: on_step(
            self, event._replace(plan=altered(event.plan, scheduler_epoch=self._epoch)))),
            (WorkerCore, "_on_adopt", _keep_queue), TABLE_KEPT),
    # The next steps wait for the old one anyway, but a transfer into pages that it still writes does not.
    "a worker is adopted while a step runs": bug(283, (WorkerCore, "_settle", _adopted_at_once)),
    # The second guard: it gets no work before it is ready, and it is not ready before it has the worker.
    "the pool is taken over before the worker":
        bug(283, (SchedulerActor, "_ask_until_answered", _do_not_wait_for_worker),
            (SchedulerCore, "start", _ready_at_once)),
    "generations are not compared": bug(77, (puller, "_compare", nothing), *SOURCES_LIVE),
    "pages are counted that are not the first ones":
        bug(4, FIRST_LOST, (TransferSession, "_progress", lambda of, one: altered(of(one), num_pages=one.num_pages))),
    # Pages are given back, and cached, that another rank has yet to write in that step.
    "a step is over when its first rank is done":
        bug(22, (AdoptedRanks, "gather", lambda _, self, rank, result: result)),
    "ranks go on without one that died": bug(24, (RankGroup, "_end", nothing)),
    "a rank drops steps that another may have begun":
        bug(22, (RankCore, "handle", lambda _, *event: WorkerCore.handle(*event))),
    "min_tokens are counted from the attempt": bug(54, (Sequence, "from_submit", _count_from_the_attempt)),
    "what a sampler looks back at is another's":
        bug(0, (Sequence, "opening", lambda opening, self:
            altered(opened := opening(self), token_ids=[1] * len(opened.token_ids)))),
    "the pool of one rank is made again alone":
        bug(15, (taking, "take_group", lambda _, host, prefix, wanted, incarnation:
            [take_pool(host, prefix + one.name, one, incarnation) for one in wanted])),
    "a device that fails poisons what it is given": bug(27, (isolation, "_check_device", nothing)),
    "a batch that raises fails all its rows": bug(27, (isolation, "_row_by_row", _fail_all)),
    "a step that hangs is waited for": bug(3, (StepWatch, "begun", nothing)),
    # If late output were taken it would be the same text: only attempts that go on computing show that it is dropped.
    "output of older attempts is not answered": bug(24, ZOMBIES_GO_ON),
    "what an answer does not name is taken for done":
        bug(0, OPENED_LATE, (BatchedAsks, "answered", _take_unnamed_for_done)),
    "one attempt that is refused fails those beside it":
        bug(15, GATHERED_LONGER, (RpcHandlers, "_on_submits", _refuse_together)),
    # Each rule of the table has a guard behind it: alone, some of these would fail unseen.
    "sequences are not opened again after an adoption": bug(26, NOT_OPENED_AGAIN),
    "a step that does not match is run": bug(26, NOT_OPENED_AGAIN, (SequenceTable, "apply", _run_all_the_same)),
    "pages are appended, not placed": bug(13, (SequenceTable, "apply", _append_pages)),
}  # fmt: skip

PROMPTS = {
    "what is read of a prompt is one position late": bug(0, (EchoRunner, "_read", _one_late)),
    "a chunk of a prompt is read twice": bug(29, (PromptPayloads, "add", _add_again)),
    "what is cached is not read": bug(0, (Sequence, "reusable_ids", property(lambda self: self.token_ids))),
}  # fmt: skip

TABLES = {
    "a worker's table is kept over epochs": bug(9, TABLE_KEPT),
    "a slot is used while it is in flight":
        bug(1, (Running, "leave", _leave_the_slot_at_once), (Running, "_give_back_slot", _give_back_once),
            RECORDED_FOR_ANYBODY),
    "a late draw is recorded":
        bug(7, (WorkerCore, "_end", _record_of_every_epoch), RECORDED_FOR_ANYBODY,
            (SequenceTable, "_opened", _trust_a_free_slot)),
}  # fmt: skip
