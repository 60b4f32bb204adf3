"""Actors as ZeroMQ peers: two ROUTERs bound, two DEALERs per dialed peer, one of each per channel.

    where the ROUTERs listen          `mesh/transport/zeromq_binding.py`
    how connections are identified    `mesh/transport/zeromq_links.py`
    who may connect, with keys        `mesh/transport/zeromq_zap.py`

What ZeroMQ would hide is made visible: a message it does not accept (`ROUTER_MANDATORY`) waits in a bounded outbox, and
a connection is never re-established silently. The monitor of each dialed socket reports when its connection is gone;
then the socket is closed, so that messages waiting in it never reach another process that binds the address next.

Used by `mesh/run.py` and `cli`; `mesh/system.py` sees only the `Transport` protocol. One context per transport: sockets
that share one do not see each other's disconnects reliably.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from mesh.address import Address, Endpoint
from mesh.errors import NO_HANDSHAKE, BindError, FrameRefused, LimitReached
from mesh.runtime.process_limits import require_room
from mesh.transport.base import Buffer, Channel, Link, Listener
from mesh.transport.names import Names, name_in, with_address
from mesh.transport.zeromq_binding import (
    Bound,
    ZeroMQOptions,
    bind,
    endpoint_of,
    how_to_be_allowed,
    is_far,
    prepare_dial,
)
from mesh.transport.zeromq_links import (
    FROM_NOBODY,
    MAX_ADDRESS_BYTES,
    NOBODY,
    Accepted,
    Dialed,
    link_of,
    new_identity,
)
from mesh.transport.zeromq_socket import LoopSocket, Outbox
from mesh.transport.zeromq_zap import Door

_NO_KEY_IN_COMMON: Final = (
    "the handshake failed: the peer has another key than the one known here, only one side has keys, or it has ended"
)
_GONE: Final = {
    zmq.Event.DISCONNECTED: "disconnected",
    zmq.Event.CLOSED: "could not connect",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: _NO_KEY_IN_COMMON,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _NO_KEY_IN_COMMON,
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the key of this host is not allowed there, not yet or no longer",
}
_ENDS: Final = sum(int(event) for event in _GONE)
_NO_HANDSHAKE: Final = int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
_SOCKETS_OF_A_LINK: Final = 2 * 3
"""Per channel: the socket itself, the one that receives its monitor's events, and the one that ZeroMQ sends them by.
The bound sockets take as many."""
_RESERVED_SOCKETS: Final = 2 * _SOCKETS_OF_A_LINK
"""A closed socket counts until ZeroMQ's thread has dealt with it."""
_SPARE_DESCRIPTORS: Final = 16
"""Twice what a link takes. The check takes 30 microseconds, a dial a millisecond."""
_OWN_DESCRIPTORS: Final = 32
"""16 for the context and two sockets bound to ipc and tcp, with their monitors; as many as a dial asks for besides."""
_OWN_THREADS: Final = 2
"""ZeroMQ's thread for input and output, and the one that ends sockets."""
_NEVER_MS: Final = 86_400_000
"""A day: a DEALER's lost connection has long been noticed and its socket closed before ZeroMQ makes it again."""
_MAX_ACCEPTED: Final = 8192
"""Twice `MAX_PEERS`: a peer that dials again is accepted before its old connection has been noticed to be gone."""
_STOP_LINGER_MS: Final = 50
"""Byes and last answers leave a local socket in less than 1 ms. The loop is blocked meanwhile, at every actor's end."""
_BACKLOG_RETRY_S: Final = 0.02
"""50 looks a second, only while something waits; a peer that has made room loses 20 ms at most."""
# Bounded because a ROUTER receives from all peers in turn, and the others may never stop sending.
_MAX_REST: Final = 8192


