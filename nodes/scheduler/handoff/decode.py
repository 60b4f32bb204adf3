"""Decode's side of a handoff: pages lent to a transfer, the prefill ordered elsewhere, and every way that can end.

    OPENING   OpenGrant asked of the own agent
    ORDERED   GrantOpened; PrefillOrder asked, and renewed while the handoff lives: the renewal is what tells a silent
              prefill scheduler from a slow one, and tells it that we still want the pages
    done      `PagesPulled(complete)` and `PrefillDone` are both here, in any order
    failed    refused, failed, silent for a lease, past the deadline, a peer lost, or no longer wanted

Either way the prefill is cancelled, which is asked until answered, together with all others of a turn at that peer. A
grant whose pages are all in has closed itself; any other is closed at the agent, which is asked until answered too, and
pages of one that was ordered are quarantined until `GrantClosed`: until then a copy may still be under way. The first
pages that were in already are good, whatever failed after: they stay in the cache, and if all were in, only the first
token is missing. A grant is single use; a retry has another one and other pages. Pure; owned by the core, which moves
the sequence as the returned outcome says.
"""

from typing import NamedTuple

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import CloseGrant, GrantClosed, GrantOpened, OpenGrant, PagesPulled, PoolHandle, TransferFailed
from mesh.address import Address
from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
from nodes.protocol import CancelPrefill, PrefillAccepted, PrefillCancelled, PrefillDone, PrefillFailed, PrefillOrder
from nodes.scheduler.asks import PersistentAsks
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Ask, Outbox, Tag
from nodes.scheduler.sequence import Sequence

OPEN = "open_grant"
ORDER = "order_prefill"
CLOSE = "close_grant"
CANCEL = "cancel_prefill"
RENEW = "renew_order"
EXPIRE = "handoff"
NEVER = float("inf")
MAX_CANCELS = 1024

# The peer may not have heard; anything else is its own refusal.
SILENCE = frozenset({"deadline_exceeded", "mailbox_full"})
# Both leave it open whether the other end has acted, so both are asked again under the same grant id.
# The agent has not heard yet that an earlier grant of these pages is closed.
NOT_YET = SILENCE | {"page_granted"}


class HandoffDone(NamedTuple):
    """All pages are in and the first token is drawn."""

    sequence: Sequence
    token_id: int
    num_cached_tokens: int
    extra: bytes = b""


class HandoffFailed(NamedTuple):
    """It is over. `complete`: all pages are in nevertheless, and the sequence's own again."""

    sequence: Sequence
    reason: str
    complete: bool


Outcome = HandoffDone | HandoffFailed


class _Handoff:
    __slots__ = (
        "deadline", "done", "done_at", "grant_id", "heard_at", "is_ordered", "is_pulled", "lent", "num_pulled",
        "opened_at", "prefill", "sequence",
    )  # fmt: skip

    def __init__(self, grant_id: str, sequence: Sequence, lent: ExportedPages, now: float, deadline: float) -> None:
        self.grant_id = grant_id
        self.sequence = sequence
        self.lent = lent
        self.prefill = sequence.prefill
        self.deadline = deadline
        # `heard_at` starts now, although nobody was heard: the lease of silence is then counted from the opening.
        self.opened_at = self.done_at = self.heard_at = now
        self.is_ordered = False
        self.is_pulled = False
        self.num_pulled = 0
        self.done: PrefillDone | None = None


