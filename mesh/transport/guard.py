"""Which frames from other hosts are accepted, by the key with which their connection was made.

    User-Id of a connection --> Guard: is its key still allowed, and is the sender on that host

A connection's User-Id is `HOST PUBLIC_KEY` over tcp, and `local` over ipc, which needs no key. The list of keys may
change while connections live, so every frame is checked: those sent with a revoked key are refused.

Owned by `mesh/transport/zeromq_zap.py`, which makes the connections' User-Ids; the list is `mesh/runtime/key_files.py`.
"""

from typing import Final

from mesh.address import host_of
from mesh.errors import UNKNOWN_KEY, WRONG_KEY, FrameRefused
from mesh.membership.keys import AllowedHost
from mesh.membership.proof import REGISTRY
from mesh.runtime.key_files import KeyRing

LOCAL: Final = b"local"
_MAX_VETTED: Final = 8192
"""Twice `MAX_PEERS`. Ids are what a sender claims, so there may be any number; beyond this all are checked again."""


class Guard:
    """The guard of one transport. `keys` are the host's, shared with other parts of the actor."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._hosts: dict[bytes, AllowedHost] = {}
        self._vetted: set[tuple[bytes, str]] = set()
        self._list = keys.allowed
        self._read_list()

    def is_changed(self) -> bool:
        """Check the file, and adopt the list as it is now. Returns whether it has changed since the last call."""
        self._keys.poll()
        # The result of `poll` is not used: other users of `keys` (to restore a damaged file, say) may poll in between.
        if self._keys.allowed is self._list:
            return False
        self._list = self._keys.allowed
        self._read_list()
        return True

    def _read_list(self) -> None:
        self._hosts = {_user_id(host): host for host in self._keys.allowed.hosts}
        self._vetted.clear()

    def user_of(self, public_key: str) -> bytes | None:
        """The User-Id of a connection with this key (Z85); None if the key is not allowed."""
        found = self._keys.allowed.find(public_key)
        return None if found is None else _user_id(found)

    def vet(self, user: bytes, actor_id: str) -> None:
        """Raise `FrameRefused` if the key of this User-Id is not allowed, or its host is not that of `actor_id`."""
        if (user, actor_id) in self._vetted:
            return
        host = self.host_of_user(user)
        if host is None:
            name = user.decode(errors="replace").partition(" ")[0]
            raise FrameRefused(UNKNOWN_KEY, f"the key of host {name} is not allowed: run `meshctl keys add`")
        if self._home(actor_id, is_local=user == LOCAL) != host:
            raise FrameRefused(WRONG_KEY, f"{actor_id} is not an actor of host {host}, whose key its connection has")
        if len(self._vetted) >= _MAX_VETTED:
            self._vetted.clear()
        self._vetted.add((user, actor_id))

    def host_of_user(self, user: bytes) -> str | None:
        if user == LOCAL:
            return self._keys.own.host
        found = self._hosts.get(user)
        return None if found is None else found.host

    def server_key(self, actor_id: str) -> bytes:
        """The public key (Z85) that a dialed actor must have. Raises `FrameRefused` if its host has none."""
        host = self._home(actor_id, is_local=False)
        found = self._keys.allowed.host(host)
        if found is None:
            raise FrameRefused(UNKNOWN_KEY, f"no key of host {host or actor_id!r} is allowed: run `meshctl keys add`")
        return found.public_key.encode()

    def is_current(self, server_key: bytes) -> bool:
        return self._keys.allowed.find(server_key.decode()) is not None

    def _home(self, actor_id: str, *, is_local: bool) -> str:
        if (named := host_of(actor_id)) or actor_id != REGISTRY:
            return named or (self._keys.own.host if is_local else "")
        return self._keys.allowed.registry().host


def _user_id(host: AllowedHost) -> bytes:
    return f"{host.host} {host.public_key}".encode()
