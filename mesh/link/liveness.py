"""Detects silent peers: watched peers send heartbeats, all others are pinged when suspected. Pure.

    not suspected --suspect--> pinged on both channels --answered, or something else arrived--> not suspected
                                  `--a channel stays silent until its deadline--> lost

Owned by `mesh/link/core.py`, which reports due deadlines and arriving answers.
"""

from typing import Final

from mesh.link.outputs import Outgoing
from mesh.link.peer import Meta, Peer
from mesh.options import SystemOptions
from mesh.runtime.deadlines import Deadlines
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Channel
from mesh.wire.frames import SYSTEM_CODEC, Ping
from mesh.wire.header import SYSTEM_FLAG, Verb

# In hello timeouts. On the data channel a ping may have to wait behind bulk.
_PATIENCE: Final = {Channel.CONTROL: 1.0, Channel.DATA: 3.0}


_ALLOWED_MISSES: Final = 3
"""One beat may be late and one lost before a living peer is taken for lost."""


class Liveness:
    """Liveness of all `peers` of one incarnation; keys in `deadlines` are (channel name, actor id)."""

    def __init__(
        self, outgoing: Outgoing, peers: dict[str, Peer], options: SystemOptions, metrics: Metrics, deadlines: Deadlines
    ) -> None:
        self._outgoing = outgoing
        self._peers = peers
        self._options = options
        self._metrics = metrics
        metrics.begin("mesh_heartbeats_lost_total", "mesh_silent_peers_total")
        self._deadlines = deadlines
        self._last_beat = float("inf")

    def suspect(self, actor_id: str, now: float) -> None:
        """A peer has not answered: ping it, unless a ping is pending; a no-op without a link.

        Ordinary actors send each other no heartbeats, and a connection may die silently (a host gone, a cut cable).
        This way nothing is spent on liveness as long as every answer comes in time.
        """
        peer = self._peers.get(actor_id)
        # An actor's messages to itself cross no connection that could fall silent.
        if peer is None or peer.route is None or peer.pings or actor_id == self._outgoing.address.actor_id:
            return
        body = SYSTEM_CODEC.encode(Ping())
        for channel in Channel:
            timeout_s = _PATIENCE[channel] * self._options.hello_timeout_s
            meta = Meta(self._outgoing.next_id(), 0, int(timeout_s * 1e6), SYSTEM_FLAG)
            peer.pings[channel] = meta.message_id, peer.heard(channel)
            self._deadlines.set((channel.name, actor_id), now + timeout_s)
            self._outgoing.say(peer.route, channel, Verb.ASK, body, (), meta, "")

    def suspect_far(self, now: float) -> None:
        """Suspect peers on other hosts that dialed their route: an ask there would fail only at its deadline."""
        for peer in list(self._peers.values()):
            is_far = peer.member is not None and peer.member.host != self._options.host
            if is_far and peer.route is not None and not peer.route.link.dialed:
                self.suspect(peer.address.actor_id, now)

    def beat(self, now: float) -> list[Peer]:
        """Called every heartbeat; returns the watched peers that sent nothing for three beats in a row."""
        # A process that was stopped or starved finds every peer silent when it wakes: a late beat restarts the count.
        overslept = now - self._last_beat > 2 * self._options.heartbeat_s
        self._last_beat = now
        silent: list[Peer] = []
        for peer in [peer for peer in self._peers.values() if peer.is_watched]:
            before, peer.heard_by_beat = peer.heard_by_beat, -1 if overslept else sum(map(peer.heard, Channel))
            peer.silent_beats = peer.silent_beats + 1 if before == peer.heard_by_beat >= 0 else 0
            if peer.silent_beats >= _ALLOWED_MISSES:
                self._metrics.count("mesh_heartbeats_lost_total")
                silent.append(peer)
        return silent

    def due(self, peer: Peer, channel: Channel) -> bool:
        """A ping's deadline has passed. Whether its channel was silent: any message since counts as an answer."""
        _, heard = peer.pings.pop(channel)
        if heard != peer.heard(channel):
            return False
        self._metrics.count("mesh_silent_peers_total")
        return True

    def end_ping(self, peer: Peer, channel: Channel) -> None:
        peer.pings.pop(channel, None)
        self._deadlines.clear((channel.name, peer.address.actor_id))
