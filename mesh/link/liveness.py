"""Which linked peers are silent: those that are watched send heartbeats, the others are pinged when suspected. Pure.

    not suspected --suspect--> pinged on both channels --answered, or something else came--> not suspected
                                  `--a channel stays silent until its deadline--> lost

Owned by `mesh/link/core.py`, which says when a deadline is due and what has come.
"""

from typing import TYPE_CHECKING, Final

from mesh.link.peer import Meta, Peer
from mesh.options import SystemOptions
from mesh.runtime.deadlines import Deadlines
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Channel
from mesh.wire.frames import SYSTEM_CODEC, Ping
from mesh.wire.header import SYSTEM_FLAG, Verb

if TYPE_CHECKING:
    from mesh.link.core import LinkCore

# In hello timeouts: bulk may be before a ping on the data channel.
_PATIENCE: Final = {Channel.CONTROL: 1.0, Channel.DATA: 3.0}


class Liveness:
    """Of all peers of one incarnation; deadlines are kept in `deadlines` as (name of the channel, actor id)."""

    def __init__(self, core: "LinkCore", options: SystemOptions, metrics: Metrics, deadlines: Deadlines) -> None:
        self._options = options
        self._metrics = metrics
        self._deadlines = deadlines
        self._core = core
        self._last_beat = float("inf")

    def suspect(self, actor_id: str, now: float) -> None:
        """A peer has not answered: it is pinged unless it is already; nothing happens without a link.

        Ordinary actors send each other no heartbeats, and a connection may die without a word (a host gone, a cut
        cable). This costs nothing while nobody waits in vain.
        """
        peer = self._core.peers.get(actor_id)
        # Messages to itself cross no connection that could be silent.
        if peer is None or peer.route is None or peer.pings or actor_id == self._core.address.actor_id:
            return
        body = SYSTEM_CODEC.encode(Ping())
        for channel in Channel:
            timeout_s = _PATIENCE[channel] * self._options.hello_timeout_s
            meta = Meta(self._core.next_id(), 0, int(timeout_s * 1e6), SYSTEM_FLAG)
            peer.pings[channel] = meta.message_id, peer.heard(channel)
            self._deadlines.set((channel.name, actor_id), now + timeout_s)
            self._core.say(peer.route, channel, Verb.ASK, body, (), meta, "")

    def suspect_far(self, now: float) -> None:
        """Suspect all peers of other hosts that are reached by connections of theirs.

        Without it an ask on such a connection would fail at its deadline only.
        """
        for peer in list(self._core.peers.values()):
            is_far = peer.member is not None and peer.member.host != self._options.host
            if is_far and peer.route is not None and not peer.route.link.dialed:
                self.suspect(peer.address.actor_id, now)

    def beat(self, now: float) -> None:
        """Called every heartbeat: who is watched and has said nothing between as many as are allowed is lost."""
        # Who was stopped or starved sees everybody as silent when it wakes: after a late beat the count begins anew.
        overslept = now - self._last_beat > 2 * self._options.heartbeat_s
        self._last_beat = now
        for peer in [peer for peer in self._core.peers.values() if peer.is_watched]:
            before, peer.heard_by_beat = peer.heard_by_beat, -1 if overslept else sum(map(peer.heard, Channel))
            peer.silent_beats = peer.silent_beats + 1 if before == peer.heard_by_beat >= 0 else 0
            if peer.silent_beats >= self._options.allowed_misses:
                self._metrics.count("mesh_heartbeats_lost_total")
                self._core.lose(peer.address, "its heartbeats stopped")

    def due(self, peer: Peer, channel: Channel) -> None:
        """The time of a ping is over. Whatever has come on its channel meanwhile says as much as its answer."""
        _, heard = peer.pings.pop(channel)
        if heard == peer.heard(channel):
            self._metrics.count("mesh_silent_peers_total")
            self._core.lose(peer.address, "it does not answer")

    def end_ping(self, peer: Peer, channel: Channel) -> None:
        """A ping is answered, or was never taken by the transport."""
        peer.pings.pop(channel, None)
        self._deadlines.clear((channel.name, peer.address.actor_id))
