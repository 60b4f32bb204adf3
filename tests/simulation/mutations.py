"""One planted bug per promise of the cores. What the simulation does not notice, it does not guard.

A mutation replaces a method, or several if a promise has a second guard behind the first: then either alone may
fail unseen, and only both together break it. Each is planted with the seed that is known to show it (`planting.py`).
"""

from typing import Any

import msgspec

from kvstore.cache.block_table import BlockTable
from kvstore.cache.radix_tree import RadixTree
from kvstore.cache.rebuild import RecoveredSequences
from kvstore.protocol import GrantClosed
from kvstore.transfer import puller
from kvstore.transfer.session import Phase as TransferPhase
from kvstore.transfer.session import SenderLost, TransferSession
from mesh.membership.view import MemberChange, Membership
from nodes.detokenizer.core import Step
from nodes.gateway.cancels import CancelLedger
from nodes.gateway.core import GatewayCore
from nodes.gateway.peers import Peers
from nodes.gateway.requests import Phase, RequestState
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.events import Reply
from nodes.kv_agent.pools import taking
from nodes.kv_agent.pools.taking import take_pool
from nodes.protocol import Adopt, RowError
from nodes.registry.core import RegistryCore
from nodes.scheduler.actor import SchedulerActor
from nodes.scheduler.attempts import Attempts
from nodes.scheduler.batch.running import Running
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import Announce
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.rpc_handlers import RpcHandlers
from nodes.scheduler.sequence import Sequence
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.scheduler.worker_link.ranks import AdoptedRanks
from nodes.worker.core import AnswerAdopt, WorkerCore
from nodes.worker.executor import isolation
from nodes.worker.executor.step_watch import StepWatch
from nodes.worker.parallel.group import RankGroup
from nodes.worker.parallel.ranks import RankCore
from nodes.worker.steps.step import StepOutcome
from tests.simulation.batch_mutations import BATCHES_PLANTED
from tests.simulation.planting import Bug, around, bug, nothing
from tests.simulation.table_mutations import OPENINGS_PLANTED, TABLE_KEPT


def _leave_at_once(leave: Any, self: Running, sequence: Sequence, stage: Any) -> bool:
    inflight, sequence.num_inflight = sequence.num_inflight, 0
    left = leave(self, sequence, stage)
    sequence.num_inflight = inflight
    return left


def _commit_what_is_scheduled(journal: Any, self: Sequence, page_size: int) -> None:
    computed, self.num_computed = self.num_computed, self.num_scheduled
    journal(self, page_size)
    self.num_computed = computed


def _count_tokens_twice(accept: Any, self: RequestState, delta: Any, now: float) -> Any:
    taken = msgspec.structs.replace(delta, position=len(self.output_ids), text_offset=self.num_chars)
    return accept(self, taken, now)


def _take_steps_of_every_epoch(on_step: Any, self: WorkerCore, event: Any) -> Any:
    plan = msgspec.structs.replace(event.plan, scheduler_epoch=self._epoch)
    return on_step(self, event._replace(plan=plan))


def _take_any_result(on_result: Any, self: Pipeline, worker: Any, result: Any, now: float) -> Any:
    if self._sent:
        step = self._sent[0].plan.step
        result = msgspec.structs.replace(result, scheduler_epoch=self._epoch, step=step)
    return on_result(self, worker, result, now)


def _free_at_once(abort: Any, self: Any, *, quiesced: Any) -> Any:
    return abort(self, quiesced=True)


def _off_by_one(reopen: Any, self: Any, sequence: Any, position: Any, *more: Any) -> Any:
    return reopen(self, sequence, position + 1, *more)


def _unlocked(lock: Any, self: RadixTree, match: Any) -> Any:
    node = step = lock(self, match)
    while step is not None:
        if step.lock_count == 1:
            self.num_evictable += len(step.pages)
        step.lock_count -= 1
        step = step.parent
    return node


def _do_not_answer_zombies(on_delta: Any, self: GatewayCore, delta: Any, now: float) -> None:
    log = self._requests.get(delta.request_id)
    if log is not None and delta.attempt >= log.attempt and log.phase <= Phase.RUNNING:
        on_delta(self, delta, now)


def _keep_queue(on_adopt: Any, self: WorkerCore, event: Any) -> Any:
    epoch, queue = self._epoch, dict(self._queue)
    commands = on_adopt(self, event)
    if queue and epoch != self._epoch and self._running is not None:
        oldest = queue[min(queue)]
        self._queue[1] = oldest._replace(plan=msgspec.structs.replace(oldest.plan, step=1, scheduler_epoch=self._epoch))
    return commands


def _adopted_at_once(settle: Any, self: WorkerCore) -> Any:
    answers = [AnswerAdopt(waiting.call) for waiting in self._adopting]
    self._adopting.clear()
    return answers + settle(self)


def _keep_one_result(keep: Any, self: WorkerCore, result: Any) -> None:
    self._results.clear()
    keep(self, result)


async def _do_not_wait_for_worker(ask: Any, self: SchedulerActor, actor_id: str, message: Any, what: str) -> Any:
    return None if isinstance(message, Adopt) else await ask(self, actor_id, message, what)


