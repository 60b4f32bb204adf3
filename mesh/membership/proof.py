"""Identity on one host: proofs that an actor belongs to the host's supervisor, which draws a secret at its start. Pure.

    supervisor --secret, in memory only--> actors that it starts: each proves itself, and checks all others
               --proof of one incarnation--> an actor started by hand, under a name that is not supervised

A proof names mesh, actor id, epoch and role, so a process that sees one can reuse it for the same incarnation only; it
is shown to members that gave one themselves. Proofs keep out strays and mistakes. A hostile process of the same user
can read the memory of the others; nothing here stops it.
"""

import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Iterable
from typing import Final

import msgspec

from mesh.address import Address, Endpoint, host_of
from mesh.errors import BAD_PROOF, NO_PROOF, FrameRefused
from mesh.membership.view import SUPERVISOR, Member

_SECRET_BYTES: Final = 32
"""256 bits, as a key of BLAKE2b: not to be guessed even by who sees many proofs made with it."""
_PROOF_BYTES: Final = 16
"""128 bits: enough not to be guessed, and short, since a member list carries one proof per member."""
_PERSON: Final = b"kvmesh member"
REGISTRY: Final = "registry"
NEVER_GIVEN: Final = (REGISTRY, SUPERVISOR)
"""Roles that every actor believes. Each has one holder, started by its supervisor; no other actor gets their proof."""


def prove(secret: bytes, mesh: str, actor_id: str, epoch: int, role: str) -> bytes:
    """Keyed BLAKE2b, 16 bytes, of four texts in UTF-8, each preceded by its length as u32 little-endian."""
    texts = [text.encode() for text in (mesh, actor_id, str(epoch), role)]
    named = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return hashlib.blake2b(named, digest_size=_PROOF_BYTES, key=secret, person=_PERSON).digest()


class HostSecret(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor hands to the actors that it starts. Never in argv, environment, files or logs.

    `supervised` are the ids that it starts itself, `roles` those that need a proof. `host` is empty on a mesh of one
    host. It proves nothing about actors started on other hosts.
    """

    mesh: str
    host: str
    key: bytes
    supervised: list[str]
    roles: list[str]

    def __repr__(self) -> str:
        # Keeps the key out of logs and error messages.
        return f"HostSecret(mesh={self.mesh!r})"

    @classmethod
    def draw(cls, mesh: str, host: str, supervised: Iterable[str], roles: Iterable[str]) -> "HostSecret":
        """A new secret. Actors with one of `roles`, supervisors and registries need a proof."""
        needed = sorted({*NEVER_GIVEN, *roles})
        return cls(mesh=mesh, host=host, key=os.urandom(_SECRET_BYTES), supervised=sorted(supervised), roles=needed)

    def is_local(self, actor_id: str) -> bool:
        """Whether an actor is on this host, judging by its id; the registry's id does not name its host."""
        return not self.host or host_of(actor_id) == self.host or actor_id in self.supervised

    def prove(self, actor_id: str, epoch: int, role: str) -> bytes:
        return prove(self.key, self.mesh, actor_id, epoch, role)

    def is_proved(self, member: Member) -> bool:
        return hmac.compare_digest(self.prove(member.actor_id, member.epoch, member.role), member.proof)

    def check(self, member: Member, known: Member | None) -> bool:
        """Whether a member is proved; `known` is the known member with its id, itself proved if it has a proof.

        Raises `FrameRefused`: `bad_proof` if it shows a wrong proof, `no_proof` if it needs one and shows none. Members
        of other hosts are never proved and never refused.
        """
        if not self.is_local(member.actor_id):
            return False
        if member.proof:
            if self.is_proved(member):
                return True
            raise FrameRefused(
                BAD_PROOF,
                f"{member.address} as {member.role} shows a proof of another incarnation, role or supervisor: "
                "start it again, so that it gets one from the supervisor running now",
            )
        if member.actor_id in self.supervised or (known is not None and known.proof):
            raise FrameRefused(
                NO_PROOF, f"{member.actor_id} is already an actor of the mesh {self.mesh!r}: use another actor id"
            )
        if member.role in self.roles:
            raise FrameRefused(
                NO_PROOF,
                f"an actor of the role {member.role} needs a proof from the supervisor of {self.mesh!r}: start it with "
                f"`meshctl run {member.role}`, or set `external = true` in the mesh's topology",
            )
        return False


def without_proof(member: Member) -> Member:
    """The member as shown to those that must not see its proof."""
    return msgspec.structs.replace(member, proof=b"") if member.proof else member


class Credentials:
    """What one incarnation shows of itself, and whom it believes.

    Args:
        secret: of its host; None if it was not given one, and then it checks no proofs.
        proof: its own proof if it has no secret, empty without a supervisor.
        find: looks a member up by actor id in this actor's view of the mesh.
        hubs: the registry's and the supervisor's ids. Their addresses come from the run directory.
        vet_host: raises `FrameRefused` for a member that its host's key does not allow; None without keys. The
            transport checks that an actor is on the host named in its id.
    """

    def __init__(
        self,
        secret: HostSecret | None,
        proof: bytes,
        find: Callable[[str], Member | None],
        hubs: Callable[[], Collection[str]],
        vet_host: Callable[[Member], None] | None = None,
    ) -> None:
        self._vet_host = vet_host
        self.secret = secret
        self._proof = proof
        self._find = find
        self._hubs = hubs

    def own(self, actor_id: str, epoch: int, role: str) -> bytes:
        return self._proof if self.secret is None else self.secret.prove(actor_id, epoch, role)

    def check(self, member: Member, known: Member | None) -> bool:
        """As `HostSecret.check`; without a secret no proof is refused, and one that equals the known member's is valid.

        Also raises what `vet_host` raises.
        """
        if self._vet_host is not None:
            self._vet_host(member)
        if self.secret is not None:
            return self.secret.check(member, known)
        return bool(member.proof) and known is not None and known.proof == member.proof

    def vet(self, member: Member) -> bool:
        return self.check(member, self._find(member.actor_id))

    def may_vouch(self, actor_id: str) -> bool:
        """Whether to believe what a member says about actors of other hosts.

        With keys, only if its host may have a supervisor: a host that may stop the whole mesh gains nothing by lying.
        """
        host = host_of(actor_id)
        if self._vet_host is None or (self.secret is not None and self.secret.is_local(actor_id)):
            return True
        try:
            self._vet_host(Member(f"{SUPERVISOR}.{host}", SUPERVISOR, 0, Endpoint("", ""), host=host))
        except FrameRefused:
            return False
        return True

    def are_shown_to(self, peer: Address) -> bool:
        known = self._find(peer.actor_id)
        return peer.actor_id in self._hubs() or (known is not None and known.address == peer and bool(known.proof))

    def believe(self, peer: Address, *, is_proved: bool) -> bool:
        """Whether to believe a peer that others are gone; peers on other hosts report only their own hosts' actors."""
        return is_proved or self.secret is None or not self.secret.is_local(peer.actor_id)
