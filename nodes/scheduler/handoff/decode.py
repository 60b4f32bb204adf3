"""Decode's side of a handoff: pages lent to a transfer, the prefill ordered elsewhere, and every way that can end.

    OPENING   a grant is requested from this scheduler's own agent
    ORDERED   the grant is open and the prefill ordered; the order is renewed while the handoff lives, which tells a
              silent prefill scheduler from a slow one, and tells it that we still want the pages
    done      `PagesPulled(complete)` and `PrefillDone` are both here, in any order
    failed    refused, failed, silent for a lease, past the deadline, a peer lost, or no longer wanted

All that a turn brings for one peer goes in one ask, and each item of it has its own outcome: an item that the answer
does not name is asked again, like one of an ask without an answer.

Done or failed, the prefill is cancelled by an ask that is repeated until answered. A grant whose pages are all in has
closed itself; any other is closed at the agent (`own_grants.py`). If its prefill was ordered, its pages are quarantined
until `GrantClosed`, because until then a copy may still be under way. The first pages that are in are good, whatever
failed later: they stay in the cache, and if all are in, only the first token is missing. Pure; owned by the core.
"""

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import PagesPulled
from mesh.address import Address
from mesh.calls.retrier import Retrier
from nodes.protocol import (
    CancelPrefill,
    OrderPrefills,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillNews,
    PrefillOrder,
    PrefillsOrdered,
)
from nodes.scheduler.asks import ASK_RETRY_S, ASK_TIMEOUT_S, BatchedAsks
from nodes.scheduler.books import Books
from nodes.scheduler.events import Tag
from nodes.scheduler.finish.results import Results
from nodes.scheduler.handoff.handoff import Handoff
from nodes.scheduler.handoff.own_grants import ITEM_BYTES, SILENCE, OwnGrants
from nodes.scheduler.sequence import Sequence, Stage
from nodes.trace_notes import Noted

ORDER = "order_prefill"
CANCEL = "cancel_prefill"
RENEW = "renew_order"
COMPANY_S = 0.05
"""How long the cancel of a prefill that is done waits for others. It frees no memory for good: those pages stay cached
there, and are only not evictable for as long."""
MAX_CANCELS = 1024
"""A thousand ids are some tens of kilobytes, far below the limit of a body (16 MiB)."""
ORDER_RENEW_S = 2.0
"""Five times in a lease: some may be lost."""