def _ready_at_once(start: Any, self: SchedulerCore, now: float) -> Any:
    self._is_announced = True
    return [*start(self, now), Announce("ready", worker_ready=True)]


def _forget_holders(peer_gone: Any, self: AgentCore, peer: Any, reason: str, now: float) -> Any:
    sessions = self._sessions
    self._sessions = {name: one for name, one in sessions.items() if one.grant.holder != peer.actor_id}
    commands = peer_gone(self, peer, reason, now)
    self._sessions = sessions
    return commands


def _map_at_once(_: Any, self: Any, event: Any, now: Any) -> Any:
    return [*self._revoke_older(event.sender, now), self._map(event)]


def _close_at_once(close: Any, self: AgentCore, event: Any, now: float) -> Any:
    commands = close(self, event, now)
    grant_id = event.message.grant_id
    return commands + [Reply(call, GrantClosed(grant_id=grant_id)) for call in self._closing.pop(grant_id, [])]


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


def _count_all_pages(progress: Any, self: Any) -> Any:
    return msgspec.structs.replace(progress(self), num_pages=self.num_pages)


def _ignore_unknown_grants(on_transfer_failed: Any, self: PrefillHandoffQueue, message: Any, now: float) -> Any:
    return None if message.code == "unknown_grant" else on_transfer_failed(self, message, now)


def _claim_any(_: Any, self: RecoveredSequences, token_ids: Any, extra_key: str = "", *, lora: str = "") -> Any:
    for handles in self._by_parent.values():
        for handle in handles:
            if handle.num_tokens < len(token_ids):
                handles.remove(handle)
                return handle
    return None


def _ignore_lost_senders(handle: Any, self: TransferSession, event: Any, now: float) -> Any:
    return [] if isinstance(event, SenderLost) else handle(self, event, now)


def _take_gaps(take_run: Any, self: Step, number: int, stream: Any, position: int, *more: Any) -> None:
    take_run(self, number, stream, min(position, stream.position) if stream.position else position, *more)


def _let_anything_in(problem: Any, self: RpcHandlers, *arguments: Any) -> Any:
    found = problem(self, *arguments)
    return None if found is not None and found[0] == "never_fits" else found


def _same_incarnation(update: Any, self: Membership, upserted: Any, gone: Any) -> MemberChange:
    change = update(self, upserted, gone)
    joined = {one.actor_id for one in change.joined}
    left = [one for one in change.left if one.actor_id not in joined]
    old = {one.actor_id for one in change.left} & joined
    return MemberChange(
        [one for one in change.joined if one.actor_id not in old],
        left,
        change.changed + [one for one in change.joined if one.actor_id in old],
    )


def _open_with_others(opening: Any, self: Sequence) -> Any:
    opened = opening(self)
    return msgspec.structs.replace(opened, token_ids=[1] * len(opened.token_ids))


def _count_from_the_attempt(from_submit: Any, *arguments: Any) -> Sequence:
    sequence = from_submit(*arguments)
    least = sequence.sampling.min_tokens and sequence.sampling.min_tokens + sequence.num_prior_outputs
    sequence.sampling = msgspec.structs.replace(sequence.sampling, min_tokens=least)
    return sequence


def _fail_all(_: Any, runner: Any, step: Any, failure: str) -> StepOutcome:
    return StepOutcome([-1] * len(step.rows), [RowError(row.row, "poisoned_request", failure) for row in step.rows])


ZOMBIES_GO_ON = around(GatewayCore, "_on_delta", _do_not_answer_zombies)
"""The second guard behind every cancel: output of an attempt that nobody wants is answered with another cancel."""


def _take_alone(_: Any, host: Any, prefix: str, wanted: Any, incarnation: int) -> Any:
    return [take_pool(host, prefix + one.name, one, incarnation) for one in wanted]


_ELSEWHERE = OPENINGS_PLANTED | BATCHES_PLANTED
FIRST_LOST = around(TransferSession, "_on_announced", _lose_the_first)
"""Not a bug: announcements are tells, so any may be lost. That of a transfer's first pages seldom is; here it is."""

