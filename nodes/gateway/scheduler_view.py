"""What a gateway follows of the mesh's schedulers: for its core, and for its log."""

from mesh.actor import Context
from nodes.gateway.events import SchedulersChanged
from nodes.numerics import numerics_note, scheduler_numerics
from nodes.roles import SCHEDULER


class SchedulerView:
    """Reads the members. Unequal numerics are logged once, and again only after they were equal."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._has_told = False

    def changed(self) -> SchedulersChanged:
        """How schedulers stand now."""
        members = self._ctx.members
        note = numerics_note(members.all())
        # Every change of the mesh comes through here, and the note would be the same each time.
        if note and not self._has_told:
            do = "see `mesh_numerics_changes_total` for requests that went on under others than they began with"
            self._ctx.log.warning("unequal_numerics", note=note, do=do)
        self._has_told = bool(note)
        ready = members.by_role(SCHEDULER)
        stand_ins = frozenset(one.actor_id for one in ready if one.attributes.get("phase") == "prefill")
        return SchedulersChanged(
            {one.actor_id: one.epoch for one in ready}, stand_ins, scheduler_numerics(members.all())
        )
