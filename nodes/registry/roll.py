"""All members in encoded form: each is encoded once when it changes, not once for every reader. Pure.

A list for a reader is those bytes one after the other, with the proofs that this reader may see.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from mesh.address import host_of
from mesh.errors import REGISTRY_FULL, FrameRefused
from mesh.membership.proof import without_proof
from mesh.membership.view import Member
from mesh.wire.frames import MembersChanged

MAX_MEMBER_BYTES: Final = 64 << 10
"""192 such members fill `MAX_BYTES`, so one actor takes at most half a percent of what all have."""
MAX_BYTES: Final = 12 << 20
"""Of all members: a joiner gets them in one message, whose body is at most 16 MiB. Each of the mesh's own actors takes
some hundred bytes."""


class Roll:
    """Follows the changes of one registry. Lists of `msgspec.Raw` stand for lists of members in what is encoded."""

    def __init__(self, own: Member) -> None:
        self._plain: dict[str, msgspec.Raw] = {}
        self._proved: dict[str, dict[str, msgspec.Raw]] = {}
        self._num_bytes = 0
        self._put(own)

    def require_room(self, member: Member) -> None:
        """Raise `FrameRefused` for a member with which one message could not hold all members.

        Codes: `too_large` if it announces too much itself, `registry_full` if all of them together do.
        """
        size, known = len(msgspec.msgpack.encode(member)), self._plain.get(member.actor_id, b"")
        if size > MAX_MEMBER_BYTES:
            why = f"{member.address} announces {size} bytes, but at most {MAX_MEMBER_BYTES} are accepted: announce less"
            raise FrameRefused("too_large", f"{why}, and send the rest only on request")
        if (num_bytes := self._num_bytes - len(known) + size) > MAX_BYTES:
            why = f"all members together would announce {num_bytes} bytes, and one message holds {MAX_BYTES}"
            raise FrameRefused(REGISTRY_FULL, f"{why}: stop actors that are not needed before {member.address} joins")

    def take(self, change: MembersChanged) -> None:
        for departed in change.left:
            self._num_bytes -= len(self._plain.pop(departed.actor_id, b""))
            self._proved.get(host_of(departed.actor_id), {}).pop(departed.actor_id, None)
        for member in change.upserted:
            self._put(member)

    def shown_to(self, reader: Member) -> list[msgspec.Raw]:
        proved = self._proved.get(host_of(reader.actor_id)) if reader.proof else None
        return list(({**self._plain, **proved} if proved else self._plain).values())

    def shown_alike(
        self, readers: Iterable[Member], upserted: Iterable[Member]
    ) -> list[tuple[list[str], list[msgspec.Raw]]]:
        """Some members for several readers: groups of reader ids that see the same, each with what they see."""
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
        plain = msgspec.msgpack.encode(without_proof(member))
        self._num_bytes += len(plain) - len(self._plain.get(actor_id, b""))
        self._plain[actor_id] = msgspec.Raw(plain)
        proved = self._proved.setdefault(host, {})
        if member.proof:
            proved[actor_id] = msgspec.Raw(msgspec.msgpack.encode(member))
        else:
            proved.pop(actor_id, None)