class DecodeHandoffQueue:
    """Handoffs of one decode scheduler; `results` takes each that ends, unless it was given up.

    `cancels` are the prefills that are to be forgotten elsewhere, until that is answered.
    """

    def __init__(self, books: Books, own: OwnGrants, results: Results) -> None:
        self._books = books
        self._own = own
        self._results = results
        self._order_asks = BatchedAsks[PrefillOrder](
            ORDER,
            books.outbox,
            ASK_TIMEOUT_S,
            lambda orders: OrderPrefills(orders=orders),
            lambda order: ITEM_BYTES + 5 * len(order.token_ids),
        )
        # Orders of this turn, by prefill scheduler and grant.
        self._fresh_orders: dict[str, dict[str, PrefillOrder]] = {}
        self.cancels = Retrier[str, str](books.deadlines, CANCEL, self._ask_to_cancel)
        self.num_done = 0
        self.num_failed = 0

    def open(self, sequence: Sequence, lent: ExportedPages, now: float) -> None:
        sequence.stage = Stage.HANDOFF
        self._own.lend(Handoff(self, sequence, lent, now, self._books.config.handoff_timeout_s), now)

    def on_open(self, loan: Handoff, now: float) -> None:
        """The grant is open, so that its prefill can be ordered."""
        sequence = loan.sequence
        assert sequence.kv is not None, "pages are lent"
        # Before the order leaves: from then on a copy may write at any moment, and pages in flight are quarantined, not
        # freed.
        sequence.kv.mark_in_flight()
        loan.is_ordered = True
        loan.heard_at = now
        sequence.grant_s = now - loan.opened_at
        self._books.outbox.note(Noted.GRANTED, sequence.request_id, len(loan.lent.pages), 0)
        self._order(loan, now)

    def on_ordered(self, number: str, message: PrefillsOrdered, now: float) -> None:
        """A prefill scheduler has answered ask `number`: it has the accepted orders, or still has them."""
        refused = {refusal.grant_id: refusal.code for refusal in message.refused}
        for grant_id, code in self._order_asks.answered(number, message.accepted, refused):
            self._on_order_answer(grant_id, code, now)

    def _on_order_answer(self, grant_id: str, code: str | None, now: float) -> None:
        handoff = self._find(grant_id)
        if handoff is None:
            return
        if code is None:
            handoff.heard_at = now
            self._books.deadlines.set((RENEW, grant_id), now + ORDER_RENEW_S)
        # Progress of the copy counts as a sign of life, too, so only a whole lease without either ends the handoff:
        # prefilling again costs a prompt, waiting costs at most 10 s.
        elif code not in SILENCE or now - handoff.heard_at >= self._books.config.lease_s:
            self.fail(handoff, code, now)
        else:
            self._books.deadlines.set((RENEW, grant_id), now + ASK_RETRY_S)

    def on_pulled(self, loan: Handoff, message: PagesPulled, now: float) -> None:
        loan.heard_at = now
        self._books.outbox.note(Noted.PULLED, loan.sequence.request_id, message.num_pages, message.complete)
        self._settle(loan, now)

    def on_done(self, sender: Address, message: PrefillDone, now: float) -> None:
        """The prefill scheduler has drawn the first token. If the order is over here, it is cancelled again."""
        handoff = self._find(message.grant_id)
        if handoff is None:
            self._cancel_unknown(sender, message.grant_id)
            return
        # The first of repeats counts: `transfer_s` is how long the copy took beyond the drawing of the token.
        if handoff.done is None:
            handoff.done_at = now
            self._books.outbox.note(Noted.PREFILLED, handoff.sequence.request_id, message.num_cached_tokens, 0)
        handoff.done = message
        self._settle(handoff, now)

    def on_failed(self, sender: Address, message: PrefillFailed, now: float) -> None:
        handoff = self._find(message.grant_id)
        if handoff is None:
            self._cancel_unknown(sender, message.grant_id)
        else:
            self.fail(handoff, message.code, now, message.message)

    def on_news(self, sender: Address, message: PrefillNews, now: float) -> None:
        for done in message.done:
            self.on_done(sender, done, now)
        for failed in message.failed:
            self.on_failed(sender, failed, now)

    def on_cancelled(self, message: PrefillCancelled) -> None:
        for grant_id in message.grant_ids:
            self.cancels.answered(grant_id)

    def on_ask_failed(self, tag: Tag, code: str, now: float) -> None:
        """One of our asks was refused as a whole or brought no answer; that applies to each item it named."""
        kind, subject = tag
        if kind == CANCEL:
            # The subject is the peer: all its cancels are asked again, even those in another ask that is still pending.
            self.cancels.failed(self.cancels.keys_of(subject), now)
            return
        for grant_id in self._order_asks.failed(subject):
            self._on_order_answer(grant_id, code, now)

    def on_renew_due(self, grant_id: str, now: float) -> None:
        handoff = self._find(grant_id)
        assert handoff is not None, "what is renewed lives"
        self._order(handoff, now)

    def flush(self) -> None:
        orders, self._fresh_orders = self._fresh_orders, {}
        for prefill, of_peer in orders.items():
            self._order_asks.ask(prefill, of_peer)
        self.cancels.flush()

    def fail(self, loan: Handoff, code: str, now: float, message: str = "") -> None:
        """The handoff failed; `message` is what the prefill scheduler said, if it is that which did."""
        self.give_up(loan, code, now)
        self._results.not_prefilled(loan.sequence, code, message, now, complete=loan.is_pulled)

    def give_up(self, loan: Handoff, code: str, now: float) -> None:
        self._end(loan, now)
        sequence = loan.sequence
        # All pages are good, so the prompt (seconds of computing) is kept, and only one position is computed again for
        # its logits.
        if loan.is_pulled:
            sequence.receive(loan.lent.first, self._books.config.page_size)
        else:
            if loan.num_pulled and sequence.num_cached_tokens < 0:
                assert sequence.kv is not None, "pages are lent"
                # Pages received now must not count as found in a cache when the next try finds them.
                sequence.num_cached_tokens = sequence.kv.num_cached_tokens
            # Pages are only sent on an order: without one, none can be on the way.
            self._own.take_back(loan, idle=not loan.is_ordered)
        self.num_failed += 1

    # inside

    def _find(self, grant_id: str) -> Handoff | None:
        loan = self._books.loans.get(grant_id)
        return loan if isinstance(loan, Handoff) else None

    def _order(self, handoff: Handoff, now: float) -> None:
        order = handoff.order(self._books.config.page_size, self._books.config.agent, now)
        self._fresh_orders.setdefault(handoff.peer, {})[handoff.grant_id] = order

    def _settle(self, handoff: Handoff, now: float) -> None:
        # Token and pages come from two actors over two links, so either may be first.
        if handoff.done is None or not handoff.is_pulled:
            return
        self._end(handoff, now)
        sequence, done, page_size = handoff.sequence, handoff.done, self._books.config.page_size
        sequence.order_queue_s, sequence.prefill_s = done.queue_s, done.prefill_s
        sequence.transfer_s = now - handoff.done_at
        num_own = handoff.lent.first * page_size
        if done.num_cached_tokens > num_own:
            # What is told of a prompt's cached tokens is told of the scheduler that had more of them.
            sequence.num_restored = max(sequence.num_restored, done.num_restored_tokens)
        skipped = max(num_own, done.num_cached_tokens)
        self._books.prefills.observe(sequence.num_tokens - skipped, done.prefill_s)
        sequence.receive(handoff.lent.first, page_size)
        self.num_done += 1
        self._results.prefilled(sequence, done.token_id, done.num_cached_tokens, done.extra, now)

    def _end(self, handoff: Handoff, now: float) -> None:
        self._own.end(handoff)
        # Given up in the turn in which it was ordered: the order is not sent, but its cancel is all the same.
        self._fresh_orders.get(handoff.peer, {}).pop(handoff.grant_id, None)
        self._books.deadlines.clear((RENEW, handoff.grant_id))
        if handoff.is_ordered:
            # Past that time the prefill scheduler's own lease has freed everything.
            # Done, it only lets go of pages that stay cached there; failed, that scheduler may be computing in vain.
            is_done = handoff.done is not None and handoff.is_pulled
            self._cancel(
                handoff.peer,
                handoff.grant_id,
                now + 2 * self._books.config.lease_s,
                patient_until=now + COMPANY_S if is_done else None,
            )

    def _cancel_unknown(self, sender: Address, grant_id: str) -> None:
        """Cancel an order that neither this incarnation nor an earlier one wants. Asked once for each result told."""
        # `give_up_at` 0.0: the other end repeats its result until it is cancelled, which brings the next try by itself.
        if grant_id not in self.cancels:
            self._cancel(sender.actor_id, grant_id, 0.0)

    def _cancel(self, prefill: str, grant_id: str, give_up_at: float, *, patient_until: float | None = None) -> None:
        self.cancels.add(
            grant_id, prefill, grant_id, retry_s=ASK_RETRY_S, give_up_at=give_up_at, patient_until=patient_until
        )

    def _ask_to_cancel(self, prefill: str, grant_ids: list[str]) -> None:
        # One ask for all of a turn: a scheduler that loses its gateway cancels everything at once.
        for start in range(0, len(grant_ids), MAX_CANCELS):
            message = CancelPrefill(grant_ids=grant_ids[start : start + MAX_CANCELS])
            self._books.outbox.ask(prefill, message, ASK_TIMEOUT_S, (CANCEL, prefill))
