"""What a gateway knows of the mesh's schedulers, for its core and for its log."""

from collections.abc import Callable

from mesh.actor import Answer, Context
from mesh.errors import MeshError
from mesh.wire.frames import Ping
from nodes.gateway.requests.events import SchedulerAnswered, SchedulersChanged
from nodes.gateway.requests.retrying import WORD_OF_DEATH_S
from nodes.numerics import numerics_note, scheduler_bits, weights_note
from nodes.roles import SCHEDULER


class SchedulerView:
    """Reads the members. Unequal numerics or weights are logged once, and again only after they were equal."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._has_told: set[str] = set()
        self._asked: set[str] = set()

    def changed(self) -> SchedulersChanged:
        members = self._ctx.members
        notes = {"unequal_numerics": numerics_note(members.all()), "unequal_weights": weights_note(members.all())}
        do = "see `mesh_numerics_changes_total` for the number of requests that went on otherwise than they began"
        for event, note in notes.items():
            # Every change of the mesh comes through here, and the note would be the same each time.
            if note and event not in self._has_told:
                self._ctx.log.warning(event, note=note, do=do)
        self._has_told = {event for event, note in notes.items() if note}
        ready = members.by_role(SCHEDULER)
        stand_ins = frozenset(member.actor_id for member in ready if member.attributes.get("phase") == "prefill")
        return SchedulersChanged(
            {member.actor_id: member.epoch for member in ready}, stand_ins, scheduler_bits(members.all())
        )

    def policies_without_priority(self) -> list[str]:
        policies = {str(member.attributes.get("policy", "")) for member in self._ctx.members.by_role(SCHEDULER)}
        return sorted(policies - {"priority"})

    def ask_alive(self, scheduler: str, handle: Callable[[SchedulerAnswered], None]) -> None:
        """Ask a lost scheduler whether it is still there, once for all its requests. No answer has no effect."""
        if scheduler in self._asked:
            return
        self._asked.add(scheduler)

        def then(outcome: Answer | MeshError) -> None:
            self._asked.discard(scheduler)
            if isinstance(outcome, Answer):
                handle(SchedulerAnswered(*outcome.sender))

        self._ctx.ask_then(scheduler, Ping(), then, timeout_s=WORD_OF_DEATH_S)
