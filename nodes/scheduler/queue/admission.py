"""Which sequences may enter: page credit with the projected growth of running sequences.

    pages needed now + its growth + growth of all that run <= pages that are free or can be evicted

A sequence that is alone needs no credit beyond the pages for its known tokens: requests whose limit exceeds the pool
were refused with `never_fits`, so it always gets to its end.

A sequence enters in one of two ways. Prefilled here: as soon as the steps have room for its first chunk, not before,
so that it finds as much as possible in the cache; it also waits while a prompt that begins like it is being computed.
Prefilled elsewhere: its pages are lent to a grant at once, whatever room steps have. What the disk has of it is read
before, into pages that are lent likewise (`handoff/restore.py`); then it waits again. The queue is walked in order, up
to the first sequence that lacks credit; one that only waits for steps is skipped, and its pages are set aside.

After a scheduler's death, pages of its sequences are held for attempts that return (`kvstore/cache/rebuild.py`).

Pure; owned by the core.
"""

from collections.abc import Callable

from kvstore.cache.block_table import BlockTable
from kvstore.cache.prefix_cache import PrefixMatch
from nodes.scheduler.batch.growth import GrowthEstimate
from nodes.scheduler.books import Books
from nodes.scheduler.handoff.decode import DecodeHandoffQueue
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue
from nodes.scheduler.handoff.restore import RestoreQueue
from nodes.scheduler.queue.turnover import entered
from nodes.scheduler.sequence import Offer, Sequence, num_shared_tokens
from nodes.trace_notes import Noted

MAX_SKIPPED = 32
"""Each skipped one costs a lookup in the tree (274 µs for 10,000 tokens) at every admission; 2,048 may wait."""


class Credit:
    """Pages that can be promised during one round of admission."""

    __slots__ = ("_growth", "_num_available", "_num_promised", "_someone_runs")

    def __init__(self, growth: GrowthEstimate, num_available: int, running: list[Sequence]) -> None:
        self._growth = growth
        self._num_available = num_available
        self._num_promised = sum(map(growth.num_pages, running))
        self._someone_runs = bool(running)

    def take(self, sequence: Sequence, num_pages: int) -> bool:
        """Admit `sequence`, which allocates `num_pages` now. False: not enough credit, nothing changes."""
        if num_pages > self._num_available:
            return False
        growth = self._growth.num_pages(sequence)
        # Alone it may take all: `never_fits` has refused what exceeds the pool, so waiting to grow is never in vain.
        is_owed = sequence.share is not None and sequence.share.is_owed
        # Whoever was made room for does not wait until growth is provided for, too: others' pages are taken first.
        if self._someone_runs and not is_owed and num_pages + growth + self._num_promised > self._num_available:
            return False
        self._num_available -= num_pages
        self._num_promised += growth
        self._someone_runs = True
        return True

    def refresh(self, num_available: int) -> None:
        """Set the pages that are free or can be evicted now: a cached prefix that is held cannot be evicted."""
        self._num_available = num_available

    def set_aside(self, num_pages: int) -> None:
        """Keep so many pages for a sequence that goes first but cannot enter yet."""
        # So that short prompts behind a long one cannot take its pages one by one and starve it.
        self._num_promised += num_pages
        self._someone_runs = True


