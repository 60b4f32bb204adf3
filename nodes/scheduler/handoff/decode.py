"""Decode's side of a handoff: pages lent to a transfer, the prefill ordered elsewhere, and every way that can end.

    OPENING   a grant is requested from this scheduler's own agent
    ORDERED   the grant is open and the prefill ordered; the order is renewed while the handoff lives, which tells a
              silent prefill scheduler from a slow one, and tells it that we still want the pages
    done      `PagesPulled(complete)` and `PrefillDone` are both here, in any order
    failed    refused, failed, silent for a lease, past the deadline, a peer lost, or no longer wanted

All that a turn brings for one peer goes in one ask, and each item of it has its own outcome: an item that the answer
does not name is asked again, like one of an ask without an answer.

Done or failed, the prefill is cancelled by an ask that is repeated until answered. A grant whose pages are all in has
closed itself; any other is closed at the agent, also by an ask repeated until answered. If its prefill was ordered, its
pages are quarantined until `GrantClosed`, because until then a copy may still be under way. The first pages that are in
are good, whatever failed later: they stay in the cache, and if all are in, only the first token is missing. A grant is
single use; a retry has another one and other pages. Pure; owned by the core, which moves the sequence as the returned
outcome says.
"""

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantsOpened,
    OpenGrant,
    OpenGrants,
    PagesPulled,
    PoolHandle,
    TransferFailed,
)
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
from nodes.scheduler.asks import ASK_RETRY_S, ASK_TIMEOUT_S, NOT_NAMED, BatchedAsks, PersistentAsks
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Ask, Outbox, Tag
from nodes.scheduler.handoff.handoff import Handoff, HandoffDone, HandoffFailed, Outcome, ended
from nodes.scheduler.sequence import Sequence
from nodes.trace_notes import Noted

OPEN = "open_grant"
ORDER = "order_prefill"
CLOSE = "close_grant"
CANCEL = "cancel_prefill"
RENEW = "renew_order"
EXPIRE = "handoff"
NEVER = float("inf")
MAX_CANCELS = 1024
"""A thousand ids are some tens of kilobytes, far below the limit of a body (16 MiB)."""
ORDER_RENEW_S = 2.0
"""Five times in a lease: some may be lost."""
# Size of a grant or an order on the wire, without its pages or tokens, which take up to 5 bytes each.
_ITEM_BYTES = 512

# Codes that leave open whether the peer has heard and acted, so items are asked again under the same grant id.
# Any other code is the peer's refusal.
SILENCE = frozenset({"deadline_exceeded", "mailbox_full", NOT_NAMED})
# `page_granted`: the agent has not heard yet that an earlier grant of these pages is closed.
NOT_YET = SILENCE | {"page_granted"}


