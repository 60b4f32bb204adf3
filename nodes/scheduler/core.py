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
from mesh.runtime.effects import Answered, Asked, AskFailed, Told
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
from nodes.scheduler.batch.batching import compose_step
from nodes.scheduler.batch.step import Step
from nodes.scheduler.books import Books
from nodes.scheduler.cache_news import CacheNews
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.disk_news import DiskNews
from nodes.scheduler.events import (
    Command,
    DrainAsked,
    Event,
    FollowerReset,
    MembersChanged,
    MemoryWanted,
    PeerLost,
    ReadyPeer,
    Wake,
    WorkerDied,
)
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.finish.results import Results
from nodes.scheduler.finish.streams import Streams
from nodes.scheduler.flushes import Flushes
from nodes.scheduler.handoff import decode, own_grants, prefill, restore
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from nodes.scheduler.handoff.own_grants import OwnGrants
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.idle_check import CHECK, IdleCheck
from nodes.scheduler.load_reports import LoadReports
from nodes.scheduler.metrics import gauges, leaks
from nodes.scheduler.queue import turnover
from nodes.scheduler.queue.admission import Admission
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
        books = self.books = Books(config, address, pool, cache, recovered)
        self.streams = Streams(books.outbox)
        self.pipeline = Pipeline(books)
        self.own_grants = OwnGrants(books, grant_nonce)
        self.storing = PagesToStore(books)
        self.orders = PrefillHandoffQueue(books)
        self.restores = RestoreQueue(books, self.own_grants, self.storing)
        self.endings = Endings(books, self.orders, self.streams)
        self.results = Results(books, self.orders, self.streams, self.endings)
        self.grants = DecodeHandoffQueue(books, self.own_grants, self.results)
        self.deaths = WorkerDeaths(books, self.results, self.endings)
        self.admission = Admission(books, self.grants, self.orders, self.restores)
        self.turnover = Turnover(books, self.admission.waits_for_prefix)
        self.flushes = Flushes(books, lambda: self.is_drained and not len(books.recovered), self.grants.cancels.hurry)
        self.absence = WorkerAbsence(books, self.pipeline)
        self.handlers = RpcHandlers(
            books, self.orders, self.restores, self.streams, self.endings, self.deaths, self.absence, self.flushes
        )
        self.drain = WorkerDrain(books, self.orders, self.endings)
        self.disk_news = DiskNews(books)
        self.news = CacheNews(books, self.disk_news.begin)
        self.idle_check = IdleCheck(books)
        self.load_reports = LoadReports(books)
        self._ready: dict[str, ReadyPeer] = {}
        self._is_announced, self._steps_since_admission = False, 0
        self._on_due = self._due()

    # what the actor calls

    def start(self, now: float) -> list[Command]:
        """Begin to take over the worker; everything else waits for that."""
        self.pipeline.adopt(now)
        if len(self.books.recovered):
            self.books.deadlines.set((RECOVERY, ""), now + self.books.config.lease_s)
        return self.books.outbox.take()

    def next_deadline(self) -> float | None:
        return self.books.deadlines.next()

    @property
    def is_drained(self) -> bool:
        """Nothing is left that anyone waits for. Finished attempts may still be sent again, but need no more work."""
        return not (
            len(self.books.attempts) - self.books.attempts.num_finished
            or len(self.orders)
            or len(self.books.queue)
            or self.books.loans
            or self.pipeline.is_computing
        )

    def stats(self) -> dict[str, float]:
        return gauges(self)

    def assert_idle(self) -> None:
        """For tests: nothing is held. Raises AssertionError that names everything that is."""
        found = leaks(self)
        assert not found, f"{self.books.address} holds " + ", ".join(found)

    def handle(self, event: Event, now: float) -> list[Command]:
        self.streams.now = now
        # Before the others, which are looked for one by one: nearly every second event is one.
        if isinstance(event, Wake):
            self._wake(now)
            return self.books.outbox.take()
        self.idle_check.interrupt()
        match event:
            case Told():
                self._on_told(event.sender, event.message, now)
            case Asked():
                self.handlers.on_ask(event, now)
                self.books.is_admission_due = True
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
                self.endings.abort_all(MEMORY_RELEASED, "the memory of this group is released", now)
            case DrainAsked():
                self.handlers.is_draining = True
                self.books.outbox.add(
                    self.pipeline.announcement("draining", worker_ready=self.pipeline.adopted is not None)
                )
            case _:
                assert_never(event)
        return self.books.outbox.take()

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
                    self.own_grants.on_pulled(pulled, now)
                for failed in message.failed:
                    self.orders.on_transfer_failed(failed, now)
                    self.own_grants.on_transfer_failed(failed, now)
            case StoreChanged():
                self.news.disk_changed(now)
            case PrefillNews():
                self.grants.on_news(sender, message, now)
            case Resend():
                self.handlers.on_resend(sender, message, now)
            case StopAt():
                self.handlers.on_stop(message, now)
                self.books.is_admission_due = True
            case _:
                # A message for another role, or of a newer protocol: nothing here depends on it.
                return

    def _on_results(self, sender: Address, results: Iterable[StepResult], now: float) -> None:
        for result in results:
            if (step := self.pipeline.on_result(sender, result, now)) is not None:
                self.results.acknowledge(step, now)
        self.results.tell()

    def _on_answer(self, event: Answered, now: float) -> None:
        subject, message = event.tag[1], event.message
        if isinstance(message, Adopted):
            if (adopted := self.pipeline.take_adopted(event.tag, message, now)) is not None:
                self._on_adopted(adopted, now)
        elif isinstance(message, GrantsOpened):
            self.own_grants.on_opened(subject, message, now)
        elif isinstance(message, StoredFound):
            self.restores.on_found(subject, message)
        elif isinstance(message, StoredPagesListed):
            # What is still gathered goes first: `CacheCleared` of a start, 50 ms late, took back what the disk has.
            self.news.publish()
            self.disk_news.on_listed(event.tag, message)
        elif isinstance(message, PrefillsOrdered):
            self.grants.on_ordered(subject, message, now)
        elif isinstance(message, GrantClosed):
            self.own_grants.on_closed(subject, message)
        elif isinstance(message, PrefillCancelled):
            self.grants.on_cancelled(message)

    def _on_ask_failed(self, event: AskFailed, now: float) -> None:
        kind, subject = event.tag
        if kind in (pipeline.ADOPT[0], own_grants.CLOSE, disk_news.LIST):
            self.books.asks.failed((event.tag,), now)
        elif kind == own_grants.OPEN:
            self.own_grants.on_ask_failed(subject, event.code, now)
        elif kind == restore.FIND:
            self.restores.on_find_failed(subject)
        else:
            self.grants.on_ask_failed(event.tag, event.code, now)

    def _on_adopted(self, adopted: Adopted, now: float) -> None:
        self.absence.over()
        before = self.books.numerics
        self.deaths.take_back(self.pipeline.on_adopted(adopted, now), now)
        if before != adopted.numerics:
            self.restores.on_other_numerics(self.books.queue)
            self.disk_news.begin(now)
        # The first worker makes this scheduler ready; a draining one stays so.
        state = None if self._is_announced else "ready"
        self.books.outbox.add(self.pipeline.announcement(state, worker_ready=True))
        self._is_announced = self.books.is_admission_due = True

    def _on_peer_lost(self, peer: Address, now: float) -> None:
        if peer.actor_id in self.books.config.ranks:
            self.pipeline.on_worker_lost(peer, now)
            if self.pipeline.adopted is None:
                self.books.outbox.add(self.pipeline.announcement(None, worker_ready=False))
        for sequence in self.books.attempts.of_gateway(peer):
            self.endings.cancel(sequence, now)
        self.streams.on_lost(peer, self.books.attempts)
        self.orders.on_holder_lost(peer, now)
        self.own_grants.on_peer_lost(peer.actor_id, now)
        self.books.is_admission_due = True

    def _on_members(self, event: MembersChanged, now: float) -> None:
        for actor_id, peer in event.ready.items():
            known = self._ready.get(actor_id)
            if known is None or known.epoch != peer.epoch:
                # A new incarnation knows nothing of what its predecessor was asked: its answer would never come.
                self.books.asks.retry_now(actor_id)
                self.grants.cancels.retry_now(actor_id)
                self.own_grants.opens.retry_now(actor_id)
        self._ready = dict(event.ready)
        self.storing.on_members(self._ready)
        self.absence.on_members(self._ready)
        self.drain.on_members(event, now)
        self.handlers.is_worker_drained = self.drain.is_drained
        self.pipeline.on_members(self._ready, now)
        self.streams.on_members(self._ready, self.books.attempts)
        self.books.is_admission_due = True

    # time and steps

    def _wake(self, now: float) -> None:
        while (key := self.books.deadlines.pop_due(now)) is not None:
            self._on_due[key[0]](key[1], now)
        self._plan(now)
        self.flushes.settle(now)
        self.own_grants.flush()
        self.grants.flush()
        self.restores.flush(now)
        self.orders.flush()
        self.streams.flush()
        if self.idle_check.tell():
            self.books.outbox.add(self.pipeline.announcement(None, worker_ready=self.pipeline.adopted is not None))
        self.news.gather(now)
        self.storing.flush()
        self.load_reports.report(now)
        # Without a handle on pages nothing changes their books but events, which interrupt it.
        self.idle_check.look(is_idle=self.is_drained and not self.books.cache.num_sequences, now=now)

    def _due(self) -> dict[str, Callable[[str, float], None]]:
        """Handlers of due deadlines by kind; each is called with the deadline's subject and the time."""
        return {
            pipeline.REPEAT: lambda _, now: self.pipeline.on_repeat_due(now),
            pipeline.WORKER_LOST: lambda _, now: self._on_worker_away(now),
            prefill.ANNOUNCE: self.orders.on_repeat_due,
            prefill.LEASE: self.orders.on_lease_over,
            prefill.TIMEOUT: self.orders.on_timeout,
            decode.RENEW: self.grants.on_renew_due,
            own_grants.OPEN: lambda agent, _: self.own_grants.opens.retry(agent),
            own_grants.EXPIRE: self.own_grants.on_expired,
            restore.LOOKED: lambda _, now: self.restores.on_looked(now),
            decode.CANCEL: lambda peer, _: self.grants.cancels.retry(peer),
            asks.RETRY: lambda peer, _: self.books.asks.retry(peer),
            attempts.FINISHED: lambda row, now: self.endings.cancel(self.books.attempts.on_finished_due(row), now),
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

    def _on_worker_away(self, now: float) -> None:
        self.deaths.away_for_good(now)
        self.books.is_admission_due = True
        self.books.deadlines.set((pipeline.WORKER_LOST, ""), now + self.books.config.worker_lost_timeout_s)

    def _plan(self, now: float) -> None:
        self._admit(now)
        # A worker that is away is no client's fault.
        if self.pipeline.adopted is not None and len(self.books.queue):
            if (one := self.turnover.find(now)) is not None:
                self._make_room(one, now)
            if not len(self.books.running):
                # No step's result wakes it then.
                self.books.deadlines.set_default((turnover.LOOK, ""), now + turnover.WAIT_S)
        while self.pipeline.can_send:
            self._secure_pages(now)
            decoding, prefilling = self.books.running.decoding.values(), self.books.running.prefilling.values()
            num_steps = 1
            if (suspect := self.deaths.next_suspect()) is not None:
                # It must be alone in the worker, too: a death while another step is in flight would prove nothing.
                if self.pipeline.num_inflight:
                    break
                decoding, prefilling = self.books.running.alone(suspect)
            else:
                num_steps = self._num_consecutive()
            link, config, tokens = self.pipeline, self.books.config, self._step_tokens()
            steps, newest = list[Step](), link.newest
            while len(steps) < num_steps:
                step = compose_step(config, tokens, link.pace, decoding, prefilling, link.table, newest)
                if step is None:
                    break
                steps.append(newest := step)
                self.books.growth.stepped()
            if not steps:
                break
            link.send(steps, now)
            if self.books.running.prefilling:
                self._note_chunks(steps[0])
                self.books.running.on_step_sent(steps[0].sequences)
                self.books.is_admission_due = True
            self._steps_since_admission += len(steps)
            if self._steps_since_admission >= ADMIT_EVERY_STEPS:
                self.books.is_admission_due = True
            self._admit(now)
        if not len(self.books.running):
            self.books.growth.idle()

    def _num_consecutive(self) -> int:
        """How many steps the worker may be sent at once: 1 unless a batch decodes and nothing else is to be done.

        If more than 1, its rows have the pages for all of them from here on.
        What comes meanwhile waits for all of them, so those of all plans on their way may take `plan_horizon_s`.
        """
        horizon_s, rows = (
            self.books.config.plan_horizon_s / self.books.config.pipeline_depth,
            self.books.running.decoding.values(),
        )
        is_busy = len(self.books.queue) or self.books.loans or self.books.running.prefilling
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
        size = self.books.config.page_size
        short = [one for one in rows if one.num_scheduled + num_steps > one.capacity]
        return num_steps if all(one.reserve(one.num_scheduled + num_steps, size) for one in short) else 1

    def _note_chunks(self, step: Step) -> None:
        starts, counts = step.column(RowColumn.START), step.column(RowColumn.COUNT)
        for sequence, start, count in zip(step.sequences, starts, counts, strict=True):
            # Rows of one token are output, which the gateway sees for itself.
            if count > 1:
                self.books.outbox.note(Noted.CHUNK, sequence.request_id, start, count)

    def _admit(self, now: float) -> None:
        if self.books.is_admission_due:
            self._steps_since_admission, step_tokens = 0, self._step_tokens()
            max_running = min(self.books.config.max_running, max(1, step_tokens - self.books.config.page_size))
            self.admission.admit(step_tokens, max_running, self._can_prefill, now)
        if len(self.books.queue) and len(self.books.recovered) and not self.books.num_entered:
            # Waiting sequences need the pages of those that have not come back.
            self._release_recovered()

    def _release_recovered(self) -> None:
        self.books.recovered.release()
        self.books.deadlines.clear((RECOVERY, ""))
        self.books.is_admission_due = True

    def _make_room(self, sequence: Sequence, now: float) -> None:
        """Put a running sequence back for another client's."""
        if sequence.stage is Stage.HANDOFF:
            prefill = sequence.prefill
            self.books.take_back(sequence, now)
            # Nothing has failed there: it may be ordered again.
            sequence.prefill = prefill
        elif self.books.running.leave(sequence, Stage.PREEMPTED):
            self.books.put_back(sequence)
        self.books.is_admission_due = True
        self._admit(now)

    def _secure_pages(self, now: float) -> None:
        preempted, stuck = self.books.running.secure_pages()
        for sequence in preempted:
            # If a step in flight still writes its pages, the sequence is put back once that step is acknowledged.
            if not sequence.num_inflight:
                self.books.put_back(sequence)
        self.books.is_admission_due |= bool(preempted)
        if stuck is not None:
            self._unstick(stuck, now)

    def _unstick(self, sequence: Sequence, now: float) -> None:
        """Free pages for the last running sequence, which has none for its next token, or wait for some to be freed."""
        if len(self.books.recovered):
            self._release_recovered()
        elif lent := self.books.lent(Stage.HANDOFF) or self.books.lent(Stage.RESTORE):
            # The youngest handoff has nothing yet but lent pages, and gives them back.
            self.books.take_back(lent[-1], now)
        elif not (len(self.orders) or self.own_grants.num_closing or sequence.num_inflight):
            # The missing pages can only be ones that it holds twice: it computed a prefix while another sequence
            # computed the same one, and its lock keeps those copies, too. Started again it holds each page once.
            if sequence.num_preemptions >= MAX_LONE_PREEMPTIONS:
                self.endings.fail(sequence, "preempted_for_good", "the pool cannot hold this request now", True, now)
            else:
                self.books.running.preempt(sequence)
                self.books.put_back(sequence)
            self.books.is_admission_due = True

    def _step_tokens(self) -> int:
        limit = self.pipeline.adopted.max_batch_tokens if self.pipeline.adopted else 0
        return (
            min(self.books.config.step_tokens, max(limit, self.books.config.page_size + 1))
            if limit
            else self.books.config.step_tokens
        )

    def _can_prefill(self, actor_id: str) -> bool:
        return (
            actor_id in self._ready
            and actor_id != self.books.address.actor_id
            and self.books.config.agent in self._ready
        )
