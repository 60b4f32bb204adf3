"""One scheduler: what it decides when something arrives, regardless of how it arrives.

    Submit -> queue -> admission -> steps -> results -> streams -> finished, kept until the gateway has everything
                  ^     |  `-> grants (prefilled elsewhere)
                  `-----`--> restores (read from the disk)
    PrefillOrder -> queue -> admission -> steps -> orders (kept until pulled)

One class for prefill, decode and mixed: any group serves any phase. `handle` takes one event and returns what to do;
the events of a loop turn are followed by `Wake`, which handles due deadlines, plans steps and sends what has gathered.
`next_deadline` is when a `Wake` is needed even without an event. Time is a parameter. Called by `actor.py`.
"""

from collections.abc import Callable, Iterable
from typing import assert_never

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import RecoveredSequences
from kvstore.protocol import (
    GrantClosed,
    GrantsOpened,
    PoolHandle,
    StoreChanged,
    StoredFound,
    StoredPagesListed,
    TransferNews,
)
from mesh.address import Address
from mesh.runtime.deadlines import Deadlines
from nodes.protocol import (
    Adopted,
    PrefillCancelled,
    PrefillNews,
    PrefillsOrdered,
    Resend,
    StepMismatch,
    StepResult,
    StepResults,
    StopAt,
)
from nodes.protocol.memory import MEMORY_RELEASED
from nodes.protocol.steps import MAX_STEPS, RowColumn
from nodes.scheduler import asks, attempts, cache_news, disk_news, flushes, load_reports
from nodes.scheduler.asks import PersistentAsks
from nodes.scheduler.attempts import Attempts
from nodes.scheduler.batch.batching import compose_step
from nodes.scheduler.batch.growth import GrowthEstimate
from nodes.scheduler.batch.running import Running
from nodes.scheduler.batch.step import Step
from nodes.scheduler.cache_news import CacheNews
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.disk_news import DiskNews
from nodes.scheduler.events import (
    Answered,
    Asked,
    AskFailed,
    Command,
    DrainAsked,
    Event,
    FollowerReset,
    MembersChanged,
    MemoryWanted,
    Outbox,
    PeerLost,
    ReadyPeer,
    Told,
    Wake,
    WorkerDied,
)
from nodes.scheduler.fates import Fates
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.finish.results import Results
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.flushes import Flushes
from nodes.scheduler.handoff import decode, own_grants, prefill, restore
from nodes.scheduler.handoff.decode import DecodeHandoffQueue, Outcome
from nodes.scheduler.handoff.own_grants import OwnGrants
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.idle_check import CHECK, IdleCheck
from nodes.scheduler.load_reports import LoadReports
from nodes.scheduler.metrics import gauges, leaks
from nodes.scheduler.queue import turnover
from nodes.scheduler.queue.admission import Admission
from nodes.scheduler.queue.policy import WaitingQueue
from nodes.scheduler.queue.turnover import Turnover
from nodes.scheduler.rpc_handlers import RpcHandlers
from nodes.scheduler.sequence import Sequence, Stage
from nodes.scheduler.storing import PagesToStore
from nodes.scheduler.worker_link import absence, pipeline, worker_drain
from nodes.scheduler.worker_link.absence import WorkerAbsence
from nodes.scheduler.worker_link.pipeline import Pipeline
from nodes.scheduler.worker_link.worker_deaths import WorkerDeaths
from nodes.scheduler.worker_link.worker_drain import WorkerDrain
from nodes.trace_notes import Noted

ADMIT_EVERY_STEPS = 8
"""The growth estimate sinks by 0.001 a step, which makes room after several steps, not after each."""
RECOVERY = "recovery"
MAX_LONE_PREEMPTIONS = 16
"""Once is enough in theory. 16 prefills in vain take seconds, and then the client learns of it."""


