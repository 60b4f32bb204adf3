"""Who may be linked: hello and welcome on dialed and accepted connections, and pauses after failed dials. Pure.

    dialed      hello on both channels --welcome on both--> up, the backoff is reset
                   `--no welcome in time, connection down, refused--> failed, a pause before the next dial
    accepted    hello on a channel: welcome on it, then the messages that waited there

Owned by `mesh/link/core.py`, which makes and ends the connections and reports what arrives and what has ended.
"""

from typing import Final

from mesh.address import Address
from mesh.errors import FrameRefused, Unreachable
from mesh.link.backoff import ReconnectBackoff
from mesh.link.outputs import Frames, Linked, Outgoing
from mesh.link.peer import SYSTEM, Connection, Phase, answer_to
from mesh.link.refusals import check_greeting
from mesh.membership.view import Directory
from mesh.options import SystemOptions
from mesh.runtime.deadlines import Deadlines
from mesh.transport.base import Channel
from mesh.wire.frames import SYSTEM_CODEC, Hello, Welcome
from mesh.wire.header import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, Header, Verb

WELCOME: Final = "welcome"
"""Kind of the deadlines of dialed connections: (`WELCOME`, actor id)."""


class Handshake:
    """The handshakes of one incarnation: deadlines of dials in progress, and pauses after failed ones."""

    def __init__(self, outgoing: Outgoing, options: SystemOptions, directory: Directory, deadlines: Deadlines) -> None:
        self._outgoing = outgoing
        self._options = options
        self._introduce, self._vet = directory.introduce, directory.vet
        self._deadlines = deadlines
        self._backoff = ReconnectBackoff(options.retry_min_s, options.retry_max_s)

    def check_pause(self, address: Address, now: float) -> None:
        pause_s = self._backoff.remaining_s(address, now)
        if pause_s:
            raise Unreachable(f"{address} could not be reached; the next attempt is in {pause_s:.2f} s")

    def failing(self, now: float) -> dict[Address, float]:
        """As `ReconnectBackoff.failing`."""
        return self._backoff.failing(now)

    def begin(self, connection: Connection, now: float, trace: str) -> None:
        peer = connection.link.peer
        self._deadlines.set((WELCOME, peer.actor_id), now + self._options.hello_timeout_s)
        # The listener has proved nothing yet.
        me = self._introduce(peer, is_proved=False)
        hello = Hello(min_version=MIN_PROTOCOL_VERSION, max_version=PROTOCOL_VERSION, member=me)
        body = SYSTEM_CODEC.encode(hello)
        for channel in Channel:
            self._outgoing.say(connection, channel, Verb.HELLO, body, (), SYSTEM, trace)

    def vet_hello(self, peer: Address, parts: Frames) -> bool:
        """Whether the sender has proved its identity; raises `FrameRefused`. Changes no state."""
        return self._vet(check_greeting(parts, Hello, peer).member)

    def greeted(self, connection: Connection, channel: Channel, header: Header, parts: Frames) -> None:
        """A hello or welcome arrived: open its channel; raises `FrameRefused`."""
        link, peer, state = connection.link, connection.peer, connection.channels[channel]
        is_hello = header.verb == Verb.HELLO
        greeting = check_greeting(parts, Hello if is_hello else Welcome, link.peer)
        if is_hello == link.dialed:
            raise FrameRefused("unexpected", "only the dialing side sends hello, and only the other side welcome")
        peer.is_proved = self._vet(greeting.member)
        peer.member = greeting.member
        state.phase = Phase.OPEN
        if is_hello:
            me = self._introduce(link.peer, is_proved=peer.is_proved)
            body = SYSTEM_CODEC.encode(Welcome(version=PROTOCOL_VERSION, member=me))
            self._outgoing.say(connection, channel, Verb.WELCOME, body, (), answer_to(header), header.trace)
        while state.waiting:
            self._outgoing.say(connection, channel, *state.waiting.popleft())
        if connection.is_up:
            self._outgoing.outputs.append(Linked(link.peer))
        self.end_if_up(connection)

    def end_if_up(self, connection: Connection) -> None:
        link = connection.link
        if link.dialed and connection.is_up and self._deadlines.clear((WELCOME, link.peer.actor_id)):
            self._backoff.succeeded(link.peer)

    def failed(self, connection: Connection, now: float) -> None:
        if connection.link.dialed and not connection.is_up:
            self._backoff.failed(connection.link.peer, now)