PLANTED: dict[str, Bug] = _ELSEWHERE | {
    "unacknowledged steps are not sent again": bug(5, around(Pipeline, "send_again", nothing)),
    "any result is taken for the oldest step": bug(13, around(Pipeline, "on_result", _take_any_result)),
    "only the last result is kept": bug(13, around(WorkerCore, "_keep", _keep_one_result)),
    "pages are given back under a step that writes them": bug(32, around(Running, "leave", _leave_at_once)),
    "pages are committed before the step is acknowledged": bug(
        102, around(Sequence, "commit_full_pages", _commit_what_is_scheduled)
    ),
    "locked pages are evicted": bug(1, around(RadixTree, "lock", _unlocked)),
    "a grant is closed while a copy writes": bug(9, around(AgentCore, "_close", _close_at_once)),
    "a grant that closes itself leaves no tombstone": bug(40, around(AgentCore, "_quiesced", _leave_no_tombstone)),
    "a grant that has closed itself answers its sender alone": bug(
        40,
        around(TransferSession, "_on_announced", _answer_no_repeats),
    ),
    "what nobody claims is held for good": bug(0, around(RecoveredSequences, "release", nothing)),
    "recovered sequences are claimed for other tokens": bug(22, around(RecoveredSequences, "claim", _claim_any)),
    "deltas are taken wherever they belong": bug(5, around(RequestState, "accept", _count_tokens_twice)),
    "a detokenizer takes tokens behind a gap": bug(13, around(Step, "_take_run", _take_gaps)),
    "a cancel is asked once": bug(
        24,
        around(CancelLedger, "failed", lambda _, self, scheduler, now: self.lost(scheduler)),
        ZOMBIES_GO_ON,
    ),
    "attempts of a lost gateway go on": bug(19, around(Attempts, "of_gateway", lambda *_: []), ZOMBIES_GO_ON),
    # The lease is the last guard: before it the holder cancels, is seen to be gone, or does not know the order.
    "prefilled pages are kept for good": bug(
        2,
        around(PrefillHandoffQueue, "on_lease_over", nothing),
        around(PrefillHandoffQueue, "on_holder_lost", lambda *_: []),
        around(PrefillHandoffQueue, "on_transfer_failed", _ignore_unknown_grants),
        around(DecodeHandoffQueue, "_cancel_unknown", nothing),
    ),
    "a stream begins behind the position asked for": bug(33, around(Streams, "reopen", _off_by_one)),
    "requests that never fit are taken": bug(15, around(RpcHandlers, "_problem", _let_anything_in)),
    "a stand-in has the last word on what fits": bug(179, around(Peers, "is_stand_in", nothing)),
    "leases at the registry never end": bug(7, around(RegistryCore, "expire", nothing)),
    "a new incarnation is taken for the old one": bug(172, around(Membership, "_update", _same_incarnation)),
    "pages of a failed transfer are free at once": bug(9, around(BlockTable, "abort", _free_at_once)),
    # The agent hears of it in three ways: the link, the next incarnation's first message, and its request for the pool.
    "a dead scheduler's grants stay open": bug(
        59,
        around(AgentCore, "_revoke_older", lambda *_: []),
        around(AgentCore, "_peer_gone", _forget_holders),
        around(AgentCore, "_map_asked", _map_at_once),
    ),
    "a pool is mapped while copies write": bug(153, around(AgentCore, "_map_asked", _map_at_once)),
    # Links end with the incarnation they lead to, so late steps are rare; those that wait in the worker are not.
    "a worker runs steps of every scheduler epoch": bug(
        23,
        around(WorkerCore, "_on_step", _take_steps_of_every_epoch),
        around(WorkerCore, "_on_adopt", _keep_queue),
        # The last guard is the worker's table, which is empty then: such a step is not run.
        TABLE_KEPT,
    ),
    # The next steps wait for the old one anyway, but a transfer into pages that it still writes does not.
    "a worker is adopted while a step runs": bug(283, around(WorkerCore, "_settle", _adopted_at_once)),
    # The second guard: it gets no work before it is ready, and it is not ready before it has the worker.
    "the pool is taken over before the worker": bug(
        283,
        around(SchedulerActor, "_ask_until_answered", _do_not_wait_for_worker),
        around(SchedulerCore, "start", _ready_at_once),
    ),
    # A source's death ends its transfers before its pages are used for anything else, if it is heard of in time.
    "generations are not compared": bug(
        77,
        around(puller, "_compare", nothing),
        around(TransferSession, "handle", _ignore_lost_senders),
        around(DecodeHandoffQueue, "on_peer_lost", lambda *_: []),
    ),
    "pages are counted that are not the first ones": bug(
        4,
        FIRST_LOST,
        around(TransferSession, "_progress", _count_all_pages),
    ),
    # Pages are given back, and cached, that another rank has yet to write in that step.
    "a step is over when its first rank is done": bug(
        22,
        around(AdoptedRanks, "gather", lambda _, self, rank, result: result),
    ),
    "ranks go on without one that died": bug(14, around(RankGroup, "_end", nothing)),
    "a rank drops steps that another may have begun": bug(
        14, around(RankCore, "handle", lambda _, *event: WorkerCore.handle(*event))
    ),
    "min_tokens are counted from the attempt": bug(54, around(Sequence, "from_submit", _count_from_the_attempt)),
    "what a sampler looks back at is another's": bug(0, around(Sequence, "opening", _open_with_others)),
    "the pool of one rank is made again alone": bug(145, around(taking, "take_group", _take_alone)),
    "a device that fails poisons what it is given": bug(27, around(isolation, "_check_device", nothing)),
    "a batch that raises fails all its rows": bug(27, around(isolation, "_row_by_row", _fail_all)),
    "a step that hangs is waited for": bug(36, around(StepWatch, "begun", nothing)),
    # If late output were taken it would be the same text: only attempts that go on computing show that it is dropped.
    "output of older attempts is not answered": bug(24, ZOMBIES_GO_ON),
}
