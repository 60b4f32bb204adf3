"""Membership changes that the members have not been told of yet, merged into one. Pure.

A thousand actors that join at once make a thousand changes for a thousand members each. Changes that come shortly after
the last round of telling are told as one change instead, and its `follows` says how far back it goes.
"""

from typing import TYPE_CHECKING

from mesh.wire.frames import Departed, MembersChanged

if TYPE_CHECKING:
    from mesh.address import Address
    from mesh.membership.view import Member


class PendingChanges:
    """Changes since `version`, the last one that was told."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._last: MembersChanged | None = None
        self._upserted: dict[str, Member] = {}
        self._left: dict[Address, Departed] = {}

    def add(self, change: MembersChanged) -> None:
        """Add the next change. An incarnation that leaves and joins again counts as changed, not as departed."""
        self._last = change
        for departed in change.left:
            self._left[departed.address] = departed
            member = self._upserted.get(departed.actor_id)
            if member is not None and member.epoch <= departed.epoch:
                del self._upserted[departed.actor_id]
        for member in change.upserted:
            self._upserted[member.actor_id] = member
            self._left.pop(member.address, None)

    def take(self) -> MembersChanged | None:
        """All changes merged into one, which is now told; None if there are none."""
        last = self._last
        if last is None:
            return None
        merged = MembersChanged(
            registry_epoch=last.registry_epoch,
            version=last.version,
            upserted=list(self._upserted.values()),
            left=list(self._left.values()),
            follows=self.version,
        )
        self.version, self._last = last.version, None
        self._upserted, self._left = {}, {}
        return merged
