"""The registry's decisions: which actors are members, until when, and what the others are told. Pure.

Every membership is a lease: `join` opens or updates it, `renew` extends it, `leave` and `expire` end it. Each change
has a number, one more than the last, so that members can tell whether they have missed one.

A registry that has just started knows nobody, while the members go on working. For one lease time it believes the
views that members bring along when they join again (`known_members`): each actor named there gets a lease as if it had
joined, and loses it unless it joins itself. So when the registry restarts, no member sees the others leave.
Two kinds of named actors are accepted at any time: one whose lease ran out, if named by an actor of its own host (a
host that was cut off has lost no actors, and links within it live on); and a later incarnation of a current member (an
actor that knows the later one refuses all earlier ones).

Epochs of departed members are remembered: a host that comes back without its files and with its clock behind would
bring a lower epoch, or the same one, and peers that knew the previous incarnation (as a worker knows its scheduler)
would refuse it for good. If that host is the registry's own, the registry learns these epochs from members on other
hosts: they have no proofs of its host's actors to show, so an actor does not become a member by being named, but its
incarnations below the named epoch are refused.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mesh.address import MAX_EPOCH, MAX_HEARD_EPOCH, Address, host_of
from mesh.errors import NO_PROOF, STALE_EPOCH, FrameRefused
from mesh.membership.view import Member
from mesh.wire.frames import Departed, Join, Joined, MembersChanged

FOREVER = float("inf")
_WANING = 0.4
"""What is left of a lease when its holder is asked to renew it: 2 s of 5. A supervisor renews each 2 s what it heard
up to 0.5 s before, so 2.5 s are left of a lease in good order, and four heartbeats of the registry go out in 2 s."""
_MAX_DEPARTED = 4096
"""Clients, each with an id of its own, come and go by the thousand; a mesh's actors are hundreds. About 500 KB."""


class Stale(Exception):
    """A newer incarnation, or another process, has joined; the next has to take an epoch above `known_epoch`."""

    def __init__(self, known_epoch: int, why: str) -> None:
        super().__init__(why)
        self.known_epoch = known_epoch


class JoinOutcome(NamedTuple):
    """The answer to a join, and what is told to the others (and to the joining member unless it got a snapshot).

    `doubted`: actors that it named as members with a wrong proof or against the keys; not those without a proof.
    """

    joined: Joined
    change: MembersChanged | None
    doubted: list[tuple[Address, FrameRefused]]


Check = Callable[[Member, Member | None], object]
"""Raises `FrameRefused` for a member that had to prove who it is and did not; the second argument is the member known
by the same actor id."""


def _anybody(_member: Member, _known: Member | None) -> None:
    """The check without a supervisor: no actor has a proof."""


def _everybody(_actor_id: str) -> bool:
    """`may_vouch` without keys: no host is trusted more than another."""
    return True


