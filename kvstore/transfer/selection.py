"""All transports of an agent as one: kind of memory, agent and operator decide which of them moves a pool's pages.

Between pools of one agent, and wherever the operator has named nothing else, pages are mapped (`near`, by kind of
memory). Pages of other agents come over the transports that were named (`far`): for each kind of memory, those to try,
in order. A pair of agents falls back to the next one only if the operator has named one, and only if the one before did
not work at all: the two ends could not connect, and nothing was moved. From then on, until that agent is lost, their
transfers use the next one at once. A fallback is reported: the agent announces `fallbacks`, and `changed` is called. A
pair that breaks in the middle of its work ends its transfers, as it does without a second choice.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from kvstore.errors import PagesElsewhere, PairUnmade, TransferError
from kvstore.pool.device import memory_kind
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Peer, Transfer, Transport
from kvstore.transfer.paired.orders import RemotePeer

# Errors of a pool or its agent, which would be the same over any transport.
_NOT_OF_THE_TRANSPORT: Final = frozenset({"unknown_group", "source_changed", "layout_mismatch", "source_lost"})


class _Route(NamedTuple):
    """Agent, source's and destination's device."""

    agent: str
    source: str
    destination: str


class Selection(Transport):
    """See the module. `near` and `far` (choices in order) are by kind of memory; `changed` is called on fallbacks.

    The `far` transports of one kind of memory share their peers, so either all are paired or there is only one.
    """

    name = "selection"

    def __init__(
        self,
        near: Mapping[str, Transport],
        far: Mapping[str, Sequence[Transport]] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.far = far or {}
        self.kinds = frozenset([*near, *self.far])
        self._near = near
        self._changed = changed
        # Each once: one transport may be named for both kinds of memory.
        self.transports = list(dict.fromkeys(chain(near.values(), *self.far.values())))
        self._fallen: dict[_Route, tuple[Transport, str]] = {}
        self.num_fallbacks = 0
        self.pulled_bytes: Counter[str] = Counter({transport.name: 0 for transport in self.transports})

    @property
    def names(self) -> list[str]:
        return sorted(transport.name for transport in self.transports)

    @property
    def fallbacks(self) -> dict[str, str]:
        """By agent: which transport its pages come over, instead of which, and why."""
        return {route.agent: text for route, (_, text) in self._fallen.items()}

    @property
    def device_failure(self) -> str:
        return next((transport.device_failure for transport in self.transports if transport.device_failure), "")

    @property
    def refused(self) -> Counter[str]:
        refused = Counter[str]()
        for transport in self.transports:
            # Not by `+`, which leaves out what is 0.
            refused.update(transport.refused)
        return refused

    @property
    def num_posted(self) -> int:
        return sum(transport.num_posted for transport in self.transports)

    @property
    def pause_s(self) -> float:
        return min((transport.pause_s for transport in self.transports if transport.num_posted), default=0.0)

    def join(self, transport: Transport) -> None:
        """One more, that this process connects to by itself: of its peers pages come over it, and of no others."""
        self.transports.append(transport)
        # From the start, so that the first bytes are seen as a rise.
        self.pulled_bytes[transport.name] += 0

    def register(self, pool: PagePool) -> None:
        for transport in (self._near_to(pool.info.device), *self._far_from(pool.info.device)):
            transport.register(pool)

    def connect(self, handle: PoolHandle) -> Peer:
        # The first choice makes the peer for all of them: peers of paired transports have the same content.
        for transport in self._far_from(handle.device):
            return transport.connect(handle)
        return self._near_to(handle.device).connect(handle)

    def connect_own(self, pool: PagePool) -> Peer:
        """Read from one of the agent's own pools, mapped like any other. Raises PoolError."""
        return self._near_to(pool.info.device).connect(handle_of(pool))

    def disconnect(self, peer: Peer) -> None:
        for transport in self.transports:
            transport.disconnect(peer)

    def post(self, transfer: Transfer) -> None:
        """Raises TransferError; PairUnmade if none of the remaining choices could begin it."""
        transfer.transport, _ = self._fallen.get(_route_of(transfer), (transfer.peer.transport, ""))
        self._post(transfer)

    def poll(self, now: float) -> list[Transfer]:
        """A transfer that did not begin over one choice is posted over the next."""
        ended: list[Transfer] = []
        for transport in self.transports:
            if transport.num_posted:
                polled = [transfer for transfer in transport.poll(now) if not self._goes_on(transfer, now)]
                self.pulled_bytes[transport.name] += sum(transfer.num_bytes for transfer in polled)
                ended += polled
        return ended

    def cancel(self, transfer: Transfer) -> None:
        transfer.transport.cancel(transfer)

    def drain(self) -> list[Transfer]:
        return [transfer for transport in self.transports for transfer in transport.drain()]

    def close(self) -> None:
        for transport in self.transports:
            transport.close()

    def withdraw(self, group: str) -> None:
        for transport in self.transports:
            transport.withdraw(group)

    def is_sending(self, group: str) -> bool:
        return any(transport.is_sending(group) for transport in self.transports)

    def agent_lost(self, agent: str) -> None:
        """Forget its fallbacks: when it is back, the first choice is tried again."""
        for transport in self.transports:
            transport.agent_lost(agent)
        left = {route: fallen for route, fallen in self._fallen.items() if route.agent != agent}
        if len(left) != len(self._fallen):
            self._fallen = left
            self._changed()

    # inside

    def _near_to(self, device: str) -> Transport:
        transport = self._near.get(memory_kind(device))
        if transport is None:
            raise PagesElsewhere(
                f"pages on {device} cannot be copied by this agent, which has only {', '.join(self.names)}: "
                "the pools of groups that exchange pages must all be on devices, or all in host memory"
            )
        return transport

    def _far_from(self, device: str) -> Sequence[Transport]:
        return self.far.get(memory_kind(device), ())

    def _post(self, transfer: Transfer) -> None:
        try:
            transfer.transport.post(transfer)
        except PairUnmade as error:
            if not self._fall_back(transfer, error):
                raise
            self._post(transfer)

    def _goes_on(self, transfer: Transfer, now: float) -> bool:
        """Whether a transfer that has ended was begun again, over the next choice."""
        error = transfer.error
        if error is None or now >= transfer.deadline or not self._fall_back(transfer, error):
            return False
        # A clean record for the next choice: the caller of `poll` sees no end in between.
        transfer.error = None
        try:
            self._post(transfer)
        except TransferError as problem:
            transfer.error = problem
        return transfer.error is None

    def _fall_back(self, transfer: Transfer, error: TransferError) -> bool:
        """Move a transfer to the next choice, if that may help after this error. Returns whether it was moved."""
        # Only if nothing was moved: a pair that broke during its work says nothing against the choice.
        if not isinstance(error, PairUnmade) or error.code in _NOT_OF_THE_TRANSPORT:
            return False
        old, new = transfer.transport, _after(self._far_from(transfer.pool.info.device), transfer.transport)
        if new is None:
            return False
        transfer.transport = new
        route = _route_of(transfer)
        fallen = self._fallen.get(route)
        # Several transfers may fail at once; the route changes once, and that is reported once.
        if fallen is None or fallen[0] is old:
            self._fallen[route] = new, f"{new.name} instead of {old.name}: {error.message} ({error.code})"
            self.num_fallbacks += 1
            self._changed()
        return True


def _route_of(transfer: Transfer) -> _Route:
    agent = transfer.peer.agent if isinstance(transfer.peer, RemotePeer) else ""
    return _Route(agent, transfer.peer.info.device, transfer.pool.info.device)


def _after(choices: Iterable[Transport], last: Transport) -> Transport | None:
    following = iter(choices)
    return next(following, None) if any(choice is last for choice in following) else None