class ZeroMQTransport:
    """Implements `mesh.transport.base.Transport`. Raises LimitReached: ZeroMQ would abort the process."""

    def __init__(self, options: ZeroMQOptions) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        require_room(_OWN_DESCRIPTORS, _OWN_THREADS)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_OF_A_LINK * (options.max_peers + 1) + _RESERVED_SOCKETS)
        self._address = NOBODY
        self._listener: Listener | None = None
        self._routers: list[LoopSocket] = []
        self._dialed: dict[Link, Dialed] = {}
        self._accepted: dict[Link, Accepted] = {}
        self._links_by_identity: dict[bytes, Link] = {}
        self._backlog: tuple[dict[Link, None], dict[Link, None]] = ({}, {})
        self._retry: asyncio.TimerHandle | None = None
        self._num_monitors = 0
        self._names = Names(self._loop)
        self._door: Door | None = None

    # Transport

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        if len(str(address).encode()) > MAX_ADDRESS_BYTES:
            raise BindError(f"{address} is too long for a routing id (at most {MAX_ADDRESS_BYTES} bytes)")
        self._address, self._listener = address, listener
        if self._options.keys is not None:
            self._door = Door(self._loop, self._context, self._options.keys, self._refused, self._keys_changed)
        try:
            return endpoint_of(*[self._bind(address, channel) for channel in Channel])
        except BindError:
            await self.stop()
            raise

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        """Connect both channels, at once unless a name must be looked up; if this fails, the link soon goes down."""
        assert self._listener is not None, "dialed before start or after stop"
        link = Link(peer, dialed=True)
        dialed = self._dialed[link] = Dialed(link, self._outboxes())
        if name := name_in(endpoint.control):
            self._names.look_up(name).add_done_callback(partial(self._looked_up, dialed, endpoint))
        else:
            self._connect_both(dialed, endpoint)
        return link

    def _looked_up(self, dialed: Dialed, endpoint: Endpoint, found: asyncio.Future[str]) -> None:
        if self._dialed.get(dialed.link) is not dialed:
            return
        if (error := found.exception()) is not None:
            self._gone(dialed, str(error))
            return
        address = found.result()
        dialed.by_name = name_in(endpoint.control), address
        self._connect_both(
            dialed, Endpoint(with_address(endpoint.control, address), with_address(endpoint.data, address))
        )

    def _connect_both(self, dialed: Dialed, endpoint: Endpoint) -> None:
        assert self._listener is not None, "dialed after stop"
        on_frames, identity = self._listener.on_frames, new_identity(self._address)
        try:
            if self._door is not None and is_far(endpoint.control):
                dialed.server_key = self._door.guard.server_key(dialed.link.peer.actor_id)
        except FrameRefused as refusal:
            self._loop.call_soon(self._gone, dialed, refusal.message)
            return
        for channel, where in zip(Channel, (endpoint.control, endpoint.data), strict=True):
            try:
                # ZeroMQ aborts the process if it runs out of descriptors half way.
                require_room(_SPARE_DESCRIPTORS, 0)
                self._connect(dialed, channel, where, identity, partial(on_frames, dialed.link, channel))
            except (zmq.ZMQError, OSError, LimitReached) as error:
                # No descriptor or socket is left, or the address is invalid. What is sent before `_gone` is lost too.
                why = error.message if isinstance(error, LimitReached) else error
                self._loop.call_soon(self._gone, dialed, f"{where} cannot be dialed: {why}")
                break

    def _connect(
        self,
        dialed: Dialed,
        channel: Channel,
        where: str,
        identity: bytes,
        on_message: Callable[[list[Buffer]], None],
    ) -> None:
        socket = self._socket(zmq.DEALER)
        prepare_dial(socket, where, self._options.keys.own if self._options.keys else None, dialed.server_key)
        # Not -1, which, like IMMEDIATE, would discard what had arrived before a disconnect.
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        try:
            channel_socket = LoopSocket(self._loop, socket, on_message, partial(_flush, dialed, channel))
        except OSError:
            socket.close(0)
            raise
        dialed.sockets.append(channel_socket)
        events = _ENDS | zmq.Event.HANDSHAKE_SUCCEEDED if dialed.by_name else _ENDS
        channel_socket.watch(int(events), self._monitor_name(), partial(self._on_event, dialed))
        socket.connect(where)

    @property
    def accepted(self) -> list[Link]:
        """Connections of those that have dialed this actor, as far as they are not known to be gone."""
        return list(self._accepted)

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        if link.dialed:
            dialed = self._dialed.get(link)
            if dialed is None:
                return False
            outbox = dialed.outboxes[channel]
            has_socket = channel < len(dialed.sockets)
            return (not outbox and has_socket and dialed.sockets[channel].send(parts)) or outbox.add(parts)
        accepted = self._accepted.get(link)
        if accepted is None:
            return False
        outbox = accepted.outboxes[channel]
        if not outbox and self._route(accepted, channel, parts):
            return True
        if not outbox.add(parts):
            return False
        self._backlog[channel][link] = None
        self._retry_soon()
        return True

    def close_link(self, link: Link) -> None:
        """Forget a connection. A ROUTER cannot close one; the listener must refuse what still comes on it."""
        if link.dialed:
            dialed = self._dialed.pop(link, None)
            if dialed is not None:
                self._close(dialed)
        else:
            accepted = self._accepted.pop(link, None)
            if accepted is not None:
                self._links_by_identity.pop(accepted.identity, None)
                for backlog in self._backlog:
                    backlog.pop(link, None)

    async def stop(self) -> None:
        """Close all sockets; blocks at most `_STOP_LINGER_MS` for sent messages to leave."""
        self._listener = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._names.close()
        if self._door is not None:
            self._door.close()
        for dialed in self._dialed.values():
            dialed.close(_STOP_LINGER_MS)
        for router in self._routers:
            router.close(_STOP_LINGER_MS)
        self._dialed.clear()
        self._accepted.clear()
        self._context.term()
        if self._options.run_directory is not None:
            # libzmq 4.3.5 leaves the files of ipc sockets behind: one for each bound channel, control first.
            for channel, _ in zip(Channel, self._routers, strict=False):
                self._options.run_directory.socket(self._address, channel).unlink(missing_ok=True)

    # Incoming

    def _routed(self, channel: Channel, parts: list[Buffer]) -> None:
        """A message arrived at a ROUTER; its first part is the sender's identity."""
        identity = parts.pop(0)
        assert isinstance(identity, bytes), "the identity from a ROUTER is not bytes"
        user = bytes(parts.pop(0)) if self._door is not None else b""
        link = self._links_by_identity.get(identity) or self._identify(identity, user)
        if self._door is not None and link is not FROM_NOBODY:
            try:
                self._door.guard.vet(user, link.peer.actor_id)
            except FrameRefused as refusal:
                self._refused(link, refusal)
                return
        if self._listener is not None:
            self._listener.on_frames(link, channel, parts)

    def _on_router_event(self, channel: Channel, event: list[Buffer]) -> None:
        what = parse_monitor_message([bytes(part) for part in event])
        if self._listener is None:
            return
        if what["event"] == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._listener.on_refused(FROM_NOBODY, FrameRefused(NO_HANDSHAKE, "it ended before the handshake"))
        elif what["event"] != zmq.Event.DISCONNECTED:
            # The other end does not speak ZeroMQ; an empty message has it refused and counted.
            self._listener.on_frames(FROM_NOBODY, channel, ())
        elif what["endpoint"].startswith(b"tcp:"):
            # Only for tcp: within a host, the supervisor reports which process has ended.
            self._listener.on_some_link_down()

    def _on_event(self, dialed: Dialed, event: list[Buffer]) -> None:
        what = zmq.Event(parse_monitor_message([bytes(part) for part in event])["event"])
        if what == zmq.Event.HANDSHAKE_SUCCEEDED:
            dialed.by_name = None
            return
        reason = _GONE.get(what, "gone")
        if what == zmq.Event.HANDSHAKE_FAILED_AUTH and (do := how_to_be_allowed(self._options)):
            reason = f"{reason}: {do}"
        self._gone(dialed, reason)

    def _gone(self, dialed: Dialed, reason: str) -> None:
        """A dialed connection has ended; what had arrived before is still passed on."""
        for socket in dialed.sockets:
            socket.receive_rest()
        if self._dialed.get(dialed.link) is not dialed:
            return
        del self._dialed[dialed.link]
        self._close(dialed)
        if self._listener is not None:
            self._listener.on_link_down(dialed.link, reason)

    def _close(self, dialed: Dialed) -> None:
        if dialed.by_name is not None:
            self._names.failed(*dialed.by_name)
        dialed.close(0)

    def _identify(self, identity: bytes, user: bytes) -> Link:
        link = link_of(identity)
        if link is FROM_NOBODY or len(self._accepted) >= _MAX_ACCEPTED:
            return FROM_NOBODY
        self._links_by_identity[identity] = link
        self._accepted[link] = Accepted(link, identity, user, self._outboxes())
        return link

    def _refused(self, link: Link, refusal: FrameRefused) -> None:
        if self._listener is not None:
            self._listener.on_refused(link, refusal)

    def _keys_changed(self) -> None:
        assert self._door is not None, "keys changed, but there are none"
        guard = self._door.guard
        for accepted in list(self._accepted.values()):
            if guard.host_of_user(accepted.user) is None:
                self.close_link(accepted.link)
                if self._listener is not None:
                    self._listener.on_link_down(accepted.link, "the key of its host was revoked")
        for dialed in list(self._dialed.values()):
            if dialed.server_key and not guard.is_current(dialed.server_key):
                self._gone(dialed, "the key of its host was revoked")

    # Outgoing

    def _flush_accepted(self, channel: Channel) -> None:
        for link in list(self._backlog[channel]):
            accepted = self._accepted[link]
            outbox = accepted.outboxes[channel]
            outbox.flush(partial(self._route, accepted, channel))
            if not outbox:
                self._backlog[channel].pop(link, None)

    def _route(self, accepted: Accepted, channel: Channel, parts: Sequence[Buffer]) -> bool:
        try:
            return self._routers[channel].send((accepted.identity, *parts))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if not accepted.is_cut:
                accepted.is_cut = True
                self._loop.call_soon(self._accepted_gone, accepted)
            return True  # accepted, and lost with the link, whose end is reported

    def _accepted_gone(self, accepted: Accepted) -> None:
        """An accepted connection takes no more; pass on what had arrived on it, then report its end."""
        for router in self._routers:
            router.receive_rest(_MAX_REST)
        if self._accepted.get(accepted.link) is accepted:
            self.close_link(accepted.link)
            if self._listener is not None:
                self._listener.on_link_down(accepted.link, "it closed its connection")

    def _retry_soon(self) -> None:
        """A ROUTER does not always signal that a peer accepts more; while anything waits, also retry on a timer."""
        if self._retry is None:
            self._retry = self._loop.call_later(_BACKLOG_RETRY_S, self._retry_backlog)

    def _retry_backlog(self) -> None:
        self._retry = None
        for channel in Channel:
            self._flush_accepted(channel)
        if any(self._backlog):
            self._retry_soon()

    # Sockets

    def _bind(self, address: Address, channel: Channel) -> Bound:
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Otherwise messages of a connection whose routing id is in use would be neither read nor discarded. A routing
        # id contains a nonce that nobody else knows.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            bound = bind(socket, self._options, address, channel)
        except BindError:
            socket.close(0)
            raise
        on_message, on_turn = partial(self._routed, channel), partial(self._flush_accepted, channel)
        router = LoopSocket(self._loop, socket, on_message, on_turn, tells_users=self._door is not None)
        events = _NO_HANDSHAKE | int(zmq.Event.DISCONNECTED)
        router.watch(events, self._monitor_name(), partial(self._on_router_event, channel))
        self._routers.append(router)
        return bound

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        options = self._options
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, options.high_water_mark)
        socket.setsockopt(zmq.RCVHWM, options.high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, options.limits.max_message_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(options.handshake_timeout_s * 1000))
        return socket

    def _monitor_name(self) -> str:
        self._num_monitors += 1
        return f"monitor-{self._num_monitors}"

    def _outboxes(self) -> tuple[Outbox, Outbox]:
        most, largest = self._options.max_outbox_messages, self._options.max_outbox_bytes
        return Outbox(most, largest), Outbox(most, largest)


def _flush(dialed: Dialed, channel: Channel) -> None:
    outbox = dialed.outboxes[channel]
    if outbox:
        outbox.flush(dialed.sockets[channel].send)
