"""Grants of this scheduler's own pages at its own agent: opened, and closed when it is known that nothing writes.

    ask      asked of the agent, together with those of the same turn, again until it is silent for a lease
    open     the agent, and nobody else, may write the pages
    close    asked until answered; pages that may still be written are quarantined until then

A grant is single use: whatever becomes of it, its pages leave the sequence or stay good in it, and a retry has another
grant and other pages. Used by the handoffs of this folder, which are what pages are lent for. Pure.
"""

from collections.abc import Iterator

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import CloseGrant, GrantClosed, GrantsOpened, OpenGrant, OpenGrants, PoolHandle, StoredPages
from mesh.address import Address
from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
from nodes.scheduler.asks import ASK_RETRY_S, ASK_TIMEOUT_S, NOT_NAMED, BatchedAsks, PersistentAsks
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.events import Outbox
from nodes.scheduler.sequence import Sequence

OPEN = "open_grant"
CLOSE = "close_grant"
NEVER = float("inf")
# Size of a grant or an order on the wire, without its pages or tokens, which take up to 5 bytes each.
ITEM_BYTES = 512

# Codes that leave open whether the peer has heard and acted, so items are asked again under the same grant id.
# Any other code is the peer's refusal.
SILENCE = frozenset({"deadline_exceeded", "mailbox_full", NOT_NAMED})
# `page_granted`: the agent has not heard yet that an earlier grant of these pages is closed.
NOT_YET = SILENCE | {"page_granted"}


class OwnGrants:
    """Grants of one scheduler that are being opened or closed. `nonce` is in no other scheduler's grant ids."""

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
        self._asks = asks
        self._open_asks = BatchedAsks[OpenGrant](
            OPEN,
            outbox,
            ASK_TIMEOUT_S,
            lambda grants: OpenGrants(grants=grants),
            lambda grant: ITEM_BYTES + (10 if grant.stored is None else 25) * len(grant.pages),
        )
        self._opens = Retrier[str, OpenGrant](deadlines, OPEN, self._ask_to_open)
        self._closing: dict[str, list[int]] = {}
        self._count = 0

    @property
    def num_closing(self) -> int:
        return len(self._closing)

    def ask(
        self, lent: ExportedPages, request_id: str, timeout_s: float, now: float, stored: StoredPages | None = None
    ) -> str:
        """Have the agent asked for a grant of these pages, for `timeout_s`; returns its id."""
        self._count += 1
        # Holder and count alone would repeat if an epoch does, or if this core is made anew after a release of memory.
        # A prefill scheduler remembers cancelled ids: after such a repetition one refused 112 of 112 handoffs.
        grant_id = f"{self._holder}/{self.grant_nonce}.{self._count}"
        message = OpenGrant(
            grant_id=grant_id,
            group=self.pool.group,
            pages=lent.pages,
            generations=lent.generations,
            layout_digest=self._layout_digest,
            holder=self._holder.actor_id,
            holder_epoch=self._holder.epoch,
            timeout_s=timeout_s,
            request_id=request_id,
            stored=stored,
        )
        self._opens.add(
            grant_id,
            self._config.agent,
            message,
            retry_s=ASK_RETRY_S,
            # A lease and not the whole handoff timeout: if our own agent is silent for 10 s it is gone, and the prompt
            # is better prefilled here.
            give_up_at=now + min(timeout_s, self._config.lease_s),
        )
        return grant_id

    def on_opened(self, number: str, message: GrantsOpened, now: float) -> list[tuple[str, str | None]]:
        """The agent has answered ask `number`. Returns what is decided: ids of grants, and why one is not open."""
        refused = {refusal.grant_id: refusal.code for refusal in message.refused}
        return list(self._decided(self._open_asks.answered(number, message.opened, refused), now))

    def on_ask_failed(self, number: str, code: str, now: float) -> list[tuple[str, str | None]]:
        """Ask `number` was refused as a whole or brought no answer; that applies to each grant it named."""
        return list(self._decided(((grant_id, code) for grant_id in self._open_asks.failed(number)), now))

    def stop(self, grant_id: str) -> None:
        """It is not asked for any more."""
        self._opens.stop(grant_id)

    def take_back(self, grant_id: str, sequence: Sequence, lent: ExportedPages, num_good: int, *, idle: bool) -> None:
        """A grant ends without all its pages: the first `num_good` enter the cache, the sequence lets go of all.

        `idle`: nothing can be writing them. Otherwise those that are not good are quarantined until it is closed.
        """
        kv, page_size = sequence.kv, self._config.page_size
        assert kv is not None, "pages are lent"
        # Pages come in order, so the first `num_good` are whole, whatever happened to those after them.
        token_ids = sequence.token_ids[lent.first * page_size : (lent.first + num_good) * page_size]
        if whole := len(token_ids) // page_size * page_size:
            kv.commit_first(token_ids[:whole])
        self._close(grant_id, kv.abort(quiesced=idle))
        sequence.drop_pages()

    def has_all(self, grant_id: str) -> None:
        """Its pages are all in, and good; the agent repeats that until it is told so."""
        self._close(grant_id, [])

    def on_closed(self, grant_id: str, message: GrantClosed) -> list[int]:
        """The agent will not write into the grant any more. Returns the pages that waited for this."""
        if message.grant_id != grant_id or not self._asks.answered((CLOSE, grant_id)):
            return []
        return self._closing.pop(grant_id)

    def flush(self) -> None:
        self._opens.flush()

    def on_retry_due(self, agent: str) -> None:
        self._opens.retry(agent)

    def retry_now(self, peer: str) -> None:
        """A peer is back: asks to it that failed are repeated without a pause."""
        self._opens.retry_now(peer)

    # inside

    def _close(self, grant_id: str, pages: list[int]) -> None:
        self._closing[grant_id] = pages
        self._asks.start(
            (CLOSE, grant_id),
            self._config.agent,
            CloseGrant(grant_id=grant_id),
            timeout_s=ASK_TIMEOUT_S,
            retry_s=ASK_RETRY_S,
            give_up_at=NEVER,
        )

    def _decided(self, answers: Iterator[tuple[str, str | None]], now: float) -> Iterator[tuple[str, str | None]]:
        for grant_id, code in answers:
            # It may have ended while the agent answered; then it is being closed already.
            if grant_id not in self._opens:
                continue
            # Until that lease is over, silence is not a failure, nor is an earlier grant that is just being closed.
            if code in NOT_YET and not self._opens.failed((grant_id,), now):
                continue
            self._opens.stop(grant_id)
            yield grant_id, code

    def _ask_to_open(self, agent: str, grants: list[OpenGrant]) -> None:
        self._open_asks.ask(agent, {grant.grant_id: grant for grant in grants})
