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
failed later: they stay in the cache, and if all are in, only the first token is missing. Pure; owned by the core, which
moves the sequence as the returned outcome says.
"""

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import PagesPulled, TransferFailed
from mesh.address import Address
from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
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
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Outbox, Tag
from nodes.scheduler.handoff.handoff import Handoff, HandoffDone, HandoffFailed, Outcome, ended
from nodes.scheduler.handoff.own_grants import ITEM_BYTES, SILENCE, OwnGrants
from nodes.scheduler.rates import LearnedRate
from nodes.scheduler.sequence import Sequence
from nodes.trace_notes import Noted

ORDER = "order_prefill"
CANCEL = "cancel_prefill"
RENEW = "renew_order"
EXPIRE = "handoff"
COMPANY_S = 0.05
"""How long the cancel of a prefill that is done waits for others. It frees no memory for good: those pages stay cached
there, and are only not evictable for as long."""
MAX_CANCELS = 1024
"""A thousand ids are some tens of kilobytes, far below the limit of a body (16 MiB)."""
ORDER_RENEW_S = 2.0
"""Five times in a lease: some may be lost."""


class DecodeHandoffQueue:
    """Handoffs of one decode scheduler. `prefills` learns from them how fast prompts are computed, in tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        own: OwnGrants,
        outbox: Outbox,
        deadlines: Deadlines,
        prefills: LearnedRate,
    ) -> None:
        self._config = config
        self._own = own
        self._outbox = outbox
        self._deadlines = deadlines
        self._prefills = prefills
        self._order_asks = BatchedAsks[PrefillOrder](
            ORDER,
            outbox,
            ASK_TIMEOUT_S,
            lambda orders: OrderPrefills(orders=orders),
            lambda order: ITEM_BYTES + 5 * len(order.token_ids),
        )
        # Orders of this turn, by prefill scheduler and grant.
        self._fresh_orders: dict[str, dict[str, PrefillOrder]] = {}
        self._cancels = Retrier[str, str](deadlines, CANCEL, self._ask_to_cancel)
        self._handoffs: dict[str, Handoff] = {}
        self.num_done = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._handoffs)

    @property
    def num_cancelling(self) -> int:
        return len(self._cancels)

    def sequences(self) -> list[Sequence]:
        """Sequences whose prefill is elsewhere, oldest first."""
        return [handoff.sequence for handoff in self._handoffs.values()]

    def open(self, sequence: Sequence, lent: ExportedPages, now: float) -> None:
        timeout_s = self._config.handoff_timeout_s
        grant_id = self._own.ask(lent, sequence.request_id, timeout_s, now)
        handoff = self._handoffs[grant_id] = Handoff(grant_id, sequence, lent, now, now + timeout_s)
        self._deadlines.set((EXPIRE, grant_id), handoff.deadline)

    def on_open_answer(self, grant_id: str, code: str | None, now: float) -> Outcome | None:
        """The grant is open, so that its prefill can be ordered, or will not be, because of `code`."""
        handoff = self._handoffs.get(grant_id)
        if handoff is None:
            return None
        if code is not None:
            return self._fail(handoff, code, now)
        assert handoff.sequence.kv is not None, "pages are lent"
        # Before the order leaves: from then on a copy may write at any moment, and pages in flight are quarantined, not
        # freed.
        handoff.sequence.kv.mark_in_flight()
        handoff.is_ordered = True
        handoff.heard_at = now
        handoff.sequence.grant_s = now - handoff.opened_at
        self._outbox.note(Noted.GRANTED, handoff.sequence.request_id, len(handoff.lent.pages), 0)
        self._order(handoff, now)
        return None

    def on_ordered(self, number: str, message: PrefillsOrdered, now: float) -> list[Outcome]:
        """A prefill scheduler has answered ask `number`: it has the accepted orders, or still has them."""
        refused = {refusal.grant_id: refusal.code for refusal in message.refused}
        answers = self._order_asks.answered(number, message.accepted, refused)
        return ended(self._on_order_answer(grant_id, code, now) for grant_id, code in answers)

    def _on_order_answer(self, grant_id: str, code: str | None, now: float) -> Outcome | None:
        handoff = self._handoffs.get(grant_id)
        if handoff is None:
            return None
        if code is None:
            handoff.heard_at = now
            self._deadlines.set((RENEW, grant_id), now + ORDER_RENEW_S)
            return None
        # Progress of the copy counts as a sign of life, too, so only a whole lease without either ends the handoff:
        # prefilling again costs a prompt, waiting costs at most 10 s.
        if code not in SILENCE or now - handoff.heard_at >= self._config.lease_s:
            return self._fail(handoff, code, now)
        self._deadlines.set((RENEW, grant_id), now + ASK_RETRY_S)
        return None

    def on_pulled(self, message: PagesPulled, now: float) -> Outcome | None:
        handoff = self._handoffs.get(message.grant_id)
        if handoff is None:
            return None
        handoff.heard_at = now
        # Tells may be repeated and overtaken by others: neither fact is ever taken back.
        handoff.is_pulled |= message.complete
        handoff.num_pulled = max(handoff.num_pulled, message.num_pages)
        self._outbox.note(Noted.PULLED, handoff.sequence.request_id, message.num_pages, message.complete)
        return self._settle(handoff, now)

    def on_done(self, sender: Address, message: PrefillDone, now: float) -> Outcome | None:
        """The prefill scheduler has drawn the first token. If the order is over here, it is cancelled again."""
        handoff = self._handoffs.get(message.grant_id)
        if handoff is None:
            self._cancel_unknown(sender, message.grant_id)
            return None
        # The first of repeats counts: `transfer_s` is how long the copy took beyond the drawing of the token.
        if handoff.done is None:
            handoff.done_at = now
            self._outbox.note(Noted.PREFILLED, handoff.sequence.request_id, message.num_cached_tokens, 0)
        handoff.done = message
        return self._settle(handoff, now)

    def on_failed(self, sender: Address, message: PrefillFailed, now: float) -> Outcome | None:
        handoff = self._handoffs.get(message.grant_id)
        if handoff is None:
            self._cancel_unknown(sender, message.grant_id)
            return None
        return self._fail(handoff, message.code, now, message.message)

    def on_news(self, sender: Address, message: PrefillNews, now: float) -> list[Outcome]:
        done = [self.on_done(sender, result, now) for result in message.done]
        return ended([*done, *(self.on_failed(sender, result, now) for result in message.failed)])

    def on_transfer_failed(self, message: TransferFailed, now: float) -> Outcome | None:
        handoff = self._handoffs.get(message.grant_id)
        return None if handoff is None else self._fail(handoff, message.code, now)

    def on_cancelled(self, message: PrefillCancelled) -> None:
        for grant_id in message.grant_ids:
            self._cancels.answered(grant_id)

    def on_ask_failed(self, tag: Tag, code: str, now: float) -> list[Outcome]:
        """One of our asks was refused as a whole or brought no answer; that applies to each item it named."""
        kind, subject = tag
        if kind == CANCEL:
            # The subject is the peer: all its cancels are asked again, even those in another ask that is still pending.
            self._cancels.failed(self._cancels.keys_of(subject), now)
            return []
        return ended(self._on_order_answer(grant_id, code, now) for grant_id in self._order_asks.failed(subject))

    def on_renew_due(self, grant_id: str, now: float) -> None:
        self._order(self._handoffs[grant_id], now)

    def flush(self) -> None:
        orders, self._fresh_orders = self._fresh_orders, {}
        for prefill, of_peer in orders.items():
            self._order_asks.ask(prefill, of_peer)
        self._cancels.flush()

    def on_retry_due(self, peer: str) -> None:
        """The pause after a failed ask to cancel is over."""
        self._cancels.retry(peer)

    def retry_now(self, peer: str) -> None:
        """A peer is back: asks to it that failed are repeated without a pause."""
        self._cancels.retry_now(peer)

    def hurry(self) -> None:
        """Cancels that wait for others leave now: somebody asks what is held."""
        self._cancels.hurry()

    def on_expired(self, grant_id: str, now: float) -> Outcome:
        return self._fail(self._handoffs[grant_id], "deadline_exceeded", now)

    def on_peer_lost(self, actor_id: str, now: float) -> list[Outcome]:
        is_agent = actor_id == self._config.agent
        hit = [handoff for handoff in self._handoffs.values() if is_agent or handoff.prefill == actor_id]
        return [self._fail(handoff, "peer_lost", now) for handoff in hit]

    def revoke(self, sequence: Sequence, now: float) -> Outcome:
        """The request is cancelled, or its pages are needed."""
        handoff = next(handoff for handoff in self._handoffs.values() if handoff.sequence is sequence)
        return self._fail(handoff, "revoked", now)

    # inside

    def _order(self, handoff: Handoff, now: float) -> None:
        order = handoff.order(self._config.page_size, self._config.agent, now)
        self._fresh_orders.setdefault(handoff.prefill, {})[handoff.grant_id] = order

    def _settle(self, handoff: Handoff, now: float) -> Outcome | None:
        # Token and pages come from two actors over two links, so either may be first.
        if handoff.done is None or not handoff.is_pulled:
            return None
        self._end(handoff, now)
        sequence, done = handoff.sequence, handoff.done
        sequence.order_queue_s, sequence.prefill_s = done.queue_s, done.prefill_s
        sequence.transfer_s = now - handoff.done_at
        num_own = handoff.lent.first * self._config.page_size
        if done.num_cached_tokens > num_own:
            # What is told of a prompt's cached tokens is told of the scheduler that had more of them.
            sequence.num_restored = max(sequence.num_restored, done.num_restored_tokens)
        skipped = max(num_own, done.num_cached_tokens)
        self._prefills.observe(sequence.num_tokens - skipped, done.prefill_s)
        sequence.receive(handoff.lent.first, self._config.page_size)
        self.num_done += 1
        return HandoffDone(sequence, done.token_id, done.num_cached_tokens, done.extra)

    def _fail(self, handoff: Handoff, reason: str, now: float, message: str = "") -> Outcome:
        self._end(handoff, now)
        sequence = handoff.sequence
        # All pages are good, so the prompt (seconds of computing) is kept, and only one position is computed again for
        # its logits.
        if handoff.is_pulled:
            sequence.receive(handoff.lent.first, self._config.page_size)
        else:
            if handoff.num_pulled and sequence.num_cached_tokens < 0:
                assert sequence.kv is not None, "pages are lent"
                # Pages received now must not count as found in a cache when the next try finds them.
                sequence.num_cached_tokens = sequence.kv.num_cached_tokens
            # Pages are only sent on an order: without one, none can be on the way.
            self._own.take_back(
                handoff.grant_id, sequence, handoff.lent, handoff.num_pulled, idle=not handoff.is_ordered
            )
        self.num_failed += 1
        return HandoffFailed(sequence, reason, handoff.is_pulled, message)

    def _end(self, handoff: Handoff, now: float) -> None:
        grant_id = handoff.grant_id
        del self._handoffs[grant_id]
        self._own.stop(grant_id)
        # Given up in the turn in which it was ordered: the order is not sent, but its cancel is all the same.
        self._fresh_orders.get(handoff.prefill, {}).pop(grant_id, None)
        self._deadlines.clear((RENEW, grant_id))
        self._deadlines.clear((EXPIRE, grant_id))
        if handoff.is_ordered:
            # Past that time the prefill scheduler's own lease has freed everything.
            # Done, it only lets go of pages that stay cached there; failed, that scheduler may be computing in vain.
            is_done = handoff.done is not None and handoff.is_pulled
            self._cancel(
                handoff.prefill,
                grant_id,
                now + 2 * self._config.lease_s,
                patient_until=now + COMPANY_S if is_done else None,
            )

    def _cancel_unknown(self, sender: Address, grant_id: str) -> None:
        """Cancel an order that neither this incarnation nor an earlier one wants. Asked once for each result told."""
        # `give_up_at` 0.0: the other end repeats its result until it is cancelled, which brings the next try by itself.
        if grant_id not in self._cancels:
            self._cancel(sender.actor_id, grant_id, 0.0)

    def _cancel(self, prefill: str, grant_id: str, give_up_at: float, *, patient_until: float | None = None) -> None:
        self._cancels.add(
            grant_id, prefill, grant_id, retry_s=ASK_RETRY_S, give_up_at=give_up_at, patient_until=patient_until
        )

    def _ask_to_cancel(self, prefill: str, grant_ids: list[str]) -> None:
        # One ask for all of a turn: a scheduler that loses its gateway cancels everything at once.
        for start in range(0, len(grant_ids), MAX_CANCELS):
            message = CancelPrefill(grant_ids=grant_ids[start : start + MAX_CANCELS])
            self._outbox.ask(prefill, message, ASK_TIMEOUT_S, (CANCEL, prefill))
