"""Keys of hosts: what a host has, and which hosts' keys a mesh takes. Pure.

    HostKey     a host's own pair; its secret half never leaves it
    AllowList   the hosts of a mesh by their public keys, and which roles each may have; every change counts `version`
                up, and of two lists the later is the one that counts

Between hosts a key is who somebody is: over tcp an actor is believed to be of a host because its connection is
encrypted by that host's key (`mesh/transport/zeromq_binding.py`). Written down in `mesh/runtime/key_files.py`.
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
"""Among the roles of a host: any but `registry`, as a host has of which no roles are said."""

CLIENT: Final = "meshctl"
"""The role of who asks and is no member, as each host does before it joins: all that are on the list may."""

MAX_HOSTS: Final = 4096

_KEY_CHARS: Final = 40
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_HOST: Final = re.compile(HOST_NAME)
_ROLE: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}|\*")

HostName = Annotated[str, msgspec.Meta(pattern=HOST_NAME)]


class BadKey(MeshError, code="bad_key"):
    """A key, a host's name or a role is malformed or taken, or a host is not on the list."""


class HostKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pair of one host: CURVE keys as Z85, 40 characters each."""

    host: HostName
    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        # Of what is logged or raised some day.
        return f"HostKey(host={self.host!r}, public_key={self.public_key!r})"

    @classmethod
    def new(cls, host: str) -> "HostKey":
        """A pair that nobody else has. Raises BadKey where the name cannot be a host's."""
        _check_host(host)
        public_key, secret_key = zmq.curve_keypair()
        while public_key.startswith(b"-"):
            # It is typed in commands, which would take it for an option: one of 85.
            public_key, secret_key = zmq.curve_keypair()
        return cls(host, public_key.decode(), secret_key.decode())

    def check(self) -> None:
        """Raise BadKey unless the halves belong together."""
        for key in (self.public_key, self.secret_key):
            check_public_key(key)
        if zmq.curve_public(self.secret_key.encode()).decode() != self.public_key:
            raise BadKey(f"the public key of host {self.host} is not that of its secret key")


class AllowedHost(msgspec.Struct, frozen=True):
    """One host that may be in the mesh. `roles` None: any but `registry`, which one host is granted by name."""

    host: HostName
    public_key: str
    roles: tuple[str, ...] | None = None

    def may_have(self, role: str) -> bool:
        """Whether its actors may have a role."""
        if role == CLIENT:
            return True
        if self.roles is None or (ALL_ROLES in self.roles and role != REGISTRY):
            return role != REGISTRY
        return role in self.roles


class AllowList(msgspec.Struct, frozen=True):
    """The hosts of a mesh. Nothing changes in place: each change is a list of the next version."""

    version: int
    hosts: tuple[AllowedHost, ...]

    def find(self, public_key: str) -> AllowedHost | None:
        """Whose key it is."""
        return next((one for one in self.hosts if one.public_key == public_key), None)

    def of(self, host: str) -> AllowedHost | None:
        """The host of a name."""
        return next((one for one in self.hosts if one.host == host), None)

    def registry(self) -> AllowedHost:
        """The host granted `registry`; one that was checked has one. Raises BadKey."""
        for one in self.hosts:
            if one.may_have(REGISTRY):
                return one
        raise BadKey("no host is granted the registry")

    def vet(self, member: Member) -> None:
        """Raise `FrameRefused` for a member of another host than its id says, or of a role that host is not granted."""
        named = host_of(member.actor_id)
        if not named and member.actor_id != REGISTRY:
            return  # Over tcp nobody gets this far by such an id, and on its own host an actor needs no grant.
        host = self.of(named) if named else self.registry()
        if host is None or member.host not in ("", host.host):
            raise FrameRefused(
                WRONG_KEY, f"{member.actor_id} says that it is of host {member.host!r}, which its key is not for"
            )
        if not host.may_have(member.role):
            raise FrameRefused(
                WRONG_ROLE,
                f"host {host.host} is not granted the role {member.role}, which {member.actor_id} has: give it by "
                "`meshctl keys add` with --roles, on the registry's host",
            )

    def with_host(self, host: str, public_key: str, roles: tuple[str, ...] | None = None) -> "AllowList":
        """The next list, with a host, or with another key or other roles of one. Raises BadKey."""
        added = AllowedHost(host, public_key, roles)
        others = [one for one in self.hosts if one.host != host]
        if (holder := next((one for one in others if one.public_key == public_key), None)) is not None:
            raise BadKey(f"host {holder.host} has that public key: each host needs a pair of its own")
        changed = AllowList(self.version + 1, tuple(sorted((*others, added), key=lambda one: one.host)))
        changed.check()
        return changed

    def without(self, host: str) -> "AllowList":
        """The next list, without a host; the same list where it has none of that name."""
        left = tuple(one for one in self.hosts if one.host != host)
        return AllowList(self.version + 1, left) if len(left) < len(self.hosts) else self

    def check(self) -> None:
        """Raise BadKey where it cannot be a list: of something that came from a file or from another host."""
        if self.version < 0 or len(self.hosts) > MAX_HOSTS:
            raise BadKey(f"version {self.version} with {len(self.hosts)} hosts: at most {MAX_HOSTS} can be on a list")
        for one in self.hosts:
            _check_host(one.host)
            check_public_key(one.public_key)
            for role in one.roles or ():
                if not _ROLE.fullmatch(role):
                    raise BadKey(f"{role!r} cannot be a role: lower-case letters, digits, `_`, `-` and `.`, or `*`")
        for field in ("host", "public_key"):
            values = [getattr(one, field) for one in self.hosts]
            if len(set(values)) < len(values):
                raise BadKey(f"two hosts have the same {field.replace('_', ' ')}")
        if len([one for one in self.hosts if one.may_have(REGISTRY)]) != 1:
            raise BadKey("one host has to be granted the registry, and no more")


def check_public_key(key: str) -> None:
    """Raise BadKey unless it can be a CURVE key in Z85."""
    if not _Z85.fullmatch(key):
        raise BadKey(
            f"{key!r} is no public key: it has {_KEY_CHARS} characters of Z85, as `meshctl keys ls` shows it on "
            "its host (in single quotes: a shell takes some of them for its own)"
        )


def _check_host(host: str) -> None:
    if not _HOST.fullmatch(host):
        raise BadKey(f"{host!r} cannot be a host: lower-case letters, digits and dashes, at most 12, and no number")
