"""Who is who on a host: a proof that an actor is of the host's supervisor, which drew the secret at its start. Pure.

    supervisor --secret, in memory only--> actors that it starts: each proves itself, and checks all others
               --proof of one incarnation--> an actor that somebody starts by hand, for a name that is not supervised

A proof names mesh, actor id, epoch and role, so whoever sees one can show it again for the same incarnation only; it is
shown to members that gave one themselves. It keeps out strays and mistakes. A hostile process of the same user can read
the memory of the others, and nothing here stops it.
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
_PROOF_BYTES: Final = 16
"""Nobody finds one of 128 bits by trying, and every list of members carries one each."""
_PERSON: Final = b"kvmesh member"
REGISTRY: Final = "registry"
NEVER_GIVEN: Final = (REGISTRY, SUPERVISOR)
"""Roles whose word everybody takes: there is one of each, and its supervisor starts it."""


def prove(secret: bytes, mesh: str, actor_id: str, epoch: int, role: str) -> bytes:
    """Keyed BLAKE2b, 16 bytes, of four texts in UTF-8, each behind its length as u32 little-endian."""
    texts = [text.encode() for text in (mesh, actor_id, str(epoch), role)]
    named = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return hashlib.blake2b(named, digest_size=_PROOF_BYTES, key=secret, person=_PERSON).digest()


class HostSecret(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor hands to the actors that it starts. Never in argv, environment, files or logs.

    `supervised` are the ids that it starts itself, `roles` those that nobody has without a proof. `host` is empty on a
    mesh of one; whom other hosts started is not proved by this.
    """

    mesh: str
    host: str
    key: bytes
    supervised: list[str]
    roles: list[str]

    def __repr__(self) -> str:
        # Of what is logged or raised some day.
        return f"HostSecret(mesh={self.mesh!r})"

    @classmethod
    def draw(cls, mesh: str, host: str, supervised: Iterable[str], roles: Iterable[str]) -> "HostSecret":
        """A new one. Those of `roles`, supervisors and registries need a proof."""
        needed = sorted({*NEVER_GIVEN, *roles})
        return cls(mesh=mesh, host=host, key=os.urandom(_SECRET_BYTES), supervised=sorted(supervised), roles=needed)

    def is_local(self, actor_id: str) -> bool:
        """Whether an actor is of this host, by its id; the registry's says nothing of its host."""
        return not self.host or host_of(actor_id) == self.host or actor_id in self.supervised

    def prove(self, actor_id: str, epoch: int, role: str) -> bytes:
        """The proof of one incarnation."""
        return prove(self.key, self.mesh, actor_id, epoch, role)

    def is_proved(self, member: Member) -> bool:
        """Whether a member shows the proof of its id, epoch and role."""
        return hmac.compare_digest(self.prove(member.actor_id, member.epoch, member.role), member.proof)

    def check(self, member: Member, known: Member | None) -> bool:
        """Whether it has proved who it is; `known` is who is known by that id, proved if it shows a proof.

        Raises `FrameRefused` (`bad_proof`, `no_proof`) for who shows a wrong one, or needs one and shows none. Of other
        hosts nobody has proved anything, and nobody is refused.
        """
        if not self.is_local(member.actor_id):
            return False
        if member.proof:
            if self.is_proved(member):
                return True
            raise FrameRefused(
                BAD_PROOF,
                f"{member.address} as {member.role} shows a proof of another incarnation, role or supervisor: "
                "start it again beside the supervisor that runs now",
            )
        if member.actor_id in self.supervised or (known is not None and known.proof):
            raise FrameRefused(
                NO_PROOF, f"{member.actor_id} is an actor of the mesh {self.mesh!r} already: take another actor id"
            )
        if member.role in self.roles:
            raise FrameRefused(
                NO_PROOF,
                f"actors of the role {member.role} need a proof from the supervisor of {self.mesh!r}: start it with "
                f"`meshctl run {member.role}`, or set `external = true` in the mesh's topology",
            )
        return False


def without_proof(member: Member) -> Member:
    """The same for who is not to see the proof."""
    return msgspec.structs.replace(member, proof=b"") if member.proof else member


class Credentials:
    """What one incarnation shows of itself and whom it believes; `find` looks a member up in its view, by actor id.

    Args:
        secret: of its host; None where it was not given one, and then it checks nobody.
        proof: its own where it has no secret, empty without a supervisor.
        find: looks a member up by actor id, as the registry says.
        hubs: the registry's and the supervisor's ids. Who dials them was told by the run directory where they are.
        vet_host: raises `FrameRefused` for a member that its host's key does not allow; None without keys. That an
            actor is of the host in its id is the transport's to see to.
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
        """The proof of this incarnation."""
        return self._proof if self.secret is None else self.secret.prove(actor_id, epoch, role)

    def check(self, member: Member, known: Member | None) -> bool:
        """As `HostSecret.check`; without a secret nobody is refused, and who is known by that proof has proved it.

        Raises what `vet_host` does too.
        """
        if self._vet_host is not None:
            self._vet_host(member)
        if self.secret is not None:
            return self.secret.check(member, known)
        return bool(member.proof) and known is not None and known.proof == member.proof

    def vet(self, member: Member) -> bool:
        """The same of who introduces itself."""
        return self.check(member, self._find(member.actor_id))

    def may_vouch(self, actor_id: str) -> bool:
        """Whether counts what a member says of actors that are not of its host.

        With keys only of hosts that may have a supervisor: who may stop the whole mesh gains nothing by lying.
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
        """Whether to show the proof to who is dialed."""
        known = self._find(peer.actor_id)
        return peer.actor_id in self._hubs() or (known is not None and known.address == peer and bool(known.proof))

    def obey(self, *, is_proved: bool) -> bool:
        """Whether to end because a peer says so."""
        return is_proved or self.secret is None

    def believe(self, peer: Address, *, is_proved: bool) -> bool:
        """Whether a peer may say of others that they are gone; what is of other hosts says it of its own actors."""
        return is_proved or self.secret is None or not self.secret.is_local(peer.actor_id)
