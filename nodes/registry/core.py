"""The registry's decisions: who is a member, until when, and what the others are told. Pure.

Every membership is a lease: `join` opens or updates it, `renew` extends it, `leave` and `expire` end it. Each change
has a number, one more than the last, so that members can tell whether they have missed one.

A registry that has just started knows nobody, while everybody goes on working. For one lease time it believes what
members bring along of their views when they join again (`known_members`): who is named there gets a lease as if it had
joined, and loses it unless it comes itself. So a restart of the registry looks to nobody as if the others had left.
The same is believed at any time of whose leases ran out, if whoever names them is of their host: a host that was cut
off has lost nobody, and links within it live on. And of a later incarnation than the one that is a member: who knows
of it takes nobody before it.

Epochs of who has left are remembered: a host that comes back without its files and with its clock behind would bring an
epoch that is lower, or the same, and whoever knew the one before (a worker its scheduler) would refuse it for good.
Where that is the registry's own host, what is remembered is what the others bring along: of its actors they have no
proofs to show, so nobody named is a member by that, but none of them is taken below the epoch that is named.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mesh.address import MAX_EPOCH, MAX_HEARD_EPOCH, Address, host_of
from mesh.errors import NO_PROOF, STALE_EPOCH, FrameRefused
from mesh.membership.view import Member
from mesh.wire.frames import Departed, Join, Joined, MembersChanged

FOREVER = float("inf")
_MAX_DEPARTED = 4096


class Stale(Exception):
    """A join of an incarnation that a newer one has replaced, or that somebody else is already.

    Whoever follows goes above `known_epoch`.
    """

    def __init__(self, known_epoch: int, why: str) -> None:
        super().__init__(why)
        self.known_epoch = known_epoch


class JoinOutcome(NamedTuple):
    """The answer to a join, and what is told to the others (and to the joining member unless it got a snapshot).

    `doubted`: whom it named as members with a wrong proof, or against the keys; not who is named without a proof.
    """

    joined: Joined
    change: MembersChanged | None
    doubted: list[tuple[Address, FrameRefused]]


Check = Callable[[Member, Member | None], object]
"""Raises `FrameRefused` where a member had to prove who it is; the second one is who is known by its actor id."""


def _anybody(_member: Member, _known: Member | None) -> None:
    """Where there is no supervisor nobody has a proof."""


def _everybody(_actor_id: str) -> bool:
    """Where there are no keys nobody is known better than another."""
    return True


class RegistryCore:
    """All leases of one registry incarnation. Times are seconds on one clock.

    `check` and `may_vouch` are as those of `Credentials`.
    """

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
        self._departed: dict[str, int] = {}
        self._lapsed: dict[str, int] = {}

    def members(self) -> list[Member]:
        """Everybody, sorted by actor id."""
        return [self._members[actor_id] for actor_id in sorted(self._members)]

    def audience(self) -> list[Member]:
        """Members that have joined here themselves: they are told of changes. Others get them with their own join."""
        return [member for member in self.members() if member.actor_id not in self._heard]

    def find(self, actor_id: str) -> Member | None:
        """The member of this id, if there is one."""
        return self._members.get(actor_id)

    def knows(self, address: Address) -> bool:
        """Whether this incarnation is a member."""
        member = self._members.get(address.actor_id)
        return member is not None and member.epoch == address.epoch

    def admit(self, member: Member) -> None:
        """Take the registry itself in; it needs no lease from itself."""
        self._members[member.actor_id] = member
        self._expiry[member.actor_id] = FOREVER

    def join(self, request: Join, now: float, told: int | None = None) -> JoinOutcome:
        """Open or update a membership. Who knows version `told`, by default the last, is told all that follows.

        Raises `Stale` for an incarnation that a newer one has replaced, and `FrameRefused` for who has not proved it is
        who it says.
        """
        member = request.member
        known = self._members.get(member.actor_id)
        self._check(member, known)
        if member.epoch >= MAX_EPOCH:
            raise FrameRefused(STALE_EPOCH, f"{member.address} has no epoch that another could follow")
        # Not at the same one: who only lost its lease, as a stopped process does, comes again as it was.
        if (newest := self._newest(member.actor_id)) > member.epoch:
            # Of two machines of one name that began before there was a registry, it says where the other is.
            there = f", at {known.endpoint.control}" if known else ""
            # Under the registry before there may have been later ones, which who was told of them has yet to name:
            # epochs are seconds where files and clocks are right, and those began before this registry.
            above = max(newest, self.epoch) if now < self._known_members_until else newest
            raise Stale(above, f"{member.address} was replaced by epoch {newest}{there}")
        if known is not None and known.epoch == member.epoch and known.endpoint != member.endpoint:
            # No incarnation moves: two machines were started as one host, in the same second.
            raise Stale(newest, f"another {member.address} is a member, at {known.endpoint.control}")
        least = self.version if told is None else told
        was_current = request.known_epoch == self.epoch and request.known_version >= least
        upserted, doubted, left = self._believe(request.known_members, member.actor_id, now)
        if known is not None and known.epoch < member.epoch:
            left.append(Departed(actor_id=known.actor_id, epoch=known.epoch, reason="replaced"))
        if known != member:
            upserted = [other for other in upserted if other.actor_id != member.actor_id] + [member]
        self._members[member.actor_id] = member
        self._departed.pop(member.actor_id, None)
        self._heard.discard(member.actor_id)
        self._expiry[member.actor_id] = now + self.lease_s
        change = self._change(upserted, left) if upserted or left else None
        snapshot = None if was_current else list(self._members.values())
        return JoinOutcome(
            Joined(registry_epoch=self.epoch, version=self.version, lease_s=self.lease_s, members=snapshot),
            change,
            doubted,
        )

    def renew(self, address: Address, now: float) -> bool:
        """Extend a lease; False if there is none, so the member has to join again."""
        if not self.knows(address):
            return False
        self._expiry[address.actor_id] = max(self._expiry[address.actor_id], now + self.lease_s)
        return True

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
        # Forgotten with the epochs of who has left, which are as many.
        lapsed = self._lapsed | {actor_id: self._departed.get(actor_id, 0) for actor_id in gone}
        self._lapsed = {actor_id: epoch for actor_id, epoch in lapsed.items() if epoch == self._departed.get(actor_id)}
        return change

    def forgive(self, now: float) -> None:
        """The registry itself was not running for a while: nobody could renew, so every lease starts again."""
        for actor_id, expiry in self._expiry.items():
            self._expiry[actor_id] = max(expiry, now + self.lease_s)

    def next_expiry(self) -> float:
        """When `expire` has something to do next; infinite if no lease can end."""
        return min(self._expiry.values(), default=FOREVER)

    def _believe(
        self, known_members: Iterable[Member], by: str, now: float
    ) -> tuple[list[Member], list[tuple[Address, FrameRefused]], list[Departed]]:
        """Who is a member by the word of another, whose word was doubted, and who has left by that."""
        believed: list[Member] = []
        doubted: list[tuple[Address, FrameRefused]] = []
        outlived: list[Departed] = []
        host = host_of(by)
        may_vouch = self._may_vouch(by)
        is_new = now < self._known_members_until
        for member in known_members:
            known = self._members.get(member.actor_id)
            # Of two that say it of the same incarnation the first is enough: first of all, as everybody says it of all.
            if known is not None and known.epoch >= member.epoch:
                continue
            is_lapsed = self._departed.get(member.actor_id) == self._lapsed.get(member.actor_id) == member.epoch
            is_neighbour = bool(host) and host_of(member.actor_id) == host
            # Else a host that was let in for one role could end all others, by later incarnations that it makes up.
            if not (may_vouch or is_neighbour):
                continue
            # Of who is a member by an earlier epoch it is believed at any time: who was stopped while this registry
            # began names an incarnation that came before, and would refuse the one that is a member now for good.
            if not is_new and known is None and not (is_lapsed and is_neighbour):
                continue
            # Who is to come next has to be able to go above it.
            if member.epoch > MAX_HEARD_EPOCH:
                continue
            # Who has left may have come again.
            if self._newest(member.actor_id) >= member.epoch + (known is None):
                continue
            try:
                self._check(member, known)
            except FrameRefused as refusal:
                # Who is of another host, or was started by hand, was shown no proofs that it could show.
                if refusal.code != NO_PROOF:
                    doubted.append((member.address, refusal))
                # Its own host's supervisor says of itself who lives there. Not at any time: another host, whose word
                # needs no proof, could end all actors of this one again and again.
                if (
                    is_new
                    and host
                    and host != host_of(member.actor_id)
                    and self._expiry.get(member.actor_id) != FOREVER
                ):
                    outlived += self._outlive(member, known)
                continue
            self._departed.pop(member.actor_id, None)
            self._members[member.actor_id] = member
            self._expiry[member.actor_id] = now + self.lease_s
            self._heard.add(member.actor_id)
            believed.append(member)
        return believed, doubted, outlived

    def _outlive(self, doubted: Member, known: Member | None) -> list[Departed]:
        """Another host knows a later incarnation: none before that one is taken, nor kept, and the next goes above."""
        reason = "a later one was known before the registry was"
        left = [] if known is None else self._drop([doubted.actor_id], reason)
        self._remember(*doubted.address)
        return left

    def _newest(self, actor_id: str) -> int:
        """The latest epoch of an actor that has been a member, 0 if none is known."""
        member = self._members.get(actor_id)
        return member.epoch if member is not None else self._departed.get(actor_id, 0)

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
        self._departed[actor_id] = epoch
        if len(self._departed) > _MAX_DEPARTED:
            # Clients with an id of their own each come and go by the thousand; a mesh's actors are hundreds.
            del self._departed[next(iter(self._departed))]

    def _change(self, upserted: list[Member], left: list[Departed]) -> MembersChanged:
        self.version += 1
        return MembersChanged(registry_epoch=self.epoch, version=self.version, upserted=upserted, left=left)
