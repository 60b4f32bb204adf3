"""Pages of a prompt that this host's disk has: read into the pool before the rest of the prompt is computed.

    look     when a sequence arrives, the agent is asked which pages of it are stored; it waits for `LOOK_S` at most
    wait     another one reads what it begins with, too, or as many are read as may be: it stays in the queue
    open     pages for exactly what is stored are lent to a grant, whose source is the agent's store
    end      what came is cached. The sequence goes back to the queue, where it matches more than before, and the rest
             is computed here or elsewhere as ever

Read is only what is read sooner than computed, by the rates of both as they have been of late. What could not be read
is computed: a sequence looks when it arrives, and again when it comes back after its pages were needed by others, but
not after a failure. The agent may write the pages from the asking on, so those that did not come are quarantined until
it says that the grant is closed. Pure; owned by the core.
"""

import math
from collections.abc import Iterable
from typing import Final

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import FindStored, PagesPulled, StoredFound, StoredPages, StoredPrompt
from nodes.scheduler.asks import ASK_TIMEOUT_S, BatchedAsks
from nodes.scheduler.books import Books
from nodes.scheduler.fates import DEARER, LATE, NO_STORE, NO_WORKER, SHORT, Fates
from nodes.scheduler.handoff.own_grants import DEADLINE, OwnGrants
from nodes.scheduler.loans import Lender, Loan
from nodes.scheduler.rates import LearnedRate
from nodes.scheduler.sequence import Offer, Sequence, Stage, num_shared_tokens
from nodes.scheduler.storing import PagesToStore
from nodes.trace_notes import Noted

FIND: Final = "find_stored"
LOOKED: Final = "looked"
LOOK_S: Final = 0.005
"""An ask of an agent that is not busy takes half a millisecond; what takes longer is not worth each request's time."""
MAX_RESTORES: Final = 16
"""A disk is no faster with more; those behind them find in the cache what these have read."""
LEAST_S: Final = 1.0
"""A restore gets at least so long: a disk that is busy for a moment is quicker again than what a failure costs."""
UNKNOWN_S: Final = 10.0
"""And so long while nobody knows how long computing takes; then twice that time."""
AGAIN_S: Final = 60.0
"""After so long a disk that was slower than computing is tried once more: what made it slow may be over."""
TRIAL_S: Final = 0.02
"""Then with as many pages as it would have read in so long, at least one: who asks waits for what is likely in vain."""
TRIAL_TIMEOUT_S: Final = 0.1
"""A page that takes longer than this is one of a disk that is still slow."""
_NO_MORE: Final = 1 << 30
"""Looks, more than any sequence has: it does not look again."""


class _Restore(Loan):
    """A restore that is under way."""

    __slots__ = ("offer",)

    def __init__(
        self, lender: "Lender[_Restore]", sequence: Sequence, lent: ExportedPages, now: float, timeout_s: float,
        offer: Offer,
    ) -> None:  # fmt: skip
        super().__init__(lender, sequence, lent, now, timeout_s)
        self.offer = offer


