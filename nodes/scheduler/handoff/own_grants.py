"""Grants of this scheduler's own pages at its own agent: opened, and closed when it is known that nothing writes.

    ask      asked of the agent, together with those of the same turn, again until it is silent for a lease
    open     the agent, and nobody else, may write the pages
    close    asked until answered; pages that may still be written are quarantined until then

A grant is single use: whatever becomes of it, its pages leave the sequence or stay good in it, and a retry has another
grant and other pages. What it is for is its lender's affair: to hand off a prefill, or to read from the disk. Pure.
"""

from collections.abc import Iterable

from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantsOpened,
    OpenGrant,
    OpenGrants,
    PagesPulled,
    StoredPages,
    TransferFailed,
)
from mesh.calls.retrier import Retrier
from nodes.scheduler.asks import ASK_RETRY_S, ASK_TIMEOUT_S, NOT_NAMED, BatchedAsks
from nodes.scheduler.books import Books
from nodes.scheduler.loans import Loan

OPEN = "open_grant"
CLOSE = "close_grant"
EXPIRE = "loan"
DEADLINE = "deadline_exceeded"
"""The code of the agent, and ours, for pages that did not come in time."""
NEVER = float("inf")
# Size of a grant or an order on the wire, without its pages or tokens, which take up to 5 bytes each.
ITEM_BYTES = 512

# Codes that leave open whether the peer has heard and acted, so items are asked again under the same grant id.
# Any other code is the peer's refusal.
SILENCE = frozenset({"deadline_exceeded", "mailbox_full", NOT_NAMED})
# `page_granted`: the agent has not heard yet that an earlier grant of these pages is closed.
NOT_YET = SILENCE | {"page_granted"}


