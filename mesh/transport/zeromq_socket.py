"""One ZeroMQ socket on an asyncio or uvloop event loop: receives in batches, sends without blocking.

The socket's file descriptor is edge-triggered: it says only that *something* may have happened since commands were last
processed, and every send and receive processes commands. So the socket's state is checked again after each batch and,
once per turn of the loop, after sends. `zmq.asyncio` makes a future per message instead, which halves the throughput.

Used by `mesh/transport/zeromq.py` only.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import zmq

from mesh.transport.base import Buffer

ZERO_COPY_BYTES: Final = 16 << 10
"""From this size on, memory is lent to ZeroMQ; below it, copying costs less than tracking."""
BATCH: Final = 128
"""Messages received before other callbacks of the loop get their turn."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = zmq.EVENTS
_POLLIN: Final = int(zmq.POLLIN)


class Outbox:
    """Messages that ZeroMQ does not accept at the moment, in order; bounded by number and bytes."""

    __slots__ = ("_max_bytes", "_max_messages", "_messages", "_num_bytes")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[Sequence[Buffer], int]] = deque()
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, parts: Sequence[Buffer]) -> bool:
        size = _size(parts)
        if len(self._messages) >= self._max_messages or self._num_bytes + size > self._max_bytes:
            return False
        self._messages.append((parts, size))
        self._num_bytes += size
        return True

    def flush(self, send: Callable[[Sequence[Buffer]], bool]) -> bool:
        """Send messages as long as they are accepted. Returns whether any was."""
        sent = False
        messages = self._messages
        while messages and send(messages[0][0]):
            sent = True
            self._num_bytes -= messages.popleft()[1]
        return sent


class LoopSocket:
    """A socket whose messages go to `on_message`; `on_turn` is called when it may accept more again.

    `on_message` gets all parts: small ones as bytes, large ones as views of ZeroMQ's memory. With `tells_users`, the
    second part is the User-Id of the connection (`mesh/transport/zeromq_zap.py`), empty if that was not vetted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[Buffer]], None],
        on_turn: Callable[[], None],
        *,
        tells_users: bool = False,
    ) -> None:
        self._tells_users = tells_users
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._on_turn = on_turn
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_scheduled = False
        self._has_sent = False
        self._is_open = True
        self._monitor: LoopSocket | None = None
        self._lent: deque[zmq.MessageTracker] = deque()
        # Bound once: attribute look-up on a socket is slow, and the outer `send` only adds arguments not used here.
        self._send_part: Callable[[Buffer, int], object] = super(zmq.Socket, socket).send
        self._receive_part: Callable[[int, bool], Any] = socket.recv
        self._has_identities = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._get = socket.getsockopt
        socket.copy_threshold = ZERO_COPY_BYTES
        loop.add_reader(self._fd, self._on_readable)
        self.look_again()

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send a whole message; False if it is not accepted now. Raises `zmq.ZMQError` (EHOSTUNREACH: no such peer)."""
        self._has_sent = True
        if not self._is_scheduled:
            self.look_again()
        send_part = self._send_part
        left = len(parts)
        try:
            for part in parts:
                left -= 1
                flags = _MORE if left else _NOBLOCK
                if len(part) < ZERO_COPY_BYTES and not isinstance(part, memoryview):
                    send_part(part, flags)
                else:
                    self._send_large(part, flags)
        except zmq.Again:
            return False
        return True

    def watch(self, events: int, name: str, on_event: Callable[[list[Buffer]], None]) -> None:
        """Pass socket events (`zmq.Event`) to `on_event`; `name` is unique in the context. Call before connecting."""
        self._socket.monitor(f"inproc://{name}", events)
        try:
            pair = cast("zmq.Context[zmq.Socket[bytes]]", self._socket.context).socket(zmq.PAIR)
        except zmq.ZMQError:
            self._socket.monitor(None, 0)
            raise
        # Without a limit: ZeroMQ's thread, and so all connections, would block while a monitor accepts no more events.
        pair.setsockopt(zmq.RCVHWM, 0)
        pair.connect(f"inproc://{name}")
        self._monitor = LoopSocket(self._loop, pair, on_event, _nothing)

    def look_again(self) -> None:
        if not self._is_scheduled and self._is_open:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def receive_rest(self, most: float = math.inf) -> None:
        """Receive everything that has arrived, or about `most` messages; called when a connection is gone."""
        while self._is_open and most > 0 and not self._receive(BATCH):
            most -= BATCH
        # Receiving these may have consumed the event that would announce the next message.
        self.look_again()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket and its monitor, if any; messages already sent have `linger_ms` to leave. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._fd)
            if self._monitor is not None:
                # In this order: ZeroMQ's thread would block for ever sending an event to a closed monitor.
                self._socket.monitor(None, 0)
                self._monitor.close()
            self._socket.close(linger_ms)
            self._lent.clear()

    @property
    def num_lent(self) -> int:
        """The number of parts whose memory ZeroMQ may still be reading."""
        lent = self._lent
        while lent and lent[0].done:
            lent.popleft()
        return len(lent)

    def _send_large(self, part: Buffer, flags: int) -> None:
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        if size < ZERO_COPY_BYTES:
            self._send_part(part, flags)
            return
        tracker = self._socket.send(part, flags, copy=False, track=True)
        self._lent.append(tracker)
        if len(self._lent) > BATCH:
            _ = self.num_lent

    def _on_readable(self) -> None:
        # Receive the first message now and the rest in the next turn, so that the task it wakes runs before the socket
        # is polled again; for a lone message that poll finds nothing and takes a twentieth of a round trip. If the
        # message was answered at once, no task was woken, so go on now.
        was_scheduled, self._is_scheduled, self._has_sent = self._is_scheduled, True, False
        finished = self._receive(1)
        self._is_scheduled = was_scheduled
        if finished:
            if self._is_open:
                self._on_turn()
        elif not self._has_sent:
            self.look_again()
        elif not was_scheduled:
            self._turn()

    def _turn(self) -> None:
        self._is_scheduled = False
        if not self._is_open:
            return
        if int(self._get(_EVENTS)) & _POLLIN and not self._receive(BATCH):
            self.look_again()
        if self._is_open:
            self._on_turn()

    def _receive(self, count: int) -> bool:
        """Pass on up to `count` messages. Returns whether there are no more."""
        receive, on_message, has_identities = self._receive_part, self._on_message, self._has_identities
        try:
            for _ in range(count):
                parts: list[Buffer] = []
                try:
                    if has_identities:
                        # An identity is always followed by more parts, so it can be received as bytes; for other parts
                        # only a frame tells whether more follow.
                        parts.append(receive(_NOBLOCK, True))
                    frame = receive(_NOBLOCK, False)
                except zmq.Again:
                    return True
                if self._tells_users:
                    parts.append(_user_of(frame))
                parts.append(frame.bytes)
                while frame.more:
                    frame = receive(_NOBLOCK, False)
                    parts.append(frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer)
                on_message(parts)
                if not self._is_open:
                    return True
        except BaseException:
            # A bug in a handler must not leave messages behind that no event will announce again.
            self._is_scheduled = False
            self.look_again()
            raise
        return False


def _user_of(frame: "zmq.Frame") -> bytes:
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _nothing() -> None:
    """`on_turn` of a monitor, which never sends."""


def _size(parts: Sequence[Buffer]) -> int:
    size = 0
    for part in parts:
        size += part.nbytes if isinstance(part, memoryview) else len(part)
    return size
