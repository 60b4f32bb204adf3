"""Prefill's side of a handoff: orders, pages announced as chunks finish, and how long they are kept.

    QUEUED    in the waiting queue like any request
    RUNNING   pages are announced to the destination's agent as soon as they are full
    DRAWN     all pages are announced, `PrefillDone` is told; pages are kept
    FAILED    `PrefillFailed` is told; pages are given back at once
    gone      cancelled by its holder (the normal end), the holder lost, or a lease without a sign of life

All that a turn brings for one peer goes in one message: pages that a chunk filled and those that became full with the
token are one announcement, and one copy for the agent.

Tells may be lost, so unacknowledged ones are repeated: the announcement as a whole (an index already copied is
acknowledged again, to both schedulers), and the result until the holder cancels. Signs of life are the holder's
renewals and the agent's progress. A cancelled grant id is remembered for a while, in case its order arrives after its
cancellation. Pure; owned by the core.
"""

from collections import OrderedDict
from typing import Final

from kvstore.protocol import AnnouncePages, PagesPulled, PagesReady, TransferFailed
from mesh.address import Address
from mesh.calls.batches import cut
from nodes.protocol import PrefillDone, PrefillFailed, PrefillNews, PrefillOrder
from nodes.scheduler.books import Books
from nodes.scheduler.sequence import Sequence
from nodes.trace_notes import Noted

ANNOUNCE: Final = "announce"
LEASE: Final = "order_lease"
TIMEOUT: Final = "order_timeout"
UNKNOWN_GRANT: Final = "unknown_grant"
MAX_REMEMBERED: Final = 4096
"""Four times `max_orders`: an order that its cancel has overtaken comes within milliseconds, before so many others."""
ANNOUNCE_REPEAT_S: Final = 0.5
"""Longer than most copies take, so that little is told twice; a lost announcement costs its request this long."""
MAX_REPEAT_FACTOR: Final = 8
"""A peer that is away is sent one frame every 4 s (8 times `ANNOUNCE_REPEAT_S`) for each of 1,024 orders."""
# Size of an announcement or a result on the wire, without its pages, which take up to 10 bytes each.
_ITEM_BYTES: Final = 512