class DecodeHandoffQueue:
    """Handoffs of one decode scheduler, and the grants that it is closing. `nonce`: in no other queue's grant ids."""

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
        self._pool = pool
        self._layout_digest = pool.layout.digest
        self._holder = holder
        self._nonce = nonce
        self._outbox = outbox
        self._deadlines = deadlines
        self._asks = asks
        self._cancels = Retrier[str, str](deadlines, CANCEL, self._ask_to_cancel)
        self._handoffs: dict[str, _Handoff] = {}
        self._closing: dict[str, list[int]] = {}
        self._count = 0
        self.num_done = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._handoffs)

    @property
    def num_closing(self) -> int:
        """Grants whose agent has not said yet that they are closed."""
        return len(self._closing)

    @property
    def num_cancelling(self) -> int:
        """Prefills whose scheduler has not said yet that nothing is left of them."""
        return len(self._cancels)

    def sequences(self) -> list[Sequence]:
        """Sequences whose prefill is elsewhere, oldest first."""
        return [handoff.sequence for handoff in self._handoffs.values()]

    def open(self, sequence: Sequence, lent: ExportedPages, now: float) -> None:
        """Begin a handoff with pages that were lent to it."""
        self._count += 1
        # Incarnation and count alone come again where an epoch does, or where this core is made anew after a release of
        # memory. Prefill remembers ids that it has cancelled: after such a return it refused 112 of 112 handoffs.
        grant_id = f"{self._holder}/{self._nonce}.{self._count}"
        deadline = now + self._config.handoff_timeout_s
        self._handoffs[grant_id] = _Handoff(grant_id, sequence, lent, now, deadline)
        message = OpenGrant(
            grant_id=grant_id,
            group=self._pool.group,
            pages=lent.pages,
            generations=lent.generations,
            layout_digest=self._layout_digest,
            holder=self._holder.actor_id,
            holder_epoch=self._holder.epoch,
            timeout_s=self._config.handoff_timeout_s,
        )
        self._deadlines.set((EXPIRE, grant_id), deadline)
        self._asks.start(
            (OPEN, grant_id),
            self._config.agent,
            message,
            timeout_s=self._config.ask_timeout_s,
            retry_s=self._config.ask_retry_s,
            # A lease and not the whole handoff timeout: an own agent that is silent for 10 s is gone, and the prompt is
            # better prefilled here.
            give_up_at=now + self._config.lease_s,
        )

    def on_opened(self, grant_id: str, message: GrantOpened, now: float) -> None:
        """The agent takes pages for this grant from now on, so the prefill can be ordered."""
        handoff = self._handoffs.get(grant_id)
        # The handoff may have ended while the agent answered; its grant is then being closed already.
        if not self._asks.answered((OPEN, grant_id)) or handoff is None or message.grant_id != grant_id:
            return
        assert handoff.sequence.kv is not None, "pages are lent"
        # Before the order leaves: from then on a copy may write at any moment, and pages in flight are quarantined, not
        # freed.
        handoff.sequence.kv.mark_in_flight()
        handoff.is_ordered = True
        handoff.heard_at = now
        handoff.sequence.grant_s = now - handoff.opened_at
        self._order(handoff, now)

    def on_accepted(self, grant_id: str, message: PrefillAccepted, now: float) -> None:
        """The prefill scheduler has the order, or still has it."""
        handoff = self._handoffs.get(grant_id)
        if handoff is not None and message.grant_id == grant_id:
            handoff.heard_at = now
            self._deadlines.set((RENEW, grant_id), now + self._config.order_renew_s)

    def on_pulled(self, message: PagesPulled, now: float) -> Outcome | None:
        """The agent says how far the transfer is."""
        handoff = self._handoffs.get(message.grant_id)
        if handoff is None:
            return None
        handoff.heard_at = now
        # Tells may be repeated and overtaken by others: neither fact is ever taken back.
        handoff.is_pulled |= message.complete
        handoff.num_pulled = max(handoff.num_pulled, message.num_pages)
        return self._settle(handoff, now)

    def on_done(self, sender: Address, message: PrefillDone, now: float) -> Outcome | None:
        """The prefill scheduler has drawn the first token. Of an order that is over: cancelled again."""
        handoff = self._handoffs.get(message.grant_id)
        if handoff is None:
            self._cancel_unknown(sender, message.grant_id)
            return None
        # Of repeats the first counts: `transfer_s` is what the copy took beyond the drawing of the token.
        if handoff.done is None:
            handoff.done_at = now
        handoff.done = message
        return self._settle(handoff, now)

    def on_failed(self, sender: Address, message: PrefillFailed, now: float) -> Outcome | None:
        """The prefill scheduler has given the order up."""
        handoff = self._handoffs.get(message.grant_id)
        if handoff is None:
            self._cancel_unknown(sender, message.grant_id)
            return None
        return self._fail(handoff, message.code, now)

    def on_transfer_failed(self, message: TransferFailed, now: float) -> Outcome | None:
        """The agent has given the transfer up."""
        handoff = self._handoffs.get(message.grant_id)
        return None if handoff is None else self._fail(handoff, message.code, now)

    def on_closed(self, grant_id: str, message: GrantClosed) -> list[int]:
        """The agent will not write into the grant any more. Returns the pages that waited for this."""
        if message.grant_id != grant_id or not self._asks.answered((CLOSE, grant_id)):
            return []
        return self._closing.pop(grant_id)

    def on_cancelled(self, message: PrefillCancelled) -> None:
        """The prefill scheduler has nothing left of these."""
        for grant_id in message.grant_ids:
            self._cancels.answered(grant_id)

    def on_ask_failed(self, tag: Tag, code: str, now: float) -> Outcome | None:
        """One of our asks was refused or brought no answer."""
        # A tag's subject is a grant for all kinds but CANCEL.
        kind, grant_id = tag
        handoff = self._handoffs.get(grant_id)
        if kind == CANCEL:
            # The subject is the peer. What another ask to it may still bring about is asked again with the rest.
            self._cancels.failed(self._cancels.keys_of(grant_id), now)
            return None
        if kind == CLOSE:
            self._asks.failed((tag,), now)
            return None
        if handoff is None:
            return None
        if kind == OPEN:
            return self._fail(handoff, code, now) if code not in NOT_YET or self._asks.failed((tag,), now) else None
        # Progress of the copy counts as life of the prefill scheduler as well, so only a whole lease without either
        # ends it: prefilling elsewhere again costs a prompt, waiting costs at most 10 s.
        if code not in SILENCE or now - handoff.heard_at >= self._config.lease_s:
            return self._fail(handoff, code, now)
        self._deadlines.set((RENEW, grant_id), now + self._config.ask_retry_s)
        return None

    def on_renew_due(self, grant_id: str, now: float) -> None:
        """Time to ask the prefill scheduler again whether it has the order."""
        self._order(self._handoffs[grant_id], now)

    def flush(self) -> None:
        """All cancels of this turn have gathered."""
        self._cancels.flush()

    def on_retry_due(self, peer: str) -> None:
        """The pause after a failed ask to cancel is over."""
        self._cancels.retry(peer)

    def retry_now(self, peer: str) -> None:
        """A prefill scheduler is back: it is asked to cancel without a pause."""
        self._cancels.retry_now(peer)

    def on_expired(self, grant_id: str, now: float) -> Outcome:
        """The handoff took too long."""
        return self._fail(self._handoffs[grant_id], "deadline_exceeded", now)

    def on_peer_lost(self, actor_id: str, now: float) -> list[Outcome]:
        """A prefill scheduler or the agent is gone: what hangs on it fails."""
        is_agent = actor_id == self._config.agent
        hit = [one for one in self._handoffs.values() if is_agent or one.prefill == actor_id]
        return [self._fail(handoff, "peer_lost", now) for handoff in hit]

    def revoke(self, sequence: Sequence, now: float) -> Outcome:
        """The request is cancelled, or its pages are needed."""
        handoff = next(one for one in self._handoffs.values() if one.sequence is sequence)
        return self._fail(handoff, "revoked", now)

    # inside

    def _order(self, handoff: _Handoff, now: float) -> None:
        sequence = handoff.sequence
        message = PrefillOrder(
            grant_id=handoff.grant_id,
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            token_ids=sequence.token_ids.tolist(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            # What is cached here is neither sent nor, if the prefill scheduler has it too, computed.
            num_skip_tokens=handoff.lent.first * self._config.page_size,
            sampling=sequence.sampling,
            agent=self._config.agent,
            extra_key=sequence.extra_key,
            # What is left of the handoff, on every renewal: the prefill is given up no later than here.
            timeout_s=max(0.0, handoff.deadline - now),
        )
        tag = (ORDER, handoff.grant_id)
        self._outbox.add(Ask(handoff.prefill, message, self._config.ask_timeout_s, tag))

    def _settle(self, handoff: _Handoff, now: float) -> Outcome | None:
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

    def _fail(self, handoff: _Handoff, reason: str, now: float) -> Outcome:
        self._end(handoff, now)
        kv = handoff.sequence.kv
        assert kv is not None, "pages are lent"
        # All pages are good, so the prompt (seconds of computing) is kept, and one position computed again for its
        # logits.
        if handoff.is_pulled:
            handoff.sequence.receive(handoff.lent.first, self._config.page_size)
        else:
            self._keep_first(handoff)
            # Pages come to nobody who has not been told to send them: without an order none can be on the way.
            self._closing[handoff.grant_id] = kv.abort(quiesced=not handoff.is_ordered)
            handoff.sequence.drop_pages()
        self.num_failed += 1
        return HandoffFailed(handoff.sequence, reason, handoff.is_pulled)

    def _keep_first(self, handoff: _Handoff) -> None:
        """Pages that are in need not be computed again: they go into the cache, where the next try finds them."""
        kv, first, page_size = handoff.sequence.kv, handoff.lent.first, self._config.page_size
        assert kv is not None, "pages are lent"
        # Pages are pulled in their order, so the first `num_pulled` are whole, whatever happened to those behind them.
        token_ids = handoff.sequence.token_ids[first * page_size : (first + handoff.num_pulled) * page_size]
        whole = len(token_ids) // page_size * page_size
        if whole:
            if handoff.sequence.num_cached_tokens < 0:
                # What is received now must not count as found in a cache.
                handoff.sequence.num_cached_tokens = kv.num_cached_tokens
            kv.commit_first(token_ids[:whole])

    def _end(self, handoff: _Handoff, now: float) -> None:
        grant_id = handoff.grant_id
        del self._handoffs[grant_id]
        self._asks.stop((OPEN, grant_id))
        self._deadlines.clear((RENEW, grant_id))
        self._deadlines.clear((EXPIRE, grant_id))
        if not handoff.is_pulled:
            self._asks.start(
                (CLOSE, grant_id),
                self._config.agent,
                CloseGrant(grant_id=grant_id),
                timeout_s=self._config.ask_timeout_s,
                retry_s=self._config.ask_retry_s,
                give_up_at=NEVER,
            )
        if handoff.is_ordered:
            # Past that time the prefill scheduler's own lease has freed everything.
            self._cancel(handoff.prefill, grant_id, now + 2 * self._config.lease_s)

    def _cancel_unknown(self, sender: Address, grant_id: str) -> None:
        """An order that this incarnation, or the one before, no longer wants; asked once, its repeats bring more."""
        # `give_up_at` 0.0: the other end repeats its result until it is cancelled, which brings the next try by itself.
        if grant_id not in self._cancels:
            self._cancel(sender.actor_id, grant_id, 0.0)

    def _cancel(self, prefill: str, grant_id: str, give_up_at: float) -> None:
        self._cancels.add(grant_id, prefill, grant_id, retry_s=self._config.ask_retry_s, give_up_at=give_up_at)

    def _ask_to_cancel(self, prefill: str, grant_ids: list[str]) -> None:
        # A thousand ids are some tens of kilobytes, far below the limit of a frame. One ask for all of a turn: a
        # scheduler that loses its gateway cancels everything at once.
        for start in range(0, len(grant_ids), MAX_CANCELS):
            message = CancelPrefill(grant_ids=grant_ids[start : start + MAX_CANCELS])
            self._outbox.add(Ask(prefill, message, self._config.ask_timeout_s, (CANCEL, prefill)))