class RegistryCore:
    """All leases of one registry incarnation, in seconds of one clock. `check`, `may_vouch`: as in `Credentials`."""

    def __init__(
        self,
        epoch: int,
        lease_s: float,
        now: float,
        check: Check | None = None,
        may_vouch: Callable[[str], bool] = _everybody,
    ) -> None:
        self._check = check or _anybody
        self._may_vouch = may_vouch
        self.epoch = epoch
        self.lease_s = lease_s
        self.version = 1
        self._known_members_until = now + lease_s
        self._members: dict[str, Member] = {}
        self._expiry: dict[str, float] = {}
        self._heard: set[str] = set()
        self.departed: dict[str, int] = {}
        self._lapsed: dict[str, int] = {}

    def members(self) -> list[Member]:
        """Everybody, sorted by actor id."""
        return [self._members[actor_id] for actor_id in sorted(self._members)]

    def audience(self) -> list[Member]:
        """Members that have joined here themselves: they are told of changes. Others get them with their own join."""
        return [member for member in self.members() if member.actor_id not in self._heard]

    def find(self, actor_id: str) -> Member | None:
        return self._members.get(actor_id)

    def knows(self, address: Address) -> bool:
        member = self._members.get(address.actor_id)
        return member is not None and member.epoch == address.epoch

    def admit(self, member: Member) -> None:
        """Take the registry itself in; it needs no lease from itself."""
        self._members[member.actor_id] = member
        self._expiry[member.actor_id] = FOREVER

    def join(self, request: Join, now: float, told: int | None = None) -> JoinOutcome:
        """A joiner at version `told` (default: the last) or later gets no snapshot. Raises `Stale` for an incarnation
        that a newer one has replaced, and `FrameRefused` for a joiner that has not proved who it is.
        """
        member = request.member
        known = self._members.get(member.actor_id)
        self._check(member, known)
        if member.epoch >= MAX_EPOCH:
            raise FrameRefused(STALE_EPOCH, f"the epoch of {member.address} is too high: no later one could follow it")
        # An equal epoch is fine: a process that only lost its lease, as a suspended one does, rejoins unchanged.
        if (newest := self._newest(member.actor_id)) > member.epoch:
            # Two machines of one name may have started before there was a registry: name the other one's address.
            there = f", at {known.endpoint.control}" if known else ""
            # The previous registry may have had later incarnations that no member has named here yet. Those started
            # before this registry, and epochs are seconds where files and clocks are right: go above its own epoch.
            above = max(newest, self.epoch) if now < self._known_members_until else newest
            raise Stale(above, f"{member.address} was replaced by epoch {newest}{there}")
        if known is not None and known.epoch == member.epoch and known.endpoint != member.endpoint:
            # An incarnation never changes its endpoint: two machines were started as one host, in the same second.
            raise Stale(newest, f"another process is already a member as {member.address}, at {known.endpoint.control}")
        least = self.version if told is None else told
        was_current = request.known_epoch == self.epoch and request.known_version >= least
        upserted, doubted, left = self._believe(request.known_members, member.actor_id, now)
        if known is not None and known.epoch < member.epoch:
            left.append(Departed(actor_id=known.actor_id, epoch=known.epoch, reason="replaced"))
        if known != member:
            upserted = [other for other in upserted if other.actor_id != member.actor_id] + [member]
        self._members[member.actor_id] = member
        self.departed.pop(member.actor_id, None)
        self._heard.discard(member.actor_id)
        self._expiry[member.actor_id] = now + self.lease_s
        change = self._change(upserted, left) if upserted or left else None
        snapshot = None if was_current else list(self._members.values())
        joined = Joined(registry_epoch=self.epoch, version=self.version, members=snapshot)
        return JoinOutcome(joined, change, doubted)

    def renew(self, address: Address, now: float) -> bool:
        """Extend a lease; False if there is none, so the member has to join again."""
        if not self.knows(address):
            return False
        self._expiry[address.actor_id] = max(self._expiry[address.actor_id], now + self.lease_s)
        return True

    def renew_for(self, address: Address, heard_at: float) -> bool:
        """Extend the lease of an actor that its supervisor heard at this time; False if it has to join (again)."""
        # One that others have named lives, but is told of no changes before it has joined itself.
        return address.actor_id not in self._heard and self.renew(address, heard_at)

    def waning(self, now: float) -> list[Address]:
        """Those whose leases end soon: nobody has renewed them for longer than a supervisor takes."""
        soon = now + _WANING * self.lease_s
        return [self._members[actor_id].address for actor_id, expiry in self._expiry.items() if expiry <= soon]

    def leave(self, address: Address, reason: str) -> MembersChanged | None:
        """End a membership; None if there is none of this incarnation."""
        if not self.knows(address):
            return None
        return self._end([address.actor_id], reason)

    def expire(self, now: float) -> MembersChanged | None:
        """End all memberships whose lease has run out; None if there is none."""
        gone = sorted(actor_id for actor_id, expiry in self._expiry.items() if expiry <= now)
        if not gone:
            return None
        change = self._end(gone, "its lease ran out")
        # An entry is dropped with the actor's departed epoch, so both stay within the same bound.
        lapsed = self._lapsed | {actor_id: self.departed.get(actor_id, 0) for actor_id in gone}
        self._lapsed = {actor_id: epoch for actor_id, epoch in lapsed.items() if epoch == self.departed.get(actor_id)}
        return change

    def forgive(self, now: float) -> None:
        """Restart every lease: the registry itself was not running for a while, so no member could renew."""
        for actor_id, expiry in self._expiry.items():
            self._expiry[actor_id] = max(expiry, now + self.lease_s)

    def next_expiry(self) -> float:
        """When `expire` has something to do next; infinite if no lease can end."""
        return min(self._expiry.values(), default=FOREVER)

    def _believe(
        self, known_members: Iterable[Member], by: str, now: float
    ) -> tuple[list[Member], list[tuple[Address, FrameRefused]], list[Departed]]:
        """Take in what member `by` says of others: returns the new members, the refused claims, and the departed."""
        believed: list[Member] = []
        doubted: list[tuple[Address, FrameRefused]] = []
        outlived: list[Departed] = []
        host = host_of(by)
        may_vouch = self._may_vouch(by)
        is_new = now < self._known_members_until
        for member in known_members:
            known = self._members.get(member.actor_id)
            # Already known. Tested first, because every member names all others.
            if known is not None and known.epoch >= member.epoch:
                continue
            is_lapsed = self.departed.get(member.actor_id) == self._lapsed.get(member.actor_id) == member.epoch
            is_neighbour = bool(host) and host_of(member.actor_id) == host
            # Otherwise a host that was admitted for one role could end all others by inventing later incarnations.
            if not (may_vouch or is_neighbour):
                continue
            # A later incarnation of a current member is believed at any time: an actor that was suspended while this
            # registry began may know one from before it, and would refuse the current member for good.
            if not is_new and known is None and not (is_lapsed and is_neighbour):
                continue
            # The next incarnation must be able to go above it.
            if member.epoch > MAX_HEARD_EPOCH:
                continue
            # An actor may return with the epoch that it left with, but not with a lower one.
            if self._newest(member.actor_id) >= member.epoch + (known is None):
                continue
            try:
                self._check(member, known)
            except FrameRefused as refusal:
                # No proof is no offence: actors of other hosts, or started by hand, were never shown the proofs.
                if refusal.code != NO_PROOF:
                    doubted.append((member.address, refusal))
                # An actor's own host needs none of this: its supervisor says which of its actors live. Only while this
                # registry is new: otherwise another host, whose word needs no proof, could end all actors of this one
                # again and again.
                if (
                    is_new
                    and host
                    and host != host_of(member.actor_id)
                    and self._expiry.get(member.actor_id) != FOREVER
                ):
                    outlived += self._outlive(member, known)
                continue
            self.departed.pop(member.actor_id, None)
            self._members[member.actor_id] = member
            self._expiry[member.actor_id] = now + self.lease_s
            self._heard.add(member.actor_id)
            believed.append(member)
        return believed, doubted, outlived

    def _outlive(self, doubted: Member, known: Member | None) -> list[Departed]:
        """Another host knows a later incarnation: end and refuse all before it, so that the next one goes above it."""
        reason = "another host knows a later incarnation from before this registry started"
        left = [] if known is None else self._drop([doubted.actor_id], reason)
        self._remember(*doubted.address)
        return left

    def _newest(self, actor_id: str) -> int:
        """The latest epoch of an actor that has been a member, 0 if none is known."""
        member = self._members.get(actor_id)
        return member.epoch if member is not None else self.departed.get(actor_id, 0)

    def _end(self, actor_ids: list[str], reason: str) -> MembersChanged:
        return self._change([], self._drop(actor_ids, reason))

    def _drop(self, actor_ids: list[str], reason: str) -> list[Departed]:
        left: list[Departed] = []
        for actor_id in actor_ids:
            member = self._members.pop(actor_id)
            del self._expiry[actor_id]
            self._heard.discard(actor_id)
            left.append(Departed(actor_id=actor_id, epoch=member.epoch, reason=reason))
            self._remember(actor_id, member.epoch)
        return left

    def _remember(self, actor_id: str, epoch: int) -> None:
        self.departed[actor_id] = epoch
        if len(self.departed) > _MAX_DEPARTED:
            del self.departed[next(iter(self.departed))]

    def _change(self, upserted: list[Member], left: list[Departed]) -> MembersChanged:
        self.version += 1
        return MembersChanged(registry_epoch=self.epoch, version=self.version, upserted=upserted, left=left)