class _Order:
    __slots__ = (
        "agent",
        "grant_id",
        "holder",
        "num_announced",
        "num_pulled",
        "num_skip_pages",
        "repeat_s",
        "result",
        "sequence",
        "total",
    )

    def __init__(self, holder: Address, message: PrefillOrder, sequence: Sequence, page_size: int) -> None:
        self.grant_id = message.grant_id
        self.holder = holder
        self.agent = message.agent
        # Tells are lost on a dead link, so the result outlives the pages: it is repeated until the holder cancels.
        # None once the pages are given back; then only the result is kept.
        self.sequence: Sequence | None = sequence
        self.num_skip_pages = message.num_skip_tokens // page_size
        # Rounded up: the last page is announced although it is partly filled, because decode goes on in the middle of
        # it.
        self.total = -(-sequence.num_tokens // page_size) - self.num_skip_pages
        self.num_announced = 0
        self.num_pulled = 0
        self.result: PrefillDone | PrefillFailed | None = None
        self.repeat_s = 0.0


class PrefillHandoffQueue:
    """Prefills that other schedulers ordered from this one."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._layout_digest = books.pool.layout.digest
        self._orders: dict[str, _Order] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        # To be told at the end of the turn. By agent and grant: the span of pages; by holder and grant: the result.
        self._fresh_pages: dict[str, dict[str, tuple[int, int]]] = {}
        self._fresh_results: dict[str, dict[str, PrefillDone | PrefillFailed]] = {}
        self.num_done = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, grant_id: str) -> bool:
        return grant_id in self._orders

    def refusal(self, message: PrefillOrder) -> str | None:
        """The error code if an order cannot be taken."""
        page_size, num_tokens, num_skip = self._books.config.page_size, len(message.token_ids), message.num_skip_tokens
        # Cancel and order are separate asks, so a repeated order may arrive after its cancel. Computing it would fill
        # pages for a grant that is closed, until the lease (10 s) frees them.
        if message.grant_id in self._gone:
            return "cancelled"
        # Checked before anything is allocated: these numbers become page indices, and a peer may run another version.
        # A vector is made where its attempt is.
        is_odd = num_skip % page_size or not 0 <= num_skip < num_tokens or message.spec.is_vector
        if is_odd or not 0 < message.num_prompt_tokens <= num_tokens:
            return "bad_order"
        return "overloaded" if len(self._orders) >= self._books.config.max_orders else None

    def renew(self, holder: Address, message: PrefillOrder, now: float) -> None:
        order = self._orders[message.grant_id]
        order.holder = holder
        self._renew(order, now)

    def accept(self, holder: Address, message: PrefillOrder, sequence: Sequence, now: float) -> None:
        order = _Order(holder, message, sequence, self._books.config.page_size)
        self._orders[message.grant_id] = order
        self._books.outbox.note(Noted.ORDERED, sequence.request_id, sequence.attempt, sequence.num_tokens)
        self._renew(order, now)
        # Seconds that are left, not a time of day: clocks of two hosts need not agree.
        self._books.deadlines.set((TIMEOUT, order.grant_id), now + message.timeout_s)

    def on_computed(self, sequence: Sequence, now: float) -> None:
        """More of the prompt is computed, or was found in the cache: announce the pages that are full now."""
        order = self._orders[sequence.order_id]
        # Whole pages only: a page that is still being written would be copied with what it held before.
        num_ready = sequence.num_computed // self._books.config.page_size - order.num_skip_pages
        if num_ready > order.num_announced:
            self._announce(order, num_ready, now)

    def on_token(self, sequence: Sequence, token_id: int, extra: bytes, now: float) -> None:
        """The first token is drawn (`extra` accompanies it), so all pages are ready, even a partly filled last one."""
        order = self._orders[sequence.order_id]
        if order.num_announced < order.total:
            self._announce(order, order.total, now)
        self.num_done += 1
        stages = sequence.measure(now)
        done = PrefillDone(
            grant_id=order.grant_id,
            token_id=token_id,
            num_cached_tokens=max(0, sequence.num_cached_tokens),
            queue_s=stages.queue_s,
            prefill_s=stages.prefill_s,
            extra=extra,
            num_restored_tokens=sequence.num_restored,
        )
        self._conclude(order, done, now)

    def fail(self, grant_id: str, code: str, message: str, now: float) -> None:
        """The order cannot be completed: its sequence ends, if it still holds anything."""
        order = self._orders.get(grant_id)
        if order is None:
            return
        sequence, order.sequence = order.sequence, None
        # A transfer may fail after the token was drawn: the failure then replaces `PrefillDone`. A second failure says
        # nothing new, and would count twice.
        if not isinstance(order.result, PrefillFailed):
            self.num_failed += 1
            self._conclude(order, PrefillFailed(grant_id=grant_id, code=code, message=message), now)
        self._leave(sequence, now)

    def on_pulled(self, message: PagesPulled, now: float) -> None:
        order = self._orders.get(message.grant_id)
        # Only progress, or the end, renews: repeated acknowledgements would keep the lease of a stuck copy alive.
        if order is not None and (message.num_pages > order.num_pulled or message.complete):
            order.num_pulled = order.total if message.complete else message.num_pages
            order.repeat_s = ANNOUNCE_REPEAT_S
            self._renew(order, now)

    def on_transfer_failed(self, message: TransferFailed, now: float) -> None:
        """The agent has given the transfer up, or knows no such grant: then the holder has closed it."""
        if message.code != UNKNOWN_GRANT:
            self.fail(message.grant_id, message.code, message.message, now)
        elif message.grant_id in self._orders:
            self.cancel(message.grant_id, now)

    def cancel(self, grant_id: str, now: float) -> None:
        """The holder wants nothing more of it."""
        self._gone[grant_id] = None
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        self._forget(grant_id, now)

    def on_holder_lost(self, holder: Address, now: float) -> None:
        lost = [
            grant_id
            for grant_id, order in self._orders.items()
            if order.holder.actor_id == holder.actor_id and order.holder.epoch <= holder.epoch
        ]
        for grant_id in lost:
            self._forget(grant_id, now)

    def on_lease_over(self, grant_id: str, now: float) -> None:
        self._forget(grant_id, now)

    def on_timeout(self, grant_id: str, now: float) -> None:
        """The holder's own deadline has passed: it has given up by now."""
        if self._orders[grant_id].result is None:
            self.fail(grant_id, "deadline_exceeded", "the prefill took longer than the order allowed", now)

    def running(self) -> list[str]:
        """Grant ids of orders that have no result yet."""
        return [grant_id for grant_id, order in self._orders.items() if order.result is None]

    def on_repeat_due(self, grant_id: str, now: float) -> None:
        """Tell again what is not acknowledged. A repeated announcement makes the agent acknowledge it again."""
        order = self._orders[grant_id]
        sequence = order.sequence
        order.repeat_s = min(2 * order.repeat_s, MAX_REPEAT_FACTOR * ANNOUNCE_REPEAT_S)
        # From the first page on, not from the first unacknowledged one: the acknowledgement may be what was lost, and
        # the decode scheduler's copy of it, too.
        if sequence is not None and order.num_announced and (order.num_pulled < order.num_announced or order.result):
            self._tell_ready(order, 0, order.num_announced)
        if order.result is not None:
            self._tell_result(order, order.result)
        self._books.deadlines.set((ANNOUNCE, grant_id), now + order.repeat_s)

    def flush(self) -> None:
        fresh_pages, self._fresh_pages = self._fresh_pages, {}
        for agent, spans in fresh_pages.items():
            ready = [pages for grant_id, span in spans.items() if (pages := self._ready(grant_id, *span)) is not None]
            for some in cut(ready, lambda announced: _ITEM_BYTES + 10 * len(announced.pages)):
                self._books.outbox.tell(agent, AnnouncePages(announced=some))
        fresh_results, self._fresh_results = self._fresh_results, {}
        for holder, results in fresh_results.items():
            # An order may have been cancelled since: nobody waits for its result.
            told = [result for grant_id, result in results.items() if grant_id in self._orders]
            for some in cut(told, lambda _: _ITEM_BYTES):
                done = [result for result in some if isinstance(result, PrefillDone)]
                failed = [result for result in some if isinstance(result, PrefillFailed)]
                self._books.outbox.tell(holder, PrefillNews(done=done, failed=failed))

    # inside

    def _announce(self, order: _Order, end: int, now: float) -> None:
        self._tell_ready(order, order.num_announced, end)
        order.num_announced = end
        order.repeat_s = ANNOUNCE_REPEAT_S
        self._books.deadlines.set((ANNOUNCE, order.grant_id), now + order.repeat_s)

    def _tell_ready(self, order: _Order, first: int, end: int) -> None:
        spans = self._fresh_pages.setdefault(order.agent, {})
        # Spans of one order in a turn follow each other, or a repeat begins at 0: together they are one span.
        before = spans.get(order.grant_id, (first, end))
        spans[order.grant_id] = (min(first, before[0]), max(end, before[1]))

    def _tell_result(self, order: _Order, result: PrefillDone | PrefillFailed) -> None:
        self._fresh_results.setdefault(order.holder.actor_id, {})[order.grant_id] = result

    def _ready(self, grant_id: str, first: int, end: int) -> PagesReady | None:
        """Pages of an order as they are announced; None if it has given them back since."""
        order = self._orders.get(grant_id)
        if order is None or order.sequence is None:
            return None
        kv = order.sequence.kv
        assert kv is not None, "pages are kept until the order ends"
        # Indices of the announcement count from the grant's first page; the decode side had cached the pages before it.
        start = order.num_skip_pages + first
        return PagesReady(
            grant_id=grant_id,
            first=first,
            total=order.total,
            source_group=self._books.pool.group,
            source_agent=self._books.pool.agent,
            source_incarnation=self._books.pool.incarnation,
            layout_digest=self._layout_digest,
            pages=kv.pages[start : start + end - first],
            # They let a copy detect that a page was reused between announcement and reading.
            generations=kv.generations(start, end - first),
        )

    def _conclude(self, order: _Order, result: PrefillDone | PrefillFailed, now: float) -> None:
        order.result = result
        order.repeat_s = ANNOUNCE_REPEAT_S
        self._tell_result(order, result)
        self._books.deadlines.set((ANNOUNCE, order.grant_id), now + order.repeat_s)

    def _renew(self, order: _Order, now: float) -> None:
        self._books.deadlines.set((LEASE, order.grant_id), now + self._books.config.lease_s)

    def _forget(self, grant_id: str, now: float) -> None:
        order = self._orders.pop(grant_id, None)
        for kind in (ANNOUNCE, LEASE, TIMEOUT):
            self._books.deadlines.clear((kind, grant_id))
        if order is not None:
            self._leave(order.sequence, now)

    def _leave(self, sequence: Sequence | None, now: float) -> None:
        if sequence is not None:
            self._books.leave(sequence, now)
            self._books.is_admission_due = True
