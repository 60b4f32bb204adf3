"""Changes of the mesh that its members have not been told of yet, gathered into one. Pure.

A thousand actors that join at once make a thousand changes for a thousand members each; what comes within a moment of
the last telling is told as one change instead, whose `follows` says how far it goes back.
"""

from typing import TYPE_CHECKING

from mesh.wire.frames import Departed, MembersChanged

if TYPE_CHECKING:
    from mesh.address import Address
    from mesh.membership.view import Member


class Untold:
    """What has gathered since `version`, the last one that was told."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._last: MembersChanged | None = None
        self._upserted: dict[str, Member] = {}
        self._left: dict[Address, Departed] = {}

    def add(self, change: MembersChanged) -> None:
        """The next change. Who leaves and comes again as the same incarnation has changed, and not left."""
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
        """All of it as one, which is told now; None if there is nothing."""
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