class DecodeHandoffQueue:
    """Handoffs of one decode scheduler, and the grants it is closing. `nonce` is in no other queue's grant ids."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PoolHandle,
        holder: Address,
        nonce: str,
        outbox: Outbox,
        deadlines: Deadlines,
        asks: PersistentAsks,
    ) -> None:
        self._config = config
        self.pool = pool
        self._layout_digest = pool.layout.digest
        self._holder = holder
        self.grant_nonce = nonce
        self._outbox = outbox
        self._deadlines = deadlines
        self._asks = asks
        timeout_s = ASK_TIMEOUT_S
        self._open_asks = BatchedAsks[OpenGrant](
            OPEN,
            outbox,
            timeout_s,
            lambda grants: OpenGrants(grants=grants),
            lambda grant: _ITEM_BYTES + 10 * len(grant.pages),
        )
        self._order_asks = BatchedAsks[PrefillOrder](
            ORDER,
            outbox,
            timeout_s,
            lambda orders: OrderPrefills(orders=orders),
            lambda order: _ITEM_BYTES + 5 * len(order.token_ids),
        )
        self._opens = Retrier[str, OpenGrant](deadlines, OPEN, self._ask_to_open)
        # Orders of this turn, by prefill scheduler and grant.
        self._fresh_orders: dict[str, dict[str, PrefillOrder]] = {}
        self._cancels = Retrier[str, str](deadlines, CANCEL, self._ask_to_cancel)
        self._handoffs: dict[str, Handoff] = {}
        self._closing: dict[str, list[int]] = {}
        self._count = 0
        self.num_done = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._handoffs)

    @property
    def num_closing(self) -> int:
        return len(self._closing)

    @property
    def num_cancelling(self) -> int:
        return len(self._cancels)

    def sequences(self) -> list[Sequence]:
        """Sequences whose prefill is elsewhere, oldest first."""
        return [handoff.sequence for handoff in self._handoffs.values()]

    def open(self, sequence: Sequence, lent: ExportedPages, now: float) -> None:
        self._count += 1
        # Holder and count alone would repeat if an epoch does, or if this core is made anew after a release of memory.
        # A prefill scheduler remembers cancelled ids: after such a repetition one refused 112 of 112 handoffs.
        grant_id = f"{self._holder}/{self.grant_nonce}.{self._count}"
        deadline = now + self._config.handoff_timeout_s
        self._handoffs[grant_id] = Handoff(grant_id, sequence, lent, now, deadline)
        message = OpenGrant(
            grant_id=grant_id,
            group=self.pool.group,
            pages=lent.pages,
            generations=lent.generations,
            layout_digest=self._layout_digest,
            holder=self._holder.actor_id,
            holder_epoch=self._holder.epoch,
            timeout_s=self._config.handoff_timeout_s,
            request_id=sequence.request_id,
        )
        self._deadlines.set((EXPIRE, grant_id), deadline)
        self._opens.add(
            grant_id,
            self._config.agent,
            message,
            retry_s=ASK_RETRY_S,
            # A lease and not the whole handoff timeout: if our own agent is silent for 10 s it is gone, and the prompt
            # is better prefilled here.
            give_up_at=now + self._config.lease_s,
        )

    def on_opened(self, number: str, message: GrantsOpened, now: float) -> list[Outcome]:
        """The agent has answered ask `number`. It takes pages for the open grants, so their prefill can be ordered."""
        refused = {refusal.grant_id: refusal.code for refusal in message.refused}
        answers = self._open_asks.answered(number, message.opened, refused)
        return ended(self._on_open_answer(grant_id, code, now) for grant_id, code in answers)

    def _on_open_answer(self, grant_id: str, code: str | None, now: float) -> Outcome | None:
        handoff = self._handoffs.get(grant_id)
        # The handoff may have ended while the agent answered; its grant is then being closed already.
        if handoff is None:
            return None
        if code is not None:
            # Until that lease is over, silence is not a failure, nor is an earlier grant that is just being closed.
            is_asked_again = code in NOT_YET and not self._opens.failed((grant_id,), now)
            return None if is_asked_again else self._fail(handoff, code, now)
        self._opens.answered(grant_id)
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

    def on_closed(self, grant_id: str, message: GrantClosed) -> list[int]:
        """The agent will not write into the grant any more. Returns the pages that waited for this."""
        if message.grant_id != grant_id or not self._asks.answered((CLOSE, grant_id)):
            return []
        return self._closing.pop(grant_id)

    def on_cancelled(self, message: PrefillCancelled) -> None:
        for grant_id in message.grant_ids:
            self._cancels.answered(grant_id)

    def on_ask_failed(self, tag: Tag, code: str, now: float) -> list[Outcome]:
        """One of our asks was refused as a whole or brought no answer; that applies to each item it named."""
        kind, subject = tag
        if kind == CANCEL:
            # The subject is the peer: all its cancels are asked again, even those in another ask that is still pending.
            self._cancels.failed(self._cancels.keys_of(subject), now)
        elif kind == CLOSE:
            self._asks.failed((tag,), now)
        elif kind == OPEN:
            return ended(self._on_open_answer(grant_id, code, now) for grant_id in self._open_asks.failed(subject))
        else:
            return ended(self._on_order_answer(grant_id, code, now) for grant_id in self._order_asks.failed(subject))
        return []

    def on_renew_due(self, grant_id: str, now: float) -> None:
        self._order(self._handoffs[grant_id], now)

    def flush(self) -> None:
        self._opens.flush()
        orders, self._fresh_orders = self._fresh_orders, {}
        for prefill, of_peer in orders.items():
            self._order_asks.ask(prefill, of_peer)
        self._cancels.flush()

    def on_retry_due(self, peer: str) -> None:
        """The pause after a failed ask to cancel is over."""
        self._cancels.retry(peer)

    def on_open_retry_due(self, agent: str) -> None:
        self._opens.retry(agent)

    def retry_now(self, peer: str) -> None:
        """A peer is back: asks to it that failed are repeated without a pause."""
        self._opens.retry_now(peer)
        self._cancels.retry_now(peer)

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
        sequence.receive(handoff.lent.first, self._config.page_size)
        self.num_done += 1
        return HandoffDone(sequence, done.token_id, done.num_cached_tokens, done.extra)

    def _fail(self, handoff: Handoff, reason: str, now: float, message: str = "") -> Outcome:
        self._end(handoff, now)
        kv = handoff.sequence.kv
        assert kv is not None, "pages are lent"
        # All pages are good, so the prompt (seconds of computing) is kept, and only one position is computed again for
        # its logits.
        if handoff.is_pulled:
            handoff.sequence.receive(handoff.lent.first, self._config.page_size)
        else:
            self._keep_first(handoff)
            # Pages are only sent on an order: without one, none can be on the way.
            self._closing[handoff.grant_id] = kv.abort(quiesced=not handoff.is_ordered)
            handoff.sequence.drop_pages()
        self.num_failed += 1
        return HandoffFailed(handoff.sequence, reason, handoff.is_pulled, message)

    def _keep_first(self, handoff: Handoff) -> None:
        """Pages that arrived need not be computed again: they go into the cache, where the next try finds them."""
        kv, first, page_size = handoff.sequence.kv, handoff.lent.first, self._config.page_size
        assert kv is not None, "pages are lent"
        # Pages are pulled in order, so the first `num_pulled` are whole, whatever happened to those after them.
        token_ids = handoff.sequence.token_ids[first * page_size : (first + handoff.num_pulled) * page_size]
        whole = len(token_ids) // page_size * page_size
        if whole:
            if handoff.sequence.num_cached_tokens < 0:
                # Pages received now must not count as found in a cache.
                handoff.sequence.num_cached_tokens = kv.num_cached_tokens
            kv.commit_first(token_ids[:whole])

    def _end(self, handoff: Handoff, now: float) -> None:
        grant_id = handoff.grant_id
        del self._handoffs[grant_id]
        self._opens.stop(grant_id)
        # Given up in the turn in which it was ordered: the order is not sent, but its cancel is all the same.
        self._fresh_orders.get(handoff.prefill, {}).pop(grant_id, None)
        self._deadlines.clear((RENEW, grant_id))
        self._deadlines.clear((EXPIRE, grant_id))
        if not handoff.is_pulled:
            self._asks.start(
                (CLOSE, grant_id),
                self._config.agent,
                CloseGrant(grant_id=grant_id),
                timeout_s=ASK_TIMEOUT_S,
                retry_s=ASK_RETRY_S,
                give_up_at=NEVER,
            )
        if handoff.is_ordered:
            # Past that time the prefill scheduler's own lease has freed everything.
            self._cancel(handoff.prefill, grant_id, now + 2 * self._config.lease_s)

    def _cancel_unknown(self, sender: Address, grant_id: str) -> None:
        """Cancel an order that neither this incarnation nor an earlier one wants. Asked once for each result told."""
        # `give_up_at` 0.0: the other end repeats its result until it is cancelled, which brings the next try by itself.
        if grant_id not in self._cancels:
            self._cancel(sender.actor_id, grant_id, 0.0)

    def _cancel(self, prefill: str, grant_id: str, give_up_at: float) -> None:
        self._cancels.add(grant_id, prefill, grant_id, retry_s=ASK_RETRY_S, give_up_at=give_up_at)

    def _ask_to_open(self, agent: str, grants: list[OpenGrant]) -> None:
        self._open_asks.ask(agent, {grant.grant_id: grant for grant in grants})

    def _ask_to_cancel(self, prefill: str, grant_ids: list[str]) -> None:
        # One ask for all of a turn: a scheduler that loses its gateway cancels everything at once.
        for start in range(0, len(grant_ids), MAX_CANCELS):
            message = CancelPrefill(grant_ids=grant_ids[start : start + MAX_CANCELS])
            self._outbox.add(Ask(prefill, message, ASK_TIMEOUT_S, (CANCEL, prefill)))
