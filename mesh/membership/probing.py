"""A suspected peer is asked whether it is there. Owned by `ActorSystem`.

Ordinary actors send each other no heartbeats, and a connection may die without a word (a host gone, a cut cable). When
an ask has run out, or a subscription is not confirmed, both lanes are pinged: if one stays silent the peer is lost, so
that whoever waits for it knows, and the next message dials anew. It costs nothing while nobody waits in vain.
"""

import asyncio

from mesh.address import Address
from mesh.calls.asking import Asking
from mesh.errors import CallError, DeadlineExceeded
from mesh.link.links import Links
from mesh.link.peer import Peer
from mesh.runtime.boundary import Boundary
from mesh.transport.base import Lane
from mesh.wire.frames import Ping


class Probing:
    """At most one probe per peer at a time. Bulk may be before the ping on the data lane, so it gets longer."""

    def __init__(self, links: Links, asking: Asking, boundary: Boundary, timeout_s: float) -> None:
        self._links = links
        self._asking = asking
        self._boundary = boundary
        self._timeouts_s = {Lane.CONTROL: timeout_s, Lane.DATA: 3 * timeout_s}
        self._suspected: set[Address] = set()
        self._is_open = True

    def close(self) -> None:
        """Probe nobody any more."""
        self._is_open = False

    def suspect(self, address: Address) -> None:
        """A peer has not answered; nothing happens if it is being probed, lost already, or this actor itself."""
        peer = self._links.get(address.actor_id)
        if peer is None or peer.address != address or address == self._links.address:
            return
        if address in self._suspected or not self._is_open:
            return
        self._suspected.add(address)
        self._boundary.spawn(self._probe(peer), "probe")

    async def _probe(self, peer: Peer) -> None:
        try:
            silent = await asyncio.gather(*(self._is_silent(peer, lane) for lane in Lane))
        finally:
            self._suspected.discard(peer.address)
        if any(silent):
            self._links.metrics.count("mesh_silent_peers_total")
            self._links.lose(peer.address, "it does not answer")

    async def _is_silent(self, peer: Peer, lane: Lane) -> bool:
        num_heard = peer.num_heard[lane]
        try:
            await self._asking.ask(peer.address.actor_id, Ping(), timeout_s=self._timeouts_s[lane], lane=lane)
        except DeadlineExceeded:
            return peer.num_heard[lane] == num_heard
        except CallError:
            return False
        return False