class RestoreQueue:
    """Restores of one scheduler, and sequences for which its agent is asked.

    Pages of the worker's numerics now alone are good here. `storing` is told of pages that have come from the disk and
    need not be stored again.
    """

    def __init__(self, books: Books, own: OwnGrants, storing: PagesToStore) -> None:
        self._books = books
        self._own = own
        self._storing = storing
        self.fates = Fates(books.address.actor_id, books.config.page_size)
        self._asks = BatchedAsks[StoredPrompt](
            FIND,
            books.outbox,
            ASK_TIMEOUT_S,
            lambda prompts: FindStored(group=books.config.group, numerics=books.numerics, prompts=prompts),
            lambda prompt: len(prompt.hashes) + 64,
        )
        self._fresh: dict[str, StoredPrompt] = {}
        self._looking: dict[str, tuple[Sequence, int]] = {}
        self._restores: dict[str, _Restore] = {}
        self._tried_at = -math.inf
        self.reads = LearnedRate()
        self.num_queried = self.num_found = self.num_restored = 0
        self.num_done = self.num_failed = self.num_dearer = 0

    def look_again(self, sequence: Sequence, now: float) -> None:
        """As `look`, for one that was put back and has not looked since: others may have taken its pages."""
        if sequence.num_looks < 1 + sequence.num_preemptions + sequence.has_made_room:
            self.look(sequence, now)

    def look(self, sequence: Sequence, now: float) -> None:
        """A sequence has arrived: have the agent asked for what is not cached of it."""
        sequence.num_looks += 1
        page_size, token_ids = self._books.config.page_size, sequence.reusable_ids
        if sequence.fate is None:
            fates, is_order = self.fates, bool(sequence.order_id)
            sequence.fate = fates.begin(sequence.request_id, sequence.attempt, is_order=is_order)
        fate = sequence.fate
        if not self._books.config.stores or not self._books.numerics:
            why = NO_WORKER if self._books.config.stores else NO_STORE
            fate.asks(0, max(0, len(token_ids) - 1) // page_size, why)
            return
        num_cached, hashes = self._books.cache.uncached(token_ids, sequence.spec.extra_key)
        computing_s = self._books.prefills.seconds(len(hashes) * page_size)
        # Computing it would be over before an answer is waited for at all.
        is_short = computing_s is not None and computing_s <= LOOK_S
        fate.asks(num_cached, len(hashes), SHORT if is_short else LATE)
        if not hashes or is_short:
            return
        if not self._num_worth_reading(len(hashes), now)[0]:
            # Whatever the disk has of it: an answer that changes nothing is not waited for.
            fate.asks(num_cached, len(hashes), DEARER)
            self._note_dearer(sequence, len(hashes))
            return
        # Not the row alone: it may look again before an answer comes, which would then be taken for that of the second
        # ask, and its slots for those of pages further on.
        name = f"{sequence.row_id}.{sequence.num_looks}"
        self._looking[name] = sequence, num_cached
        self._fresh[name] = StoredPrompt(name=name, hashes=b"".join(hashes))
        self.num_queried += len(hashes)
        # Counted from when the ask leaves: the time of an event is when its turn of the loop began, which on a busy
        # machine may be longer ago than all of the wait.
        sequence.looks_until = math.inf

    def on_found(self, number: str, message: StoredFound) -> None:
        """The agent has answered ask `number`. Even if that is late: what still waits may be restored."""
        self._books.is_admission_due = True
        found = {prompt.name: prompt for prompt in message.found}
        for name, _ in self._asks.answered(number, found, {}):
            if (looking := self._looking.pop(name, None)) is None:
                continue
            sequence, first = looking
            sequence.looks_until = 0.0
            prompt = found.get(name)
            if prompt is not None and sequence.fate is not None:
                sequence.fate.answered(len(prompt.slots), prompt.missed, is_mixed=self._storing.is_mixed)
            if prompt is not None and prompt.slots:
                self.num_found += len(prompt.slots)
                sequence.offer = Offer(message.source, message.incarnation, first, prompt.slots, prompt.sequences)
            num_found = 0 if prompt is None else len(prompt.slots)
            self._books.outbox.note(Noted.FOUND, sequence.request_id, num_found, first)

    def on_find_failed(self, number: str) -> None:
        self._books.is_admission_due = True
        for name in self._asks.failed(number):
            if (looking := self._looking.pop(name, None)) is not None:
                looking[0].looks_until = 0.0
                if looking[0].fate is not None:
                    looking[0].fate.unanswered()

    def on_other_numerics(self, waiting: Iterable[Sequence]) -> None:
        """Another worker computes otherwise than the one for which was looked: its pages would have other bits."""
        for sequence in waiting:
            sequence.offer = None
        for sequence, _ in self._looking.values():
            sequence.looks_until = 0.0
        # Answers to what was asked for the worker before name nobody any more.
        self._looking.clear()
        self._fresh.clear()

    def on_looked(self, now: float) -> None:
        """The longest wait for an answer is over for some; the others have their own."""
        self._books.is_admission_due = True
        later = [one.looks_until for one, _ in self._looking.values() if now < one.looks_until < math.inf]
        if later:
            self._books.deadlines.set((LOOKED, ""), min(later))

    def must_wait(self, sequence: Sequence, num_cached: int, now: float) -> bool:
        """Whether more than `num_cached` tokens of a waiting sequence may be cached in a moment."""
        if now < sequence.looks_until:
            return True
        page_size = self._books.config.page_size
        for restore in self._restores.values():
            end = (restore.offer.first + len(restore.offer.slots)) * page_size
            # Cheapest first: comparing two prompts takes 10 us.
            if end > num_cached and min(end, num_shared_tokens(sequence, restore.sequence, page_size)) > num_cached:
                return True
        is_full = len(self._restores) >= MAX_RESTORES
        return is_full and self.offer(sequence, num_cached, now) is not None

    def offer(self, sequence: Sequence, num_cached: int, now: float) -> Offer | None:
        """What is stored of a sequence beyond its `num_cached` tokens, if reading that is quicker than computing it."""
        offer, page_size = sequence.offer, self._books.config.page_size
        if offer is None:
            return None
        # More may be cached than when it arrived, or less: then what is stored does not continue what is there.
        skipped = num_cached // page_size - offer.first
        if not 0 <= skipped < len(offer.slots):
            return None
        num_pages, is_trial = self._num_worth_reading(len(offer.slots) - skipped, now)
        if num_pages < len(offer.slots) - skipped and sequence.fate is not None:
            sequence.fate.unread(DEARER)
        if not num_pages:
            self._note_dearer(sequence, len(offer.slots) - skipped)
            return None
        kept = slice(skipped, skipped + num_pages)
        slots, sequences = offer.slots[kept], offer.sequences[kept]
        return Offer(offer.source, offer.incarnation, offer.first + skipped, slots, sequences, is_trial)

    def open(self, sequence: Sequence, lent: ExportedPages, offer: Offer, now: float) -> None:
        """Have pages of `offer` read into those that are lent."""
        assert sequence.kv is not None, "pages are lent"
        # One message brings both the grant and what to read into it: from then on a copy may write.
        sequence.kv.mark_in_flight()
        sequence.stage, sequence.offer = Stage.RESTORE, None
        computing_s = self._books.prefills.seconds(len(lent.pages) * self._books.config.page_size)
        timeout_s = UNKNOWN_S if computing_s is None else max(LEAST_S, 2 * computing_s)
        timeout_s = TRIAL_TIMEOUT_S if offer.is_trial else min(timeout_s, self._books.config.handoff_timeout_s)
        restore = _Restore(self, sequence, lent, now, timeout_s, offer)
        stored = StoredPages(
            source=offer.source, incarnation=offer.incarnation, slots=offer.slots, sequences=offer.sequences
        )
        self._own.lend(restore, now, stored)
        self._restores[restore.grant_id] = restore
        self._tried_at = now
        self._books.outbox.note(Noted.RESTORING, sequence.request_id, len(lent.pages), offer.first)

    def on_open(self, loan: _Restore, now: float) -> None:
        """Nothing follows: the ask for the grant says what is to be read into it."""

    def on_pulled(self, loan: _Restore, message: PagesPulled, now: float) -> None:
        if not loan.is_pulled:
            return
        sequence, page_size = loan.sequence, self._books.config.page_size
        assert sequence.kv is not None, "pages are lent"
        # By the grant, not by the message: an end may be told without the count that came before it.
        loan.num_pulled = len(loan.lent.pages)
        first, end = loan.offer.first, loan.offer.first + loan.num_pulled
        sequence.kv.commit_first(sequence.token_ids[first * page_size : end * page_size])
        sequence.drop_pages()
        self._own.has_all(loan)
        self.num_done += 1
        self._observe(loan, now)
        self._end(loan)
        self._books.put_back(sequence)

    def fail(self, loan: _Restore, code: str, now: float) -> None:
        """What came is cached: the sequence waits again."""
        self.give_up(loan, code, now)
        self._books.put_back(loan.sequence)

    def give_up(self, loan: _Restore, code: str, now: float) -> None:
        self._own.take_back(loan, idle=False)
        self.num_failed += 1
        # What failed would most likely fail again, and cost this request the wait once more.
        loan.sequence.num_looks = _NO_MORE
        if loan.sequence.fate is not None:
            loan.sequence.fate.unread(code)
        if code == DEADLINE:
            # A disk that reads nothing in time is the slowest. Of what else fails the time says nothing about the disk.
            self._observe(loan, now)
        self._end(loan)

    def flush(self, now: float) -> None:
        if self._fresh:
            fresh, self._fresh = self._fresh, {}
            for name in fresh:
                self._looking[name][0].looks_until = now + LOOK_S
            self._books.deadlines.set_default((LOOKED, ""), now + LOOK_S)
            self._asks.ask(self._books.config.agent, fresh)

    def gauges(self) -> dict[str, float]:
        if not self._books.config.stores:
            return {}
        return {
            "mesh_scheduler_num_restores": len(self._restores),
            "mesh_scheduler_store_queried_pages_total": self.num_queried,
            "mesh_scheduler_store_found_pages_total": self.num_found,
            "mesh_scheduler_restored_pages_total": self.num_restored,
            # In tokens, for the names that dashboards know from vLLM.
            "mesh_scheduler_store_query_tokens_total": self.num_queried * self._books.config.page_size,
            "mesh_scheduler_store_hit_tokens_total": self.num_restored * self._books.config.page_size,
            'mesh_scheduler_restores_total{outcome="done"}': self.num_done,
            'mesh_scheduler_restores_total{outcome="failed"}': self.num_failed,
            'mesh_scheduler_restores_total{outcome="dearer"}': self.num_dearer,
            "mesh_scheduler_restored_pages_per_second": self.reads.per_second,
            "mesh_scheduler_prefilled_tokens_per_second": self._books.prefills.per_second,
        }

    # inside

    def _observe(self, restore: _Restore, now: float) -> None:
        if restore.offer.is_trial:
            # A few pages would be lost in the many that were slow a minute ago.
            self.reads = LearnedRate()
        self.reads.observe(restore.num_pulled, now - restore.opened_at)

    def _note_dearer(self, sequence: Sequence, num_pages: int) -> None:
        sequence.offer = None
        self.num_dearer += 1
        self._books.outbox.note(Noted.DEARER, sequence.request_id, num_pages, 0)

    def _num_worth_reading(self, num_pages: int, now: float) -> tuple[int, bool]:
        """How many of so many pages are to be read; and whether to try a disk that was slower than computing."""
        reading_s = self.reads.seconds(num_pages)
        computing_s = self._books.prefills.seconds(num_pages * self._books.config.page_size)
        if computing_s is None:
            # The next prefill tells it. What is behind a prompt's stored pages may be too short for one: were they all
            # read each time, a slow disk would be read for ever (at 1 MB/s each took ten times as long as computing).
            return num_pages - (reading_s is not None), False
        if reading_s is None or reading_s < computing_s:
            return num_pages, False
        if now - self._tried_at < AGAIN_S:
            return 0, False
        return min(num_pages, max(1, int(TRIAL_S * self.reads.per_second))), True

    def _end(self, restore: _Restore) -> None:
        self._own.end(restore)
        del self._restores[restore.grant_id]
        self.num_restored += restore.num_pulled
        sequence = restore.sequence
        sequence.num_restored += restore.num_pulled * self._books.config.page_size
        if sequence.fate is not None:
            sequence.fate.restored(restore.offer.first, restore.num_pulled)
        self._storing.are_stored(restore.lent.pages[: restore.num_pulled])
        self._books.outbox.note(Noted.RESTORED, sequence.request_id, restore.num_pulled, len(restore.lent.pages))
