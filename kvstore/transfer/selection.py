"""Transports between agents as the operator chose them: for each kind of memory those to try, in this order.

The next one is used for a pair of agents only where the operator has named one, and only when the one before could not
be made to work at all: the two ends did not meet, nothing was moved. From then on, until that agent is lost, their
transfers go by the next at once. It is said: `fallbacks` is what the agent announces, and `changed` is called. A pair
that breaks in the middle of its work ends its transfers, as it does without a second choice.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.errors import PagesElsewhere, PairUnmade, TransferError
from kvstore.pool.device import memory_kind
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import OfferPair, PagesSent, PoolHandle, SendPages
from kvstore.transfer.base import Completion, Descriptor, Direction, Peer, SourcePages
from kvstore.transfer.paired.orders import RemotePeer
from kvstore.transfer.paired.transport import PairTransport, Reply

# What is wrong with a pool or its agent is wrong over any transport.
_NOT_OF_THE_TRANSPORT: Final = frozenset({"unknown_group", "source_changed", "layout_mismatch", "source_lost"})


class _Route(NamedTuple):
    """Agent, source's and destination's device."""

    agent: str
    source: str
    destination: str


class _Posted(NamedTuple):
    """A transfer, and over which choice of its route it goes; all that posting it again takes."""

    handle: int
    route: _Route
    choice: int
    region: int
    peer: RemotePeer
    descriptors: Sequence[Descriptor]
    deadline: float
    source: SourcePages | None


class ChosenTransport:
    """`Transport` to pools of other agents; see the module. `choices` by kind of memory, none of them empty."""

    name = "remote"

    def __init__(self, choices: Mapping[str, Sequence[PairTransport]], changed: Callable[[], None]) -> None:
        self._choices = choices
        self._changed = changed
        self.transports: list[PairTransport] = []
        for chosen in choices.values():
            self.transports += [one for one in chosen if not any(one is known for known in self.transports)]
        # For each region: the pool's device, and its region number in each choice.
        self._regions: list[tuple[str, list[int]]] = []
        self._posted: dict[tuple[str, int], _Posted] = {}
        self._handles: dict[int, tuple[str, int]] = {}
        self._fallen: dict[_Route, tuple[int, str]] = {}
        self._last_handle = 0
        self.num_fallbacks = 0

    @property
    def fallbacks(self) -> dict[str, str]:
        """By agent: what its pages come by instead of what, and why."""
        return {route.agent: text for route, (_, text) in self._fallen.items()}

    @property
    def device_failure(self) -> str:
        """See `PairTransport`."""
        return next((one.device_failure for one in self.transports if one.device_failure), "")

    @property
    def num_posted(self) -> int:
        """See `Transport`."""
        return sum(transport.num_posted for transport in self.transports)

    @property
    def pause_s(self) -> float:
        """See `Transport`."""
        return min((transport.pause_s for transport in self.transports if transport.num_posted), default=0.0)

    def moves(self, device: str) -> bool:
        """Whether pages of other agents on a device, or in host memory, are reached by one of these."""
        return memory_kind(device) in self._choices

    def register(self, pool: PagePool) -> int:
        """See `Transport`."""
        device = pool.info.device
        self._regions.append((device, [one.register(pool) for one in self._chosen(device)]))
        return len(self._regions) - 1

    def export(self, region: int) -> str:
        """See `Transport`."""
        device, regions = self._regions[region]
        return self._chosen(device)[0].export(regions[0])

    def connect(self, address: str) -> Peer:
        """See `Transport`. Use `reach`."""
        raise TransferError("unsupported", f"pools of other agents are reached by their agents, not by {address}")

    def reach(self, handle: PoolHandle) -> RemotePeer:
        """A foreign pool as its agent describes it. Raises PagesElsewhere."""
        return self._chosen(handle.device)[0].reach(handle)

    def disconnect(self, peer: Peer) -> None:
        """See `Transport`."""
        for transport in self.transports:
            transport.disconnect(peer)

    def post(
        self,
        direction: Direction,
        region: int,
        peer: Peer,
        descriptors: Sequence[Descriptor],
        deadline: float,
        source: SourcePages | None = None,
    ) -> int:
        """See `Transport`."""
        if direction is not Direction.READ or not isinstance(peer, RemotePeer):
            raise TransferError("unsupported", "between agents pages are only read, of pools that were reached")
        device, _ = self._regions[region]
        route = _Route(peer.agent, peer.info.device, device)
        choice, _ = self._fallen.get(route, (0, ""))
        self._post(_Posted(self._last_handle + 1, route, choice, region, peer, descriptors, deadline, source))
        self._last_handle += 1
        return self._last_handle

    def poll(self, now: float) -> list[Completion]:
        """See `Transport`. What did not begin over one choice is posted over the next."""
        ended: list[Completion] = []
        for transport in self.transports:
            if not transport.num_posted:
                continue
            for completion in transport.poll(now):
                posted = self._take(transport, completion)
                following = self._following(posted, completion.error) if now < posted.deadline else None
                if following is None:
                    ended.append(completion._replace(handle=posted.handle))
                    continue
                try:
                    self._post(following)
                except TransferError as error:
                    ended.append(Completion(posted.handle, 0, error))
        return ended

    def cancel(self, handle: int) -> None:
        """See `Transport`."""
        key = self._handles.get(handle)
        if key is not None:
            posted = self._posted[key]
            self._chosen(posted.route.destination)[posted.choice].cancel(key[1])

    def drain(self) -> list[Completion]:
        """See `Transport`."""
        return [
            completion._replace(handle=self._take(transport, completion).handle)
            for transport in self.transports
            for completion in transport.drain()
        ]

    def close(self) -> None:
        """See `Transport`."""
        self.drain()
        for transport in self.transports:
            transport.close()
        self._regions.clear()

    # what other agents say

    def take_offer(self, agent: str, offer: OfferPair) -> None:
        """See `PairTransport`. Raises TransferError."""
        for transport in self.transports:
            if transport.name == offer.transport:
                transport.take_offer(agent, offer)
                return
        have = ", ".join(transport.name for transport in self.transports)
        raise TransferError("not_served", f"this agent has {have}, not {offer.transport}: configure agents alike")

    def withdraw(self, group: str) -> None:
        """See `PairTransport`."""
        for transport in self.transports:
            transport.withdraw(group)

    def is_sending(self, group: str) -> bool:
        """See `PairTransport`."""
        return any(transport.is_sending(group) for transport in self.transports)

    def take_order(self, agent: str, order: SendPages, reply: Reply) -> None:
        """See `PairTransport`."""
        knowing = (transport for transport in self.transports if transport.knows(order.pair))
        next(knowing, self.transports[0]).take_order(agent, order, reply)

    def sent(self, answer: PagesSent) -> None:
        """See `PairTransport`."""
        for transport in self.transports:
            transport.sent(answer)

    def pair_failed(self, pair: str, code: str, why: str) -> None:
        """See `PairTransport`."""
        for transport in self.transports:
            transport.pair_failed(pair, code, why)

    def agent_lost(self, agent: str) -> None:
        """See `PairTransport`. When it is back, the first choice is tried again."""
        for transport in self.transports:
            transport.agent_lost(agent)
        left = {route: fallen for route, fallen in self._fallen.items() if route.agent != agent}
        if len(left) != len(self._fallen):
            self._fallen = left
            self._changed()

    # inside

    def _chosen(self, device: str) -> Sequence[PairTransport]:
        chosen = self._choices.get(memory_kind(device))
        if chosen is None:
            raise PagesElsewhere(f"no transport is configured for pages on {device} of another agent")
        return chosen

    def _post(self, posted: _Posted) -> None:
        """Post over its choice, or over one that follows where that fails at once. Raises TransferError."""
        _, regions = self._regions[posted.region]
        transport = self._chosen(posted.route.destination)[posted.choice]
        try:
            number = transport.post(
                Direction.READ,
                regions[posted.choice],
                posted.peer,
                posted.descriptors,
                posted.deadline,
                posted.source,
            )
        except PairUnmade as error:
            following = self._following(posted, error)
            if following is None:
                raise
            self._post(following)
            return
        self._posted[transport.name, number] = posted
        self._handles[posted.handle] = transport.name, number

    def _following(self, posted: _Posted, error: TransferError | None) -> _Posted | None:
        """The same transfer over the next choice, if its end is one that the next choice may mend."""
        chosen = self._chosen(posted.route.destination)
        if not isinstance(error, PairUnmade) or error.code in _NOT_OF_THE_TRANSPORT:
            return None
        if posted.choice + 1 >= len(chosen):
            return None
        old, new = chosen[posted.choice], chosen[posted.choice + 1]
        if self._fallen.get(posted.route, (0, ""))[0] <= posted.choice:
            text = f"{new.name} instead of {old.name}: {error.message} ({error.code})"
            self._fallen[posted.route] = posted.choice + 1, text
            self.num_fallbacks += 1
            self._changed()
        return posted._replace(choice=posted.choice + 1)

    def _take(self, transport: PairTransport, completion: Completion) -> _Posted:
        posted = self._posted.pop((transport.name, completion.handle))
        del self._handles[posted.handle]
        return posted
