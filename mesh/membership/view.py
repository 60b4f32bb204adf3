"""The mesh's members as one actor knows them: a cached view of the registry's list.

The registry's word changes the view (a snapshot when joining, numbered changes after it), and so do, ahead of it, a
supervisor's report of a death and a member's own `draining`. The view stays as it is while the registry is away, so
actors go on working. An incarnation never comes back: of two members with one actor id, the higher epoch wins. Owned by
`registration.py`, read by every actor through `Context.members`.
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
"""Alive, but its working memory is released: it takes no work."""

SUPERVISOR = "supervisor"
"""A role that `mesh/` itself knows: it is believed when it says that a process is dead."""


class Member(Part, frozen=True):
    """One actor in the mesh. `state`: `starting`, `ready`, `draining` or `released`. `attributes` are up to the role.

    `proof` shows that it was started by its host's supervisor or with its permission (`mesh/membership/proof.py`). It
    is empty in what is sent to receivers that must not see it.
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
        return Address(self.actor_id, self.epoch)


class Directory(Protocol):
    """What this actor knows about identities and addresses; read-only."""

    def introduce(self, to: Address, *, is_proved: bool) -> Member:
        """This actor, for `hello` and `welcome`, with its proof if `to` may see it."""
        ...

    def vet(self, member: Member) -> bool:
        """Whether the member that introduces itself is proved; raises `FrameRefused` if it must be and is not."""
        ...

    def locate(self, actor_id: str) -> tuple[Address, Endpoint] | None:
        """The living incarnation of an actor and where it listens."""
        ...


def is_of_host(actor_id: str, known: Member | None, host: str) -> bool:
    """Whether an actor is on a host: by its id or, if that names none (the registry's, say), as it has joined.

    The supervisor of that host may report the actor dead. `known` is the member with that id, `host` is "" on a mesh of
    one host.
    """
    return host_of(actor_id) == host or (known is not None and not host_of(actor_id) and known.host == host)


class Bootstrap(Protocol):
    """Finds the registry: from a file in the run directory, a static address, or the simulation."""

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """The registry's incarnation and where it listens; None while unknown. Cheap, called on every retry."""
        ...


class StaticBootstrap(NamedTuple):
    """A registry that is known in advance."""

    address: Address
    endpoint: Endpoint

    def lookup(self) -> tuple[Address, Endpoint] | None:
        return self.address, self.endpoint


class LearningBootstrap:
    """Another bootstrap, updated with what the registry has since said about itself.

    A registry on fixed ports has a new epoch after a restart, and no file on other hosts says so: it tells the actors
    that dial it under its previous epoch, or under 0 because they know none.
    """

    def __init__(self, told: Bootstrap) -> None:
        self._told = told
        self._learned: tuple[Address, Endpoint] | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        told, learned = self._told.lookup(), self._learned
        if told is None or learned is None or learned[1] != told[1] or learned[0] < told[0]:
            return told
        return learned

    def learn(self, address: Address) -> bool:
        """Record that this incarnation answers where another was dialed; False if it is not a later registry."""
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
    """The cached view; `all` and `by_role` are in order of actor ids, the same everywhere."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._by_role: dict[tuple[str, bool], tuple[Member, ...]] = {}
        self.registry_epoch = 0
        self.version = 0

    def get(self, actor_id: str) -> Member | None:
        return self._members.get(actor_id)

    def by_role(self, role: str, *, ready: bool = True) -> tuple[Member, ...]:
        # Kept until the view changes: each request of each client looks for its role's members.
        found = self._by_role.get((role, ready))
        if found is None:
            found = tuple(m for m in self.all() if m.role == role and (not ready or m.state == READY))
            self._by_role[role, ready] = found
        return found

    def all(self) -> list[Member]:
        return [self._members[actor_id] for actor_id in sorted(self._members)]

    def reset(self, registry_epoch: int, version: int, members: Iterable[Member]) -> MemberChange:
        new = {member.actor_id: member for member in members}
        gone = [member.address for member in self.all() if member.actor_id not in new]
        change = self._update([new[actor_id] for actor_id in sorted(new)], gone)
        self.registry_epoch, self.version = registry_epoch, version
        return change

    def apply(
        self, registry_epoch: int, version: int, upserted: Iterable[Member], left: Iterable[Address], follows: int = 0
    ) -> MemberChange | None:
        """Apply the next numbered change; None if it does not follow the known version, so that a snapshot is needed.

        A change that is already known results in an empty one. With `follows`, this is all changes after that version.
        """
        # Another registry's change, or a gap: a member whose departure was missed would stay for ever.
        if registry_epoch != self.registry_epoch or (follows or version - 1) > self.version:
            return None
        if version <= self.version:
            return MemberChange([], [], [])
        self.version = version
        return self._update(upserted, left)

    def forget(self, address: Address) -> MemberChange:
        return self._update((), (address,))

    def mark_draining(self, address: Address) -> MemberChange:
        member = self._members.get(address.actor_id)
        if member is None or member.epoch != address.epoch or member.state == DRAINING:
            return MemberChange([], [], [])
        return self._update((msgspec.structs.replace(member, state=DRAINING),), ())

    def _update(self, upserted: Iterable[Member], gone: Iterable[Address]) -> MemberChange:
        change = MemberChange([], [], [])
        self._by_role.clear()
        for address in gone:
            member = self._members.get(address.actor_id)
            # An older incarnation's departure says nothing about the present one.
            if member is not None and member.epoch <= address.epoch:
                del self._members[address.actor_id]
                change.left.append(member)
        newest: dict[str, Member] = {}
        for member in upserted:
            # One update may contain two incarnations of an actor; the reported change must match the resulting view.
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
