"""Keys of hosts: a host's own key pair, and the list of hosts whose keys a mesh accepts. Pure.

    HostKey     a host's own key pair; the secret half never leaves the host
    AllowList   the hosts of a mesh by their public keys, and which roles each may have; every change increments
                `version`, and of two lists the later is in force

Between hosts, a key is the identity: over tcp an actor is believed to be on a host because its connection is encrypted
with that host's key (`mesh/transport/zeromq_binding.py`). Stored by `mesh/runtime/key_files.py`.
"""

import re
from typing import Annotated, Final

import msgspec
import zmq

from mesh.address import HOST_NAME, host_of
from mesh.errors import WRONG_KEY, WRONG_ROLE, FrameRefused, MeshError
from mesh.membership.proof import REGISTRY
from mesh.membership.view import Member

ALL_ROLES: Final = "*"
"""Among the roles of a host: any role but `registry`, like a host without a list of roles."""

CLIENT: Final = "meshctl"
"""The role of clients that are not members, such as a host before it joins; every host on the list may have it."""

MAX_HOSTS: Final = 4096
"""As many as peers (`mesh/options.py`): about 1 MB of names and keys, which has to fit one body (16 MiB)."""

_KEY_CHARS: Final = 40
"""A CURVE key's 32 bytes in Z85, which writes 4 bytes as 5 characters."""
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_HOST: Final = re.compile(HOST_NAME)
_ROLE: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}|\*")

HostName = Annotated[str, msgspec.Meta(pattern=HOST_NAME)]


class BadKey(MeshError, code="bad_key"):
    """A key, a host's name or a role is malformed or taken, or a host is not on the list."""


class HostKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key pair of one host: CURVE keys as Z85, 40 characters each."""

    host: HostName
    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        # Keeps the secret key out of logs and error messages.
        return f"HostKey(host={self.host!r}, public_key={self.public_key!r})"

    @classmethod
    def new(cls, host: str) -> "HostKey":
        """A newly generated pair. Raises BadKey if the name cannot be a host's."""
        _check_host(host)
        public_key, secret_key = zmq.curve_keypair()
        while public_key.startswith(b"-"):
            # The key is typed in commands, which would take a leading dash for an option; 1 key in 85 has one.
            public_key, secret_key = zmq.curve_keypair()
        return cls(host, public_key.decode(), secret_key.decode())

    def check(self) -> None:
        """Raise BadKey unless the two halves belong together."""
        for key in (self.public_key, self.secret_key):
            check_public_key(key)
        if zmq.curve_public(self.secret_key.encode()).decode() != self.public_key:
            raise BadKey(f"the public key of host {self.host} does not match its secret key")


class AllowedHost(msgspec.Struct, frozen=True):
    """One host that may be in the mesh. `roles` None: any but `registry`, which exactly one host is granted by name."""

    host: HostName
    public_key: str
    roles: tuple[str, ...] | None = None

    def may_have(self, role: str) -> bool:
        if role == CLIENT:
            return True
        if self.roles is None or (ALL_ROLES in self.roles and role != REGISTRY):
            return role != REGISTRY
        return role in self.roles


class AllowList(msgspec.Struct, frozen=True):
    """The hosts of a mesh. Immutable: each change makes a list with the next version."""

    version: int
    hosts: tuple[AllowedHost, ...]

    def find(self, public_key: str) -> AllowedHost | None:
        return next((host for host in self.hosts if host.public_key == public_key), None)

    def host(self, name: str) -> AllowedHost | None:
        return next((host for host in self.hosts if host.host == name), None)

    def registry(self) -> AllowedHost:
        """The host granted `registry`; a checked list has exactly one. Raises BadKey."""
        for host in self.hosts:
            if host.may_have(REGISTRY):
                return host
        raise BadKey("no host is granted the registry")

    def vet(self, member: Member) -> None:
        """Raise `FrameRefused` if a member is on another host than its id says, or its host is not granted its role."""
        named = host_of(member.actor_id)
        if not named and member.actor_id != REGISTRY:
            return  # Over tcp no actor gets this far with such an id, and on its own host an actor needs no grant.
        host = self.host(named) if named else self.registry()
        if host is None or member.host not in ("", host.host):
            raise FrameRefused(
                WRONG_KEY, f"{member.actor_id} claims to be on host {member.host!r}, but its key is not that host's"
            )
        if not host.may_have(member.role):
            raise FrameRefused(
                WRONG_ROLE,
                f"host {host.host} is not granted the role {member.role}, which {member.actor_id} has: grant it with "
                "`meshctl keys add` and --roles, on the registry's host",
            )

    def with_host(self, host: str, public_key: str, roles: tuple[str, ...] | None = None) -> "AllowList":
        """The next list, with a host added, or with a new key or new roles for one. Raises BadKey."""
        added = AllowedHost(host, public_key, roles)
        others = [other for other in self.hosts if other.host != host]
        if (holder := next((other for other in others if other.public_key == public_key), None)) is not None:
            raise BadKey(f"host {holder.host} already has that public key: each host needs its own pair")
        changed = AllowList(self.version + 1, tuple(sorted((*others, added), key=lambda allowed: allowed.host)))
        changed.check()
        return changed

    def without(self, host: str) -> "AllowList":
        """The next list, without a host; the same list if it has no host with that name."""
        left = tuple(other for other in self.hosts if other.host != host)
        return AllowList(self.version + 1, left) if len(left) < len(self.hosts) else self

    def check(self) -> None:
        """Raise BadKey if this is not a valid list; for lists read from a file or sent by another host."""
        if self.version < 0 or len(self.hosts) > MAX_HOSTS:
            raise BadKey(
                f"the list has version {self.version} and {len(self.hosts)} hosts: the version must not be negative, "
                f"and at most {MAX_HOSTS} hosts are allowed"
            )
        for host in self.hosts:
            _check_host(host.host)
            check_public_key(host.public_key)
            for role in host.roles or ():
                if not _ROLE.fullmatch(role):
                    raise BadKey(
                        f"{role!r} is not a valid role: use lower-case letters, digits, `_`, `-` and `.`, or `*`"
                    )
        for field in ("host", "public_key"):
            values = [getattr(host, field) for host in self.hosts]
            if len(set(values)) < len(values):
                raise BadKey(f"two hosts have the same {field.replace('_', ' ')}")
        if len([host for host in self.hosts if host.may_have(REGISTRY)]) != 1:
            raise BadKey("exactly one host must be granted the registry")


def check_public_key(key: str) -> None:
    if not _Z85.fullmatch(key):
        raise BadKey(
            f"{key!r} is not a public key, which has {_KEY_CHARS} characters of Z85: copy it from `meshctl keys ls` on "
            "its host (in single quotes: some of the characters are special to a shell)"
        )


def _check_host(host: str) -> None:
    if not _HOST.fullmatch(host):
        raise BadKey(
            f"{host!r} is not a valid host name: use at most 12 lower-case letters, digits and dashes, and no number"
        )
