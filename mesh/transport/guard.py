"""Which frames from other hosts are taken, by the key that their connection was made with.

    User-Id of a connection --> Guard: is its key still allowed, and is the sender of that host

A User-Id is `HOST PUBLIC_KEY` of a connection over tcp, and `local` of one over ipc, which no key is needed for. The
list of keys may change while connections live, so each frame is looked at: what a revoked key still sends is refused.

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


class Guard:
    """One transport's. `keys` are its host's, which others of this actor look at as well."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._hosts: dict[bytes, AllowedHost] = {}
        self._vetted: set[tuple[bytes, str]] = set()
        self._list = keys.allowed
        self._read_list()

    def is_changed(self) -> bool:
        """Look at the file, and go by the list as it is now; whether it is another than the last time."""
        self._keys.poll()
        # Not what `poll` returns: who restores a damaged file, or takes a list, has looked in between.
        if self._keys.allowed is self._list:
            return False
        self._list = self._keys.allowed
        self._read_list()
        return True

    def _read_list(self) -> None:
        self._hosts = {_user_id(one): one for one in self._keys.allowed.hosts}
        self._vetted.clear()

    def user_of(self, public_key: str) -> bytes | None:
        """The User-Id of a connection by this key, as Z85; None where it is not allowed."""
        found = self._keys.allowed.find(public_key)
        return None if found is None else _user_id(found)

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


def _user_id(host: AllowedHost) -> bytes:
    return f"{host.host} {host.public_key}".encode()