class Admission:
    """Moves waiting sequences into steps and handoffs.

    `lacks_pages`: the last walk ended at a sequence with too few pages for it.
    """

    def __init__(
        self, books: Books, grants: DecodeHandoffQueue, orders: PrefillHandoffQueue, restores: RestoreQueue
    ) -> None:
        self._books = books
        self._grants = grants
        self._orders = orders
        self._restores = restores
        self.lacks_pages = False
        self._noted = ""
        self.num_recomputed_tokens = 0

    def admit(self, step_tokens: int, max_running: int, can_prefill: Callable[[str], bool], now: float) -> None:
        """Admit what may enter; `can_prefill` says whether a prefill scheduler can be used. Called when it is due."""
        self._books.is_admission_due = self.lacks_pages = False
        if not len(self._books.queue) or self._books.num_entered >= max_running:
            return
        entered_already = [*self._books.running, *(loan.sequence for loan in self._books.loans.values())]
        credit = Credit(self._books.growth, self._books.cache.num_available(), entered_already)
        chunk_tokens = self._books.config.chunk_tokens
        room = step_tokens - self._books.running.num_prefill_tokens(chunk_tokens)
        num_skipped = 0
        for sequence in self._books.queue.order(now):
            if self._books.num_entered >= max_running or num_skipped > MAX_SKIPPED:
                return
            is_open = can_prefill(sequence.prefill)
            if room <= 0 and not is_open and sequence.offer is None:
                credit.set_aside(self._num_pages(sequence.num_tokens))
                num_skipped += 1
                continue
            match = self._books.cache.match(sequence.reusable_ids, sequence.spec.extra_key)
            num_left = sequence.num_tokens - match.num_tokens
            self._restores.look_again(sequence, now)
            # Passed over with its pages set aside, as one that waits for steps: those behind it may enter.
            if self._restores.must_wait(sequence, match.num_tokens, now):
                credit.set_aside(self._num_pages(num_left))
                num_skipped += 1
                continue
            if (offer := self._restores.offer(sequence, match.num_tokens, now)) is not None:
                # Credit for all of it, not for what is read: with the rest lacking, it would hold pages and wait.
                if not credit.take(sequence, self._num_pages(num_left)) or not self._restore(sequence, offer, now):
                    self._lack(sequence, self._num_pages(num_left))
                    return
                credit.refresh(self._books.cache.num_available())
                continue
            # By its uncached tokens, not by the prompt's length: a grant and a copy cost more than a short chunk here.
            is_elsewhere = is_open and num_left > self._books.config.local_prefill_max
            if not is_elsewhere and (room <= 0 or self._is_being_computed(sequence, match.num_tokens)):
                credit.set_aside(self._num_pages(num_left))
                num_skipped += 1
                continue
            num_pages = self._num_pages(num_left)
            if not credit.take(sequence, num_pages) or not self._enter(sequence, match, is_elsewhere, now):
                self._lack(sequence, num_pages)
                return
            credit.refresh(self._books.cache.num_available())
            # A prefill elsewhere takes pages here, but no part of a step.
            room -= 0 if is_elsewhere else min(num_left, chunk_tokens)

    def waits_for_prefix(self, sequence: Sequence, now: float) -> bool:
        """Whether a waiting sequence is passed over because what it begins with is being computed or restored."""
        num_cached = self._books.cache.match(sequence.reusable_ids, sequence.spec.extra_key).num_tokens
        return self._restores.must_wait(sequence, num_cached, now) or self._is_being_computed(sequence, num_cached)

    def _lack(self, sequence: Sequence, num_pages: int) -> None:
        self.lacks_pages = True
        # Once while it is the first: each step that frees pages tries again, a hundred times a second.
        if self._noted != sequence.request_id:
            self._noted = sequence.request_id
            self._books.outbox.note(Noted.NO_PAGES, sequence.request_id, num_pages, self._books.cache.num_available())

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._books.config.page_size)

    def _is_being_computed(self, sequence: Sequence, num_cached_tokens: int) -> bool:
        """Whether a running sequence computes more of the same prefix than is cached: it will be there in a moment."""
        page_size = self._books.config.page_size
        most = (len(sequence.reusable_ids) - 1) // page_size * page_size
        next_page = slice(num_cached_tokens, num_cached_tokens + page_size)
        if next_page.stop > most:
            return False
        wanted = sequence.token_ids[next_page]
        for other in self._books.running:
            # Of nearly all that run this one page tells that they go on otherwise, in 0.2 us: to search for where their
            # prefixes part takes 1.4 us at 123 tokens, for each that waits and each that runs.
            if other.token_ids[next_page] != wanted:
                continue
            # One that has decoded for a while is skipped: all its full pages are in the cache.
            if other.num_computed // page_size < other.num_tokens // page_size:
                num_shared = min(most, num_shared_tokens(sequence, other, page_size))
                if num_shared > num_cached_tokens and other.num_computed < num_shared:
                    return True
        return False

    def _restore(self, sequence: Sequence, offer: Offer, now: float) -> bool:
        """Lend pages for what the disk has; False if locking the cached prefix left too few, or less is cached now."""
        kv = self._start(sequence, None)
        end = offer.first + len(offer.slots)
        lent = kv.export(end * self._books.config.page_size) if len(kv.pages) == offer.first else None
        if lent is None:
            sequence.drop_pages()
            return False
        self._books.queue.remove(sequence)
        self._restores.open(sequence, lent, offer, now)
        return True

    def _start(self, sequence: Sequence, match: PrefixMatch | None) -> BlockTable:
        """Hold what is cached of it. Counted is a request's first look alone, as vLLM does.

        Later ones find what it has computed itself before it was preempted or its worker died, or what came from disk.
        """
        is_first, sequence.is_looked_up = not sequence.is_looked_up, True
        kv = self._books.cache.start(sequence.reusable_ids, sequence.spec.extra_key, match=match, is_counted=is_first)
        sequence.hold(kv)
        return kv

    def _enter(self, sequence: Sequence, match: PrefixMatch, is_elsewhere: bool, now: float) -> bool:
        """Take pages, of which `match` are cached; False if locking these left too few."""
        kv = None
        if len(self._books.recovered):
            kv = self._books.recovered.claim(sequence.reusable_ids, sequence.spec.extra_key)
        if kv is None:
            kv = self._start(sequence, match)
        else:
            sequence.hold(kv)
        lent, num_computed = None, kv.num_tokens
        if is_elsewhere:
            lent = kv.export(sequence.num_tokens)
        if lent is None and (is_elsewhere or not sequence.reserve(sequence.num_tokens, self._books.config.page_size)):
            sequence.drop_pages()
            return False
        self._books.queue.remove(sequence)
        if sequence.fate is not None:
            num_cached = num_computed // self._books.config.page_size
            sequence.fate.enter(num_cached, sequence.prefill if is_elsewhere else "")
        self._books.outbox.note(Noted.ADMITTED, sequence.request_id, num_computed, is_elsewhere)
        if sequence.entered_at < 0:
            sequence.entered_at = now
            # What is computed again is no more service.
            self._books.queue.shares.charge(sequence, sequence.num_tokens - num_computed)
        entered(sequence, num_computed)
        if sequence.share is not None:
            sequence.share.is_owed = False
        if sequence.num_preemptions or sequence.num_prior_outputs or sequence.has_made_room:
            # All its tokens but the last were computed before.
            self.num_recomputed_tokens += sequence.num_tokens - 1 - num_computed
        if lent is not None:
            self._grants.open(sequence, lent, now)
            return True
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = kv.num_cached_tokens
        self._books.running.enter(sequence)
        if sequence.order_id:
            self._orders.on_computed(sequence, now)
        return True
