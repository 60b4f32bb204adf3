"""What two agents say to each other about pages that one sends and the other receives, and what each checks of it.

Used by `transport.py`; `Courier` is what the agent's actor implements.
"""

from collections.abc import Sequence
from typing import Protocol

from kvstore.errors import KVError, TransferError
from kvstore.pool.header import PoolInfo
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import OfferPair, PagesSent, PoolHandle, SendPages


class Courier(Protocol):
    """The agent to its transport: clock, name, and messages to others, whose answers come back as calls."""

    @property
    def name(self) -> str:
        """What no other agent and no other incarnation of this one is called."""
        ...

    def now(self) -> float:
        """The time, on the scale of deadlines."""
        ...

    def offer(self, agent: str, offer: OfferPair) -> None:
        """Ask; on a refusal call `pair_failed`."""
        ...

    def order(self, agent: str, order: SendPages) -> None:
        """Ask; give the answer to `sent`, or call `pair_failed`."""
        ...

    def close(self, agent: str, pair: str) -> None:
        """Tell that a pair is given up."""
        ...


class RemotePeer:
    """A pool of another agent, known by what that agent says of it."""

    def __init__(self, handle: PoolHandle) -> None:
        self.agent = handle.agent
        self.info = PoolInfo(
            group=handle.group,
            num_pages=handle.num_pages,
            layout=handle.layout,
            incarnation=handle.incarnation,
            device=handle.device,
        )

    def generations(self, pages: Sequence[int]) -> None:
        """See `Peer`: not readable from here."""


def fits(parts: Sequence[tuple[int, int]], info: PoolInfo) -> bool:
    """Whether all parts, offset and number of bytes, lie inside a pool's pages."""
    return all(size > 0 and 0 <= offset <= info.pages_bytes - size for offset, size in parts)


def compare_generations(pool: PagePool, order: SendPages, when: str) -> None:
    """Raises TransferError unless the pages have the generations that were announced."""
    try:
        found = pool.table().peek_generations(order.pages)
    except ValueError as error:
        raise TransferError(
            "source_lost", f"the source's page table could not be read {when} the copy: {error}"
        ) from None
    if found != order.generations:
        raise TransferError("stale_pages", f"source pages are not of the announced generations {when} the copy")


def sent_answer(order: SendPages, error: KVError | None, *, is_sent: bool) -> PagesSent:
    """The answer to an order."""
    code, message = (error.code, error.message) if error is not None else ("", "")
    return PagesSent(pair=order.pair, number=order.number, is_sent=is_sent, code=code, message=message)
