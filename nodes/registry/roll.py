"""All members as they are sent: each encoded once when it changes, not once for each of those who are told. Pure.

A list for a reader is those bytes one after the other, with the proofs that this reader may see.
"""

from collections.abc import Iterable

import msgspec

from mesh.address import host_of
from mesh.membership.proof import without_proof
from mesh.membership.view import Member
from mesh.wire.frames import MembersChanged


class Roll:
    """Follows the changes of one registry. Lists of `msgspec.Raw` stand for lists of members in what is encoded."""

    def __init__(self, own: Member) -> None:
        self._plain: dict[str, msgspec.Raw] = {}
        self._proved: dict[str, dict[str, msgspec.Raw]] = {}
        self._put(own)

    def take(self, change: MembersChanged) -> None:
        """The next change."""
        for departed in change.left:
            self._plain.pop(departed.actor_id, None)
            self._proved.get(host_of(departed.actor_id), {}).pop(departed.actor_id, None)
        for member in change.upserted:
            self._put(member)

    def shown_to(self, reader: Member) -> list[msgspec.Raw]:
        """Everybody."""
        proved = self._proved.get(host_of(reader.actor_id)) if reader.proof else None
        return list(({**self._plain, **proved} if proved else self._plain).values())

    def shown_alike(
        self, readers: Iterable[Member], upserted: Iterable[Member]
    ) -> list[tuple[list[str], list[msgspec.Raw]]]:
        """Some members for several readers: the ids of those who see the same, and what."""
        changed = [member.actor_id for member in upserted]
        hosts = {host_of(actor_id) for actor_id in changed} & self._proved.keys()
        alike: dict[str | None, list[str]] = {}
        for reader in readers:
            host = host_of(reader.actor_id)
            alike.setdefault(host if reader.proof and host in hosts else None, []).append(reader.actor_id)
        plain = [self._plain[actor_id] for actor_id in changed]
        shown: dict[str | None, list[msgspec.Raw]] = {None: plain}
        for host in hosts:
            proved = self._proved[host]
            shown[host] = [proved.get(actor_id, raw) for actor_id, raw in zip(changed, plain, strict=True)]
        return [(actor_ids, shown[host]) for host, actor_ids in alike.items()]

    def _put(self, member: Member) -> None:
        actor_id, host = member.actor_id, host_of(member.actor_id)
        self._plain[actor_id] = msgspec.Raw(msgspec.msgpack.encode(without_proof(member)))
        proved = self._proved.setdefault(host, {})
        if member.proof:
            proved[actor_id] = msgspec.Raw(msgspec.msgpack.encode(member))
        else:
            proved.pop(actor_id, None)
