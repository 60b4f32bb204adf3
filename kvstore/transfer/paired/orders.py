"""Messages between two agents about pages that one sends and the other receives, and the checks that each makes.

Used by `transport.py`; `ControlChannel` is what the agent's actor implements.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.errors import KVError, TransferError
from kvstore.pool.header import HANDLE_FIELDS, PoolInfo
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import OfferPair, PagesSent, PoolHandle, SendPages
from kvstore.transfer.base import Transport

Reply = Callable[[PagesSent], None]


class Paired(Protocol):
    """A transport whose two ends talk through their agents. Each method but `knows` is a message from the other end."""

    name: str

    def knows(self, pair: str) -> bool:
        """Whether a pair of this name is one of this transport."""
        ...

    def take_offer(self, agent: str, offer: OfferPair) -> None:
        """Another agent wants pages of a pool of this one. Raises TransferError."""
        ...

    def take_order(self, agent: str, order: SendPages, reply: Reply) -> None:
        """Another agent has begun to receive; `reply` is called once."""
        ...

    def sent(self, answer: PagesSent) -> None:
        """The other end's answer to an order: whether it has sent the pages."""
        ...

    def pair_failed(self, pair: str, code: str, why: str) -> None:
        """The other end refused or closed the pair, or cannot be reached any more."""
        ...


class ControlChannel(Protocol):
    """What an agent gives its transports: clock, name, and messages to others, whose answers come back to `Paired`."""

    @property
    def name(self) -> str:
        """A name that no other agent and no other incarnation of this one has."""
        ...

    def attach(self, transport: Paired) -> None:
        """From now on, pass to `transport` what other agents say about its pairs."""
        ...

    def now(self) -> float:
        """The time, on the scale of deadlines."""
        ...

    def offer(self, agent: str, offer: OfferPair) -> None:
        """Ask `agent` for a pair; on a refusal call `pair_failed`."""
        ...

    def order(self, agent: str, order: SendPages) -> None:
        """Ask `agent` for pages; pass the answer to `sent`, or call `pair_failed`."""
        ...

    def close(self, agent: str, pair: str) -> None:
        """Tell `agent` that a pair is given up."""
        ...


class Inbox:
    """Passes what other agents say about pairs to the transport concerned."""

    def __init__(self) -> None:
        self.transports: list[Paired] = []

    def take_offer(self, agent: str, offer: OfferPair) -> None:
        """Raises TransferError, `not_served` for a transport that this agent does not have."""
        for transport in self.transports:
            if transport.name == offer.transport:
                transport.take_offer(agent, offer)
                return
        have = ", ".join(transport.name for transport in self.transports) or "none"
        raise TransferError(
            "not_served",
            f"the source's agent has no transport {offer.transport} (it has: {have}): configure both agents alike",
        )

    def take_order(self, agent: str, order: SendPages, reply: Reply) -> None:
        """Pass on that the other end receives; if no transport knows the pair, the first one refuses."""
        knowing = (transport for transport in self.transports if transport.knows(order.pair))
        next(knowing, self.transports[0]).take_order(agent, order, reply)

    def sent(self, answer: PagesSent) -> None:
        for transport in self.transports:
            transport.sent(answer)

    def pair_failed(self, pair: str, code: str, why: str) -> None:
        for transport in self.transports:
            transport.pair_failed(pair, code, why)


class RemotePeer:
    """A pool of another agent, known only from that agent's description."""

    def __init__(self, handle: PoolHandle, transport: Transport) -> None:
        self.agent = handle.agent
        self.transport = transport
        self.info = PoolInfo(**{name: getattr(handle, name) for name in HANDLE_FIELDS})

    def generations(self, pages: Sequence[int]) -> None:
        """None: the page table is in another agent's memory, so that agent compares."""


def fits(parts: Sequence[tuple[int, int]], info: PoolInfo) -> bool:
    # Read once: it is computed from the layout, and an order may have 65,536 parts.
    end = info.pages_bytes
    return all(size > 0 and 0 <= offset <= end - size for offset, size in parts)


def compare_generations(pool: PagePool, order: SendPages, when: str) -> None:
    """Raises TransferError `source_lost` (no such page) or `stale_pages`; PoolClosed. `when` is for the text."""
    try:
        found = pool.table().peek_generations(order.pages)
    except ValueError as error:
        raise TransferError(
            "source_lost", f"the source's page table could not be read {when} the copy: {error}"
        ) from None
    if found != order.generations:
        raise TransferError("stale_pages", f"source pages did not have the announced generations {when} the copy")


def sent_answer(order: SendPages, error: KVError | None, *, is_sent: bool) -> PagesSent:
    code, message = (error.code, error.message) if error is not None else ("", "")
    return PagesSent(pair=order.pair, number=order.number, is_sent=is_sent, code=code, message=message)
