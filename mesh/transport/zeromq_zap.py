"""Who may connect from other hosts: ZeroMQ asks by its authentication protocol (ZAP), and tags each frame accordingly.

    libzmq's thread --public key of a connection--> Door --host and key, or refusal--> libzmq's thread
    a frame of that connection --its User-Id--> Guard: is it still allowed, and is its sender on that host

Owned by `mesh/transport/zeromq.py` where a host has keys; the list is `mesh/runtime/key_files.py`.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from mesh.address import Address
from mesh.errors import UNKNOWN_KEY, FrameRefused
from mesh.runtime.key_files import KeyRing
from mesh.transport.base import Buffer, Link
from mesh.transport.guard import LOCAL, Guard
from mesh.transport.zeromq_socket import LoopSocket

ZAP_DOMAIN: Final = b"kvmesh"
"""The ZAP domain of all our sockets whose connections are vetted; they need not be distinguished."""
_ENDPOINT: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_NUM_FIELDS: Final = 6
"""Of a ZAP request (RFC 27/ZAP), from version to mechanism; credentials follow."""
POLL_S: Final = 1.0
"""How long a revoked key may still be accepted here after this host's list has changed. Nearly every look finds the
same list, and each wakes the process."""


class Door:
    """Answers ZAP requests for one context; calls `refused` as `Listener.on_refused`, `changed` when the keys have."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: KeyRing,
        refused: Callable[[Link, FrameRefused], None],
        changed: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._refused = refused
        self._changed = changed
        self.guard = Guard(keys)
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        # libzmq finds it by this name within the context; it must exist before any socket that needs it is bound.
        socket.bind(_ENDPOINT)
        self._socket = LoopSocket(loop, socket, self._on_request, _nothing)
        self._timer = loop.call_later(POLL_S, self._poll)

    def close(self) -> None:
        self._timer.cancel()
        self._socket.close()

    def _on_request(self, parts: list[Buffer]) -> None:
        """ZeroMQ asks about one connection: version, request, domain, address, routing id, mechanism, credentials."""
        identity, _, version, request, *fields = [bytes(part) for part in parts]
        answer = (identity, b"", version, request)
        if version != _VERSION or len(fields) < _NUM_FIELDS - 2:
            self._socket.send((*answer, b"500", b"not understood", b"", b""))
            return
        _, address, _, mechanism, *credentials = fields
        user = LOCAL if mechanism == b"NULL" else self._user_of(z85.encode(credentials[0]).decode())
        if user is not None:
            self._socket.send((*answer, b"200", b"", user, b""))
            return
        self._socket.send((*answer, b"400", b"this key is not allowed", b"", b""))
        where, key = address.decode(errors="replace"), z85.encode(credentials[0]).decode()
        self._refused(
            Link(Address(where, 0), dialed=False),
            FrameRefused(
                UNKNOWN_KEY, f"{where} has the unknown key '{key}': run `meshctl keys add` if the host is yours"
            ),
        )

    def _user_of(self, key: str) -> bytes | None:
        user = self.guard.user_of(key)
        if user is None:
            # It may have been added since the last look: a script starts a host right after `meshctl keys add`.
            self._look()
            user = self.guard.user_of(key)
        return user

    def _poll(self) -> None:
        self._timer = self._loop.call_later(POLL_S, self._poll)
        self._look()

    def _look(self) -> None:
        if self.guard.is_changed():
            self._changed()


def _nothing() -> None:
    """`on_turn` has nothing to do: answers are small and accepted at once."""