class OwnGrants:
    """Grants of one scheduler that are being opened or closed. `nonce` is in no other scheduler's grant ids.

    `opens` are those that the agent is asked for, until it is known whether they are open.
    """

    def __init__(self, books: Books, nonce: str) -> None:
        self._books = books
        self._layout_digest = books.pool.layout.digest
        self.grant_nonce = nonce
        self._open_asks = BatchedAsks[OpenGrant](
            OPEN,
            books.outbox,
            ASK_TIMEOUT_S,
            lambda grants: OpenGrants(grants=grants),
            lambda grant: ITEM_BYTES + (10 if grant.stored is None else 25) * len(grant.pages),
        )
        self.opens = Retrier[str, OpenGrant](books.deadlines, OPEN, self._ask_to_open)
        self._closing: dict[str, list[int]] = {}
        self._count = 0

    @property
    def num_closing(self) -> int:
        return len(self._closing)

    def lend(self, loan: Loan, now: float, stored: StoredPages | None = None) -> None:
        """Have the agent asked for a grant of these pages: from here on it is among the loans."""
        books, lent = self._books, loan.lent
        self._count += 1
        # Holder and count alone would repeat if an epoch does, or if this core is made anew after a release of memory.
        # A prefill scheduler remembers cancelled ids: after such a repetition one refused 112 of 112 handoffs.
        grant_id = loan.grant_id = f"{books.address}/{self.grant_nonce}.{self._count}"
        books.loans[grant_id] = loan
        books.deadlines.set((EXPIRE, grant_id), now + loan.timeout_s)
        message = OpenGrant(
            grant_id=grant_id,
            group=books.pool.group,
            pages=lent.pages,
            generations=lent.generations,
            layout_digest=self._layout_digest,
            holder=books.address.actor_id,
            holder_epoch=books.address.epoch,
            timeout_s=loan.timeout_s,
            request_id=loan.sequence.request_id,
            stored=stored,
        )
        self.opens.add(
            grant_id,
            books.config.agent,
            message,
            retry_s=ASK_RETRY_S,
            # A lease and not the whole handoff timeout: if our own agent is silent for 10 s it is gone, and the prompt
            # is better prefilled here.
            give_up_at=now + min(loan.timeout_s, books.config.lease_s),
        )

    def on_opened(self, number: str, message: GrantsOpened, now: float) -> None:
        """The agent has answered ask `number`."""
        refused = {refusal.grant_id: refusal.code for refusal in message.refused}
        self._decide(self._open_asks.answered(number, message.opened, refused), now)

    def on_ask_failed(self, number: str, code: str, now: float) -> None:
        """Ask `number` was refused as a whole or brought no answer; that applies to each grant it named."""
        self._decide(((grant_id, code) for grant_id in self._open_asks.failed(number)), now)

    def on_pulled(self, message: PagesPulled, now: float) -> None:
        loan = self._books.loans.get(message.grant_id)
        if loan is not None:
            # Tells may be repeated and overtaken by others: neither fact is ever taken back.
            loan.is_pulled |= message.complete
            loan.num_pulled = max(loan.num_pulled, message.num_pages)
            loan.lender.on_pulled(loan, message, now)

    def on_transfer_failed(self, message: TransferFailed, now: float) -> None:
        if (loan := self._books.loans.get(message.grant_id)) is not None:
            loan.lender.fail(loan, message.code, now)

    def on_expired(self, grant_id: str, now: float) -> None:
        loan = self._books.loans[grant_id]
        loan.lender.fail(loan, DEADLINE, now)

    def on_peer_lost(self, actor_id: str, now: float) -> None:
        is_agent = actor_id == self._books.config.agent
        for loan in [one for one in self._books.loans.values() if is_agent or one.peer == actor_id]:
            loan.lender.fail(loan, "peer_lost", now)

    def end(self, loan: Loan) -> None:
        """It is over, and its grant is not asked for any more. That the agent hears of it is another step."""
        del self._books.loans[loan.grant_id]
        self.opens.stop(loan.grant_id)
        self._books.deadlines.clear((EXPIRE, loan.grant_id))

    def take_back(self, loan: Loan, *, idle: bool) -> None:
        """It ends without all its pages: the first that are in enter the cache, the sequence lets go of all.

        `idle`: nothing can be writing them. Otherwise those that are not good are quarantined until it is closed.
        """
        sequence, first, page_size = loan.sequence, loan.lent.first, self._books.config.page_size
        kv = sequence.kv
        assert kv is not None, "pages are lent"
        # Pages come in order, so the first `num_pulled` are whole, whatever happened to those after them.
        token_ids = sequence.token_ids[first * page_size : (first + loan.num_pulled) * page_size]
        if whole := len(token_ids) // page_size * page_size:
            kv.commit_first(token_ids[:whole])
        self._close(loan.grant_id, kv.abort(quiesced=idle))
        sequence.drop_pages()

    def has_all(self, loan: Loan) -> None:
        """Its pages are all in, and good; the agent repeats that until it is told so."""
        self._close(loan.grant_id, [])

    def on_closed(self, grant_id: str, message: GrantClosed) -> None:
        """The agent will not write into the grant any more: pages that waited for this are free."""
        if message.grant_id != grant_id or not self._books.asks.answered((CLOSE, grant_id)):
            return
        if pages := self._closing.pop(grant_id):
            self._books.cache.clear_quarantined(pages)
            self._books.is_admission_due = True

    def flush(self) -> None:
        self.opens.flush()

    # inside

    def _close(self, grant_id: str, pages: list[int]) -> None:
        self._closing[grant_id] = pages
        self._books.asks.start(
            (CLOSE, grant_id),
            self._books.config.agent,
            CloseGrant(grant_id=grant_id),
            timeout_s=ASK_TIMEOUT_S,
            retry_s=ASK_RETRY_S,
            give_up_at=NEVER,
        )

    def _decide(self, answers: Iterable[tuple[str, str | None]], now: float) -> None:
        for grant_id, code in answers:
            # It may have ended while the agent answered; then it is being closed already.
            if grant_id not in self.opens:
                continue
            # Until that lease is over, silence is not a failure, nor is an earlier grant that is just being closed.
            if code in NOT_YET and not self.opens.failed((grant_id,), now):
                continue
            self.opens.stop(grant_id)
            loan = self._books.loans[grant_id]
            if code is None:
                loan.lender.on_open(loan, now)
            else:
                loan.lender.fail(loan, code, now)

    def _ask_to_open(self, agent: str, grants: list[OpenGrant]) -> None:
        self._open_asks.ask(agent, {grant.grant_id: grant for grant in grants})
