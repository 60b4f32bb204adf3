"""Who is in the mesh, as one actor knows it: a cached view of the registry's members.

The view is changed only by what the registry says (a snapshot when joining, numbered changes after it) and is kept as
it is while the registry is away, so actors go on working. An incarnation never comes back: of two members with one
actor id the higher epoch stands. Owned by `registration.py`, read by every actor through `Context.members`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from mesh.address import Address, Endpoint, host_of
from mesh.wire.message import Part

STARTING = "starting"
READY = "ready"
DRAINING = "draining"
RELEASED = "released"
"""Alive, without the memory that it works in, and takes no work."""

SUPERVISOR = "supervisor"
"""The one role that the mesh knows: its word that a process is dead is believed."""


class Member(Part, frozen=True):
    """One actor in the mesh. `state` is one of those above; `attributes` are the role's own business.

    `proof` is of who was started by its host's supervisor or with its leave (`mesh/membership/proof.py`), and empty for
    who is not to see it.
    """

    actor_id: str
    role: str
    epoch: int
    endpoint: Endpoint
    state: str = STARTING
    host: str = ""
    pid: int = 0
    attributes: dict[str, Any] = {}
    proof: bytes = b""

    @property
    def address(self) -> Address:
        """The incarnation this is about."""
        return Address(self.actor_id, self.epoch)


class Directory(Protocol):
    """Who is who, as far as this actor knows; asked, and told nothing."""

    def introduce(self, to: Address, *, is_proved: bool) -> Member:
        """This actor, for `hello` and `welcome`, with its proof where that may be shown."""
        ...

    def vet(self, member: Member) -> bool:
        """Whether who introduces itself has proved who it is; raises `FrameRefused` where it had to."""
        ...

    def locate(self, actor_id: str) -> tuple[Address, Endpoint] | None:
        """The living incarnation of an actor and where it listens."""
        ...


def is_of_host(actor_id: str, known: Member | None, host: str) -> bool:
    """Whether an actor is of a host: by its id, or as it has joined where that says nothing, as the registry's does.

    A supervisor of that host may say of it that it is dead. `known` is the member of that id, `host` "" on a mesh of
    one host.
    """
    return host_of(actor_id) == host or (known is not None and not host_of(actor_id) and known.host == host)


class Bootstrap(Protocol):
    """Where the registry is: a file in the run directory, something static, or the simulation's word."""

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """The registry's incarnation and where it listens; None while nobody knows. Cheap, called on every retry."""
        ...


class StaticBootstrap(NamedTuple):
    """A registry that is known beforehand."""

    address: Address
    endpoint: Endpoint

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """Always the same."""
        return self.address, self.endpoint


class LearningBootstrap:
    """Another bootstrap, and what the registry has said of itself since.

    A registry of fixed ports that starts again has a new epoch, of which no file on other hosts tells: who dials it by
    the one before, or by 0 because none is known, is told so.
    """

    def __init__(self, told: Bootstrap) -> None:
        self._told = told
        self._learned: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """What is told, or what was learned of the same endpoint if that is later."""
        told, learned = self._told.lookup(), self._learned
        if told is None or learned is None or learned[1] != told[1] or learned[0] < told[0]:
            return told
        return learned

    def learn(self, address: Address) -> bool:
        """Take in that this incarnation listens where another was dialed; False if that is no later registry."""
        known = self.lookup()
        if known is None or known[0].actor_id != address.actor_id or known[0].epoch >= address.epoch:
            return False
        self._learned = address, known[1]
        return True


class MemberChange(NamedTuple):
    """What one update did to the view. A new epoch of a known actor id is in both `left` and `joined`."""

    joined: list[Member]
    left: list[Member]
    changed: list[Member]

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.changed)


class Membership:
    """The cached view; iteration order is that of actor ids, the same everywhere."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.registry_epoch = 0
        self.version = 0

    def get(self, actor_id: str) -> Member | None:
        """The member with this actor id, in whatever state."""
        return self._members.get(actor_id)

    def by_role(self, role: str, *, ready: bool = True) -> list[Member]:
        """Members of a role sorted by actor id; with `ready` only those that take work."""
        return [m for m in self.all() if m.role == role and (not ready or m.state == READY)]

    def all(self) -> list[Member]:
        """Every member, sorted by actor id."""
        return [self._members[actor_id] for actor_id in sorted(self._members)]

    def reset(self, registry_epoch: int, version: int, members: Iterable[Member]) -> MemberChange:
        """Take the registry's snapshot: whoever is not in it has left."""
        new = {member.actor_id: member for member in members}
        gone = [member.address for member in self.all() if member.actor_id not in new]
        change = self._update([new[actor_id] for actor_id in sorted(new)], gone)
        self.registry_epoch, self.version = registry_epoch, version
        return change

    def apply(
        self, registry_epoch: int, version: int, upserted: Iterable[Member], left: Iterable[Address], follows: int = 0
    ) -> MemberChange | None:
        """Take the next numbered change; None if it does not follow what is known, so a snapshot is needed.

        A change that is already known is an empty change. With `follows` it is all changes after that one.
        """
        # A change of another registry, or a gap: whoever was in what is missing would stay for ever.
        if registry_epoch != self.registry_epoch or (follows or version - 1) > self.version:
            return None
        if version <= self.version:
            return MemberChange([], [], [])
        self.version = version
        return self._update(upserted, left)

    def forget(self, address: Address) -> MemberChange:
        """Take the supervisor's word that an incarnation is dead, before the registry says so."""
        return self._update((), (address,))

    def mark_draining(self, address: Address) -> MemberChange:
        """Take a member's own word that it takes no new work, before the registry says so."""
        member = self._members.get(address.actor_id)
        if member is None or member.epoch != address.epoch or member.state == DRAINING:
            return MemberChange([], [], [])
        return self._update((msgspec.structs.replace(member, state=DRAINING),), ())

    def _update(self, upserted: Iterable[Member], gone: Iterable[Address]) -> MemberChange:
        change = MemberChange([], [], [])
        for address in gone:
            member = self._members.get(address.actor_id)
            # An older incarnation's departure says nothing of the one that is here.
            if member is not None and member.epoch <= address.epoch:
                del self._members[address.actor_id]
                change.left.append(member)
        newest: dict[str, Member] = {}
        for member in upserted:
            # One update may have two incarnations of an actor; what is told of must be what the view is afterwards.
            if member.actor_id not in newest or newest[member.actor_id].epoch <= member.epoch:
                newest[member.actor_id] = member
        for member in newest.values():
            known = self._members.get(member.actor_id)
            if known is None:
                change.joined.append(member)
            elif known.epoch < member.epoch:
                change.left.append(known)
                change.joined.append(member)
            elif known.epoch > member.epoch or known == member:
                continue
            else:
                change.changed.append(member)
            self._members[member.actor_id] = member
        return change
