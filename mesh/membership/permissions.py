"""Which messages an actor accepts from other hosts: keys grant roles, and roles say what a sender may send. Pure.

Senders on the actor's own host are not checked here; `proof.py` establishes their identity. Made by `ActorSystem`.
"""

from collections.abc import Collection, Mapping

from mesh.address import Address, host_of
from mesh.errors import NOT_PERMITTED, FrameRefused
from mesh.membership.view import Member


class Permissions:
    """`senders`: roles that may send each kind of message; any role may send other kinds. `host`: this actor's own."""

    def __init__(self, senders: Mapping[type, Collection[str]], host: str) -> None:
        self._senders = senders
        self._host = host

    def check(self, kind: type, sender: Address, member: Member | None) -> None:
        """Raise `FrameRefused` if `sender` may not send this kind; `member` is how it introduced itself."""
        roles = self._senders.get(kind)
        if roles is None or (member is not None and member.role in roles):
            return
        # Over the network only the registry has an id that names no host.
        if host_of(sender.actor_id) in ("", self._host):
            return
        role = member.role if member is not None else ""
        raise FrameRefused(
            NOT_PERMITTED,
            f"{sender} (role {role!r}) may not send {kind.__name__}: from other hosts it is accepted only from "
            f"{' and '.join(sorted(roles))}",
        )
