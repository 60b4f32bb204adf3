"""Whose messages an actor takes from other hosts: roles are granted by keys, and a role is what somebody may say. Pure.

Of the own host nobody is asked for a role here: who is who there, `proof.py` says. Made by `ActorSystem`.
"""

from collections.abc import Collection, Mapping

from mesh.address import Address, host_of
from mesh.errors import NOT_PERMITTED, FrameRefused
from mesh.membership.view import Member


class Permissions:
    """`senders`: roles that may send a kind of message; a kind that is not named may come from any. `host`: the own."""

    def __init__(self, senders: Mapping[type, Collection[str]], host: str) -> None:
        self._senders = senders
        self._host = host

    def check(self, kind: type, sender: Address, member: Member | None) -> None:
        """Raise `FrameRefused` for a message that is not for who sent it; `member` is what it introduced itself as."""
        roles = self._senders.get(kind)
        if roles is None or (member is not None and member.role in roles):
            return
        # Nobody has an id without a host by way of the network, but the registry.
        if host_of(sender.actor_id) in ("", self._host):
            return
        role = member.role if member is not None else ""
        raise FrameRefused(
            NOT_PERMITTED,
            f"{kind.__name__} is not for {sender} of role {role!r} to send: from other hosts it is taken of "
            f"{' and '.join(sorted(roles))}",
        )