class SchedulerCore:
    """The decisions of one scheduler incarnation. Parts are public for `metrics.py` and tests; only this class acts.

    `recovered` sequences were running in the previous incarnation: `cache` holds them for a lease, or until claimed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        address: Address,
        pool: PoolHandle,
        cache: PrefixCache,
        grant_nonce: str,
        recovered: RecoveredSequences | None = None,
    ) -> None:
        self.config = config
        self.address = address
        self.cache = cache
        self.recovered = RecoveredSequences(cache) if recovered is None else recovered
        self.outbox = Outbox()
        self.deadlines = Deadlines()
        self.asks = PersistentAsks(self.outbox, self.deadlines)
        self.growth = GrowthEstimate(config.page_size)
        self.running = Running(config.page_size, self.growth)
        self.queue = WaitingQueue(
            config.policy,
            self._match_pages,
            starvation_s=config.starvation_s,
            page_size=config.page_size,
            running=self.running,
        )
        self.running.count_output = self.queue.shares.refresh
        self.attempts = Attempts(config, self.deadlines)
        self.streams = Streams(self.outbox)
        self.pipeline = Pipeline(config, address.epoch, self.outbox, self.deadlines, self.asks)
        own = OwnGrants(config, pool, address, grant_nonce, self.outbox, self.deadlines, self.asks)
        self.own_grants, self.storing = own, PagesToStore(config, pool, cache, self.outbox)
        prefills = self.pipeline.prefills
        self.fates = Fates(address.actor_id, config.page_size, lambda: self.storing.is_mixed)
        self.grants = DecodeHandoffQueue(config, own, self.outbox, self.deadlines, prefills)
        self.orders = PrefillHandoffQueue(config, pool, self.outbox, self.deadlines)
        kept, sent = (lambda: self.pipeline.numerics, self.storing.are_stored), (self.outbox, self.deadlines)
        self.restores = RestoreQueue(config, cache, own, *sent, prefills, *kept, self.fates)
        held = (self.queue, self.running, self.grants, self.restores, self.attempts)
        self.endings = Endings(*held, self.streams, self.outbox)
        self.results = Results(config.page_size, self.running, self.orders, self.streams, self.endings)
        self.deaths = WorkerDeaths(config, self.running, self.results, self.orders, self.endings)
        room = (self.queue, self.running, self.growth, self.grants, self.orders, self.restores, self.recovered)
        self.admission = Admission(config, cache, *room, self.outbox)
        self.turnover = Turnover(self.queue, self.running, self.grants, self.admission.waits_for_prefix)
        asked = (self.queue, self.attempts, self.orders, self.restores, self.streams, self.endings)
        self.flushes = Flushes(cache, *sent, lambda: self.is_drained and not len(self.recovered), self.grants.hurry)
        self.absence = WorkerAbsence(self.attempts, self.pipeline, *sent)
        self.handlers = RpcHandlers(config, cache, *asked, self.deaths, self.absence, self.outbox, self.flushes)
        self.drain = WorkerDrain(config, self.orders, self.endings, self.deadlines)
        self.disk_news = DiskNews(config, self.outbox, self.asks, lambda: self.pipeline.numerics)
        self.news = CacheNews(cache, self.outbox, self.deadlines, self.disk_news.begin)
        self.idle_check = IdleCheck(cache, self.outbox, self.deadlines)
        self.load_reports = LoadReports(config, cache, self.queue, *sent, prefills)
        self._ready: dict[str, ReadyPeer] = {}
        self._is_announced, self._steps_since_admission = False, 0
        self._on_due = self._due()

    # what the actor calls

    def start(self, now: float) -> list[Command]:
        """Begin to take over the worker; everything else waits for that."""
        self.pipeline.adopt(now)
        if len(self.recovered):
            self.deadlines.set((RECOVERY, ""), now + self.config.lease_s)
        return self.outbox.take()

    def next_deadline(self) -> float | None:
        return self.deadlines.next()

    @property
    def is_drained(self) -> bool:
        """Nothing is left that anyone waits for. Finished attempts may still be sent again, but need no more work."""
        return not (
            len(self.attempts) - self.attempts.num_finished
            or len(self.orders)
            or len(self.queue)
            or len(self.grants)
            or len(self.restores)
            or self.pipeline.is_computing
        )

    def stats(self) -> dict[str, float]:
        return gauges(self)

    def assert_idle(self) -> None:
        """For tests: nothing is held. Raises AssertionError that names everything that is."""
        found = leaks(self)
        assert not found, f"{self.address} holds " + ", ".join(found)

    def handle(self, event: Event, now: float) -> list[Command]:
        self.streams.now = now
        # Before the others, which are looked for one by one: nearly every second event is one.
        if isinstance(event, Wake):
            self._wake(now)
            return self.outbox.take()
        self.idle_check.interrupt()
        match event:
            case Told():
                self._on_told(event.sender, event.message, now)
            case Asked():
                self.handlers.on_ask(event, now)
                self.admission.is_due = True
            case Answered():
                self._on_answer(event, now)
            case AskFailed():
                self._on_ask_failed(event, now)
            case PeerLost():
                self._on_peer_lost(event.peer, now)
            case WorkerDied():
                if self.pipeline.has_died(event.worker):
                    self.deaths.on_died(self.pipeline.unanswered(), now)
                    self.absence.on_died(now)
            case MembersChanged():
                self._on_members(event, now)
            case FollowerReset():
                self.news.restate(event.topic, now)
            case MemoryWanted():
                self.handlers.is_draining = True
                self.endings.abort_all(self.orders, MEMORY_RELEASED, "the memory of this group is released", now)
            case DrainAsked():
                self.handlers.is_draining = True
                self.outbox.add(self.pipeline.announcement("draining", worker_ready=self.pipeline.adopted is not None))
            case _:
                assert_never(event)
        return self.outbox.take()

    # messages

    def _on_told(self, sender: Address, message: object, now: float) -> None:
        match message:
            case StepResult():
                self._on_results(sender, (message,), now)
            case StepResults():
                self._on_results(sender, message.results, now)
            case StepMismatch():
                self.pipeline.on_mismatch(sender, message, now)
            case TransferNews():
                # The agent tells both sides of a transfer, and this scheduler may be either.
                for pulled in message.pulled:
                    self.orders.on_pulled(pulled, now)
                    self._on_outcomes((self.grants.on_pulled(pulled, now),), now)
                    self._on_restored((self.restores.on_pulled(pulled, now),))
                for failed in message.failed:
                    self._leave(self.orders.on_transfer_failed(failed, now), now)
                    self._on_outcomes((self.grants.on_transfer_failed(failed, now),), now)
                    self._on_restored((self.restores.on_transfer_failed(failed, now),))
            case StoreChanged():
                self.news.disk_changed(now)
            case PrefillNews():
                self._on_outcomes(self.grants.on_news(sender, message, now), now)
            case Resend():
                self.handlers.on_resend(sender, message, now)
            case StopAt():
                self.handlers.on_stop(message, now)
                self.admission.is_due = True
            case _:
                # A message for another role, or of a newer protocol: nothing here depends on it.
                return

    def _on_results(self, sender: Address, results: Iterable[StepResult], now: float) -> None:
        for result in results:
            if (step := self.pipeline.on_result(sender, result, now)) is not None:
                self.admission.is_due |= self.results.acknowledge(step, now)
                self.queue.shares.acknowledged()
        self.results.tell()

    def _on_answer(self, event: Answered, now: float) -> None:
        subject, message = event.tag[1], event.message
        if isinstance(message, Adopted):
            if (adopted := self.pipeline.take_adopted(event.tag, message, now)) is not None:
                self._on_adopted(adopted, now)
        elif isinstance(message, GrantsOpened):
            self._on_open_answers(self.own_grants.on_opened(subject, message, now), now)
        elif isinstance(message, StoredFound):
            self.restores.on_found(subject, message)
            self.admission.is_due = True
        elif isinstance(message, StoredPagesListed):
            self.disk_news.on_listed(event.tag, message)
        elif isinstance(message, PrefillsOrdered):
            self._on_outcomes(self.grants.on_ordered(subject, message, now), now)
        elif isinstance(message, GrantClosed):
            if pages := self.own_grants.on_closed(subject, message):
                self.cache.clear_quarantined(pages)
                self.admission.is_due = True
        elif isinstance(message, PrefillCancelled):
            self.grants.on_cancelled(message)

    def _on_ask_failed(self, event: AskFailed, now: float) -> None:
        kind, subject = event.tag
        if kind in (pipeline.ADOPT[0], own_grants.CLOSE, disk_news.LIST):
            self.asks.failed((event.tag,), now)
        elif kind == own_grants.OPEN:
            self._on_open_answers(self.own_grants.on_ask_failed(subject, event.code, now), now)
        elif kind == restore.FIND:
            self.restores.on_find_failed(subject)
            self.admission.is_due = True
        else:
            self._on_outcomes(self.grants.on_ask_failed(event.tag, event.code, now), now)

    def _on_open_answers(self, answers: Iterable[tuple[str, str | None]], now: float) -> None:
        for grant_id, code in answers:
            self._on_outcomes((self.grants.on_open_answer(grant_id, code, now),), now)
            self._on_restored((self.restores.on_open_answer(grant_id, code, now),))

    def _on_adopted(self, adopted: Adopted, now: float) -> None:
        self.handlers.vocab_size, self.handlers.asks = adopted.vocab_size, frozenset(adopted.asks)
        self.absence.over()
        before = self.pipeline.numerics
        self.deaths.take_back(self.pipeline.on_adopted(adopted, now), now)
        if before != adopted.numerics:
            self.restores.on_other_numerics(self.queue)
            self.disk_news.begin(now)
        # The first worker makes this scheduler ready; a draining one stays so.
        state = None if self._is_announced else "ready"
        self.outbox.add(self.pipeline.announcement(state, worker_ready=True))
        self._is_announced = self.admission.is_due = True

    def _on_peer_lost(self, peer: Address, now: float) -> None:
        if peer.actor_id in self.config.ranks:
            self.pipeline.on_worker_lost(peer, now)
            if self.pipeline.adopted is None:
                self.outbox.add(self.pipeline.announcement(None, worker_ready=False))
        for sequence in self.attempts.of_gateway(peer):
            self.endings.cancel(sequence, now)
        self.streams.on_lost(peer, self.attempts)
        for sequence in self.orders.on_holder_lost(peer):
            self.endings.leave(sequence, now)
        self._on_outcomes(self.grants.on_peer_lost(peer.actor_id, now), now)
        self._on_restored(self.restores.on_peer_lost(peer.actor_id, now))
        self.admission.is_due = True

    def _on_members(self, event: MembersChanged, now: float) -> None:
        for actor_id, peer in event.ready.items():
            known = self._ready.get(actor_id)
            if known is None or known.epoch != peer.epoch:
                # A new incarnation knows nothing of what its predecessor was asked: its answer would never come.
                self.asks.retry_now(actor_id)
                self.grants.retry_now(actor_id)
                self.own_grants.retry_now(actor_id)
        self._ready = dict(event.ready)
        self.storing.on_members(self._ready)
        self.absence.on_members(self._ready)
        self.drain.on_members(event, now)
        self.handlers.is_worker_drained = self.drain.is_drained
        self.pipeline.on_members(self._ready, now)
        self.streams.on_members(self._ready, self.attempts)
        self.admission.is_due = True

    def _on_outcomes(self, outcomes: Iterable[Outcome | None], now: float) -> None:
        for outcome in outcomes:
            if outcome is not None:
                self.results.take_handoff(outcome, now)
                self.queue.shares.acknowledged()
                self.admission.is_due = True

    def _on_restored(self, ended: Iterable[Sequence | None]) -> None:
        """What the disk had of these is read, or could not be: they wait again, with what came in the cache."""
        for sequence in ended:
            if sequence is not None:
                self.endings.put_back(sequence)
                self.admission.is_due = True

    def _leave(self, sequence: Sequence | None, now: float) -> None:
        if sequence is not None:
            self.endings.leave(sequence, now)
            self.admission.is_due = True

    # time and steps

    def _wake(self, now: float) -> None:
        while (key := self.deadlines.pop_due(now)) is not None:
            self._on_due[key[0]](key[1], now)
        self._plan(now)
        self.flushes.settle(now)
        self.own_grants.flush()
        self.grants.flush()
        self.restores.flush(now)
        self.orders.flush()
        self.streams.flush()
        if self.idle_check.tell():
            self.outbox.add(self.pipeline.announcement(None, worker_ready=self.pipeline.adopted is not None))
        self.news.gather(now)
        self.storing.flush(self.pipeline.numerics)
        self.load_reports.report(len(self.running) + len(self.grants) + len(self.restores), now)
        # Without a handle on pages nothing changes their books but events, which interrupt it.
        self.idle_check.look(is_idle=self.is_drained and not self.cache.num_sequences, now=now)

    def _due(self) -> dict[str, Callable[[str, float], None]]:
        """Handlers of due deadlines by kind; each is called with the deadline's subject and the time."""
        return {
            pipeline.REPEAT: lambda _, now: self.pipeline.on_repeat_due(now),
            pipeline.WORKER_LOST: lambda _, now: self._on_worker_away(now),
            prefill.ANNOUNCE: self.orders.on_repeat_due,
            prefill.LEASE: lambda grant_id, now: self._leave(self.orders.on_lease_over(grant_id), now),
            prefill.TIMEOUT: lambda grant_id, now: self._leave(self.orders.on_timeout(grant_id, now), now),
            decode.RENEW: self.grants.on_renew_due,
            decode.EXPIRE: lambda grant_id, now: self._on_outcomes((self.grants.on_expired(grant_id, now),), now),
            own_grants.OPEN: lambda agent, _: self.own_grants.on_retry_due(agent),
            restore.LOOKED: lambda _, now: self._on_looked(now),
            restore.EXPIRE: lambda grant_id, now: self._on_restored((self.restores.on_expired(grant_id, now),)),
            decode.CANCEL: lambda peer, _: self.grants.on_retry_due(peer),
            asks.RETRY: lambda peer, _: self.asks.retry(peer),
            attempts.FINISHED: lambda row, now: self.endings.cancel(self.attempts.on_finished_due(row), now),
            cache_news.NEWS: lambda _, __: self.news.publish(),
            cache_news.RESTATE: self.news.restate,
            RECOVERY: lambda _, __: self._release_recovered(),
            CHECK: lambda _, now: self.idle_check.on_due(now),
            # As for the next two: every wake looks.
            flushes.FLUSH: lambda _, __: None,
            turnover.LOOK: lambda _, __: None,
            absence.AWAY: lambda _, now: self.absence.on_due(now),
            worker_drain.DRAINED: lambda _, now: self.drain.on_due(now),
            # Nothing to do but wake: every wake reports the load.
            load_reports.LOAD: lambda _, __: None,
        }

    def _on_looked(self, now: float) -> None:
        self.restores.on_looked(now)
        self.admission.is_due = True

    def _on_worker_away(self, now: float) -> None:
        self.deaths.away_for_good(now)
        self.admission.is_due = True
        self.deadlines.set((pipeline.WORKER_LOST, ""), now + self.config.worker_lost_timeout_s)

    def _plan(self, now: float) -> None:
        self._admit(now)
        # A worker that is away is no client's fault.
        if self.pipeline.adopted is not None and len(self.queue):
            if (one := self.turnover.find(now)) is not None:
                self._make_room(one, now)
            if not len(self.running):
                # No step's result wakes it then.
                self.deadlines.set_default((turnover.LOOK, ""), now + turnover.WAIT_S)
        while self.pipeline.can_send:
            self._secure_pages(now)
            decoding, prefilling = self.running.decoding.values(), self.running.prefilling.values()
            num_steps = 1
            if (suspect := self.deaths.next_suspect()) is not None:
                # It must be alone in the worker, too: a death while another step is in flight would prove nothing.
                if self.pipeline.num_inflight:
                    break
                decoding, prefilling = self.running.alone(suspect)
            else:
                num_steps = self._num_consecutive()
            link, config, tokens = self.pipeline, self.config, self._step_tokens()
            steps, newest = list[Step](), link.newest
            while len(steps) < num_steps:
                step = compose_step(config, tokens, link.pace, decoding, prefilling, link.table, newest)
                if step is None:
                    break
                steps.append(newest := step)
                self.growth.stepped()
            if not steps:
                break
            link.send(steps, now)
            if self.running.prefilling:
                self._note_chunks(steps[0])
                self.running.on_step_sent(steps[0].sequences)
                self.admission.is_due = True
            self._steps_since_admission += len(steps)
            if self._steps_since_admission >= ADMIT_EVERY_STEPS:
                self.admission.is_due = True
            self._admit(now)
        if not len(self.running):
            self.growth.idle()

    def _num_consecutive(self) -> int:
        """How many steps the worker may be sent at once: 1 unless a batch decodes and nothing else is to be done.

        If more than 1, its rows have the pages for all of them from here on.
        What comes meanwhile waits for all of them, so those of all plans on their way may take `plan_horizon_s`.
        """
        horizon_s, rows = self.config.plan_horizon_s / self.config.pipeline_depth, self.running.decoding.values()
        is_busy = len(self.queue) or len(self.grants) or len(self.restores) or self.running.prefilling
        if not rows or is_busy or not horizon_s:
            return 1
        num_steps = self.pipeline.pace.steps_within(horizon_s, len(rows), MAX_STEPS)
        # Near its limit a row sits the later steps out, and then they are not the same rows.
        num_steps = min(num_steps, min(one.max_length - one.length for one in rows))
        # What looks back is drawn by what its last tokens were, which a device's step ahead does not know.
        if num_steps < 2 or len(rows) > self._step_tokens() or any(one.spec.sampling.looks_back for one in rows):
            return 1
        # Pages are placed by the first of them. Free and cached ones do: nobody who runs loses a page for this, since
        # `reserve` preempts nobody, and step by step they would have been taken within 10 ms anyway.
        size = self.config.page_size
        short = [one for one in rows if one.num_scheduled + num_steps > one.capacity]
        return num_steps if all(one.reserve(one.num_scheduled + num_steps, size) for one in short) else 1

    def _note_chunks(self, step: Step) -> None:
        starts, counts = step.column(RowColumn.START), step.column(RowColumn.COUNT)
        for sequence, start, count in zip(step.sequences, starts, counts, strict=True):
            # Rows of one token are output, which the gateway sees for itself.
            if count > 1:
                self.outbox.note(Noted.CHUNK, sequence.request_id, start, count)

    def _admit(self, now: float) -> None:
        if self.admission.is_due:
            self._steps_since_admission, step_tokens = 0, self._step_tokens()
            max_running = min(self.config.max_running, max(1, step_tokens - self.config.page_size))
            self.admission.admit(step_tokens, max_running, self._can_prefill, now)
        if (
            len(self.queue)
            and len(self.recovered)
            and not (len(self.running) or len(self.grants) or len(self.restores))
        ):
            # Waiting sequences need the pages of those that have not come back.
            self._release_recovered()

    def _release_recovered(self) -> None:
        self.recovered.release()
        self.deadlines.clear((RECOVERY, ""))
        self.admission.is_due = True

    def _make_room(self, sequence: Sequence, now: float) -> None:
        """Put a running sequence back for another client's."""
        if sequence.stage is Stage.HANDOFF:
            prefill = sequence.prefill
            self._on_outcomes((self.grants.revoke(sequence, now),), now)
            # Nothing has failed there: it may be ordered again.
            sequence.prefill = prefill
        elif self.running.leave(sequence, Stage.PREEMPTED):
            self.endings.put_back(sequence)
        self.admission.is_due = True
        self._admit(now)

    def _secure_pages(self, now: float) -> None:
        preempted, stuck = self.running.secure_pages()
        for sequence in preempted:
            # If a step in flight still writes its pages, the sequence is put back once that step is acknowledged.
            if not sequence.num_inflight:
                self.endings.put_back(sequence)
        self.admission.is_due |= bool(preempted)
        if stuck is not None:
            self._unstick(stuck, now)

    def _unstick(self, sequence: Sequence, now: float) -> None:
        """Free pages for the last running sequence, which has none for its next token, or wait for some to be freed."""
        if len(self.recovered):
            self._release_recovered()
        elif len(self.grants):
            # The youngest handoff has nothing yet but lent pages, and gives them back.
            self._on_outcomes((self.grants.revoke(self.grants.sequences()[-1], now),), now)
        elif len(self.restores):
            self.endings.give_up_restore(self.restores.sequences()[-1], now)
            self.admission.is_due = True
        elif not (len(self.orders) or self.own_grants.num_closing or sequence.num_inflight):
            # The missing pages can only be ones that it holds twice: it computed a prefix while another sequence
            # computed the same one, and its lock keeps those copies, too. Started again it holds each page once.
            if sequence.num_preemptions >= MAX_LONE_PREEMPTIONS:
                self.endings.fail(sequence, "preempted_for_good", "the pool cannot hold this request now", True, now)
            else:
                self.running.preempt(sequence)
                self.endings.put_back(sequence)
            self.admission.is_due = True

    def _step_tokens(self) -> int:
        limit = self.pipeline.adopted.max_batch_tokens if self.pipeline.adopted else 0
        return min(self.config.step_tokens, max(limit, self.config.page_size + 1)) if limit else self.config.step_tokens

    def _can_prefill(self, actor_id: str) -> bool:
        return actor_id in self._ready and actor_id != self.address.actor_id and self.config.agent in self._ready

    def _match_pages(self, sequence: Sequence) -> list[int]:
        return self.cache.match(sequence.reusable_ids, sequence.spec.extra_key).pages
