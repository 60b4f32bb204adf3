"""Pages that are lent to a grant until all of them are in, or it ends: what all loans have, whatever they are for.

    open    the agent is asked for the grant, and then may write the pages
    pulled  so many of them are in; if it is all, the loan is over
    fail    the agent refuses or fails, a peer is lost, the time is over: its lender says how the sequence goes on
    give up the same, but whoever gives it up says so

Kept in the books by grant; opened and closed by `handoff/own_grants.py`.
"""

from typing import Any, Protocol, TypeVar

from kvstore.cache.block_table import ExportedPages
from kvstore.protocol import PagesPulled
from nodes.scheduler.sequence import Sequence

Kind = TypeVar("Kind", contravariant=True)


class Lender(Protocol[Kind]):
    """The queue whose loans these are."""

    def on_open(self, loan: Kind, now: float) -> None:
        """The agent may write the pages."""
        ...

    def on_pulled(self, loan: Kind, message: PagesPulled, now: float) -> None:
        """More pages are in, or the end is told again."""
        ...

    def fail(self, loan: Kind, code: str, now: float) -> None:
        """It ends without all its pages, or without what else it was for; the sequence goes on in another way."""
        ...

    def give_up(self, loan: Kind, code: str, now: float) -> None:
        """As `fail`, but what becomes of the sequence is the caller's."""
        ...


class Loan:
    """One grant of pages of one sequence; written by `OwnGrants` and by its `lender`.

    `peer` is whom it depends on beside the agent. `timeout_s` is how long it may take, from `opened_at` on.
    """

    __slots__ = (
        "grant_id", "is_pulled", "lender", "lent", "num_pulled", "opened_at", "peer", "sequence", "timeout_s",
    )  # fmt: skip

    def __init__(
        self, lender: Lender[Any], sequence: Sequence, lent: ExportedPages, now: float, timeout_s: float, peer: str = ""
    ) -> None:
        self.lender = lender
        self.sequence = sequence
        self.lent = lent
        self.opened_at = now
        self.timeout_s = timeout_s
        self.peer = peer
        # Until it is asked for.
        self.grant_id = ""
        # Of the first pages, as they come in order.
        self.num_pulled = 0
        self.is_pulled = False
