"""Who may connect from other hosts: ZeroMQ asks by its authentication protocol (ZAP), and each frame says whose it is.

    libzmq's thread --public key of who connects--> Door --host and key, or no--> libzmq's thread
    a frame of that connection --its User-Id--> Door: is it still allowed, and is the sender of that host

A User-Id is `HOST PUBLIC_KEY` of a connection over tcp, and `local` of one over ipc, which no key is needed for. The
list of keys may change while connections live, so each frame is looked at: what a revoked key still sends is refused.

Owned by `mesh/transport/zeromq.py` where a host has keys; the list is `mesh/runtime/key_files.py`.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from mesh.address import Address, host_of
from mesh.errors import UNKNOWN_KEY, WRONG_KEY, FrameRefused
from mesh.membership.keys import AllowedHost
from mesh.membership.proof import REGISTRY
from mesh.runtime.key_files import KeyRing
from mesh.transport.base import Buffer, Link
from mesh.transport.zeromq_socket import LoopSocket

ZAP_DOMAIN: Final = b"kvmesh"
"""Of sockets that have connections vetted; which of ours it is makes no difference."""
LOCAL: Final = b"local"
_ENDPOINT: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_NUM_FIELDS: Final = 6
_POLL_S: Final = 0.5
"""A heartbeat: so long a key that was revoked is taken on this host once its copy of the list has changed."""
_MAX_VETTED: Final = 8192


class Door:
    """Answers for one context's sockets.

    Args:
        refused: is told of connections, as by `Listener.on_refused`.
        changed: is called when the list of keys is another.
    """

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
        self._hosts: dict[bytes, AllowedHost] = {}
        self._vetted: set[tuple[bytes, str]] = set()
        self._read_list()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        # libzmq finds it by this name, within the context; it has to be there before a socket is bound that asks.
        socket.bind(_ENDPOINT)
        self._socket = LoopSocket(loop, socket, self._on_request, _nothing)
        self._timer = loop.call_later(_POLL_S, self._poll)

    def close(self) -> None:
        """Answer nothing any more."""
        self._timer.cancel()
        self._socket.close()

    def vet(self, user: bytes, actor_id: str) -> None:
        """Raise `FrameRefused` where a frame with this User-Id is by no actor of this id, or its key is not allowed."""
        if (user, actor_id) in self._vetted:
            return
        host = self.host_of_user(user)
        if host is None:
            name = user.decode(errors="replace").partition(" ")[0]
            raise FrameRefused(UNKNOWN_KEY, f"the key of host {name} is not allowed any more: `meshctl keys add` it")
        if self._home(actor_id, is_local=user == LOCAL) != host:
            raise FrameRefused(WRONG_KEY, f"{actor_id} is no actor of host {host}, whose connection it came by")
        if len(self._vetted) >= _MAX_VETTED:
            self._vetted.clear()
        self._vetted.add((user, actor_id))

    def host_of_user(self, user: bytes) -> str | None:
        """Which host a User-Id is of; None where its key is not allowed, or not any more."""
        if user == LOCAL:
            return self._keys.own.host
        found = self._hosts.get(user)
        return None if found is None else found.host

    def server_key(self, actor_id: str) -> bytes:
        """The public key that who is dialed has to have, as Z85. Raises `FrameRefused` where its host has none."""
        host = self._home(actor_id, is_local=False)
        found = self._keys.allowed.of(host)
        if found is None:
            raise FrameRefused(UNKNOWN_KEY, f"no key of host {host or actor_id!r} is allowed: `meshctl keys add` it")
        return found.public_key.encode()

    def is_current(self, server_key: bytes) -> bool:
        """Whether a host that was dialed is still on the list, with the same key."""
        return self._keys.allowed.find(server_key.decode()) is not None

    def _home(self, actor_id: str, *, is_local: bool) -> str:
        """The host that an actor id belongs to; of ids that name none, this one if it came from here."""
        if (named := host_of(actor_id)) or actor_id != REGISTRY:
            return named or (self._keys.own.host if is_local else "")
        return self._keys.allowed.registry().host

    def _on_request(self, parts: list[Buffer]) -> None:
        """ZeroMQ asks about one connection: version, request, domain, address, routing id, mechanism, credentials."""
        identity, _, version, request, *fields = [bytes(part) for part in parts]
        answer = (identity, b"", version, request)
        if version != _VERSION or len(fields) < _NUM_FIELDS - 2:
            self._socket.send((*answer, b"500", b"not understood", b"", b""))
            return
        _, address, _, mechanism, *credentials = fields
        user = LOCAL if mechanism == b"NULL" else self._user(credentials)
        if user is not None:
            self._socket.send((*answer, b"200", b"", user, b""))
            return
        self._socket.send((*answer, b"400", b"this key is not allowed", b"", b""))
        where, key = address.decode(errors="replace"), z85.encode(credentials[0]).decode()
        self._refused(
            Link(Address(where, 0), dialed=False),
            FrameRefused(UNKNOWN_KEY, f"{where} shows the key '{key}': `meshctl keys add` its host, if it is yours"),
        )

    def _user(self, credentials: list[bytes]) -> bytes | None:
        key = z85.encode(credentials[0])
        found = self._keys.allowed.find(key.decode())
        return None if found is None else _user_id(found)

    def _poll(self) -> None:
        self._timer = self._loop.call_later(_POLL_S, self._poll)
        if self._keys.poll():
            self._read_list()
            self._changed()

    def _read_list(self) -> None:
        self._hosts = {_user_id(one): one for one in self._keys.allowed.hosts}
        self._vetted.clear()


def _user_id(host: AllowedHost) -> bytes:
    return f"{host.host} {host.public_key}".encode()


def _nothing() -> None:
    """Answers are small, and taken at once."""
