"""Which groups have lost their worker, by what supervisors say: they know it before the registry has it from anybody.

    PeerDown of a worker                       its group is away: nothing is routed there that can go elsewhere
    a later incarnation is a ready member      it is back; the scheduler has adopted it, or will within milliseconds

Between the two the scheduler announces `worker_ready` false and true again, each when it gets round to it, so what the
registry says of it may be older than the death, and again older than the return. Pure; owned by `routing.py`.
"""

from typing import Final

from mesh.address import Address
from mesh.membership.view import READY, Member

MAX_REMEMBERED: Final = 1024
"""Workers whose groups are known though they are no members: more than a mesh of any size loses at one time."""


class DeadWorkers:
    """Workers that are dead, by group."""

    def __init__(self) -> None:
        # A dead member leaves the view before its death is told, and with it what it announced.
        self._groups: dict[str, str] = {}
        self._ready: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._away: frozenset[str] = frozenset()

    def is_away(self, group: str) -> bool:
        return group in self._away

    def see(self, worker: Member) -> None:
        """A worker is a member."""
        group = worker.attributes.get("group", "")
        if isinstance(group, str) and group:
            self._groups.pop(worker.actor_id, None)
            self._groups[worker.actor_id] = group
            if len(self._groups) > MAX_REMEMBERED:
                self._forget(next(iter(self._groups)))
            if worker.state == READY:
                self._ready[worker.actor_id] = worker.epoch
        # The view may still show the dead one, by a registry that has not heard of it.
        if worker.state == READY and worker.epoch > self._dead.get(worker.actor_id, worker.epoch):
            del self._dead[worker.actor_id]
            self._count()

    def died(self, worker: Address) -> None:
        """This incarnation is dead; nothing happens if it is none of a worker, or the next one is there already."""
        if worker.actor_id in self._groups and worker.epoch >= self._ready.get(worker.actor_id, 0):
            self._dead[worker.actor_id] = max(worker.epoch, self._dead.get(worker.actor_id, 0))
            self._count()

    def _forget(self, actor_id: str) -> None:
        del self._groups[actor_id]
        self._dead.pop(actor_id, None)
        self._ready.pop(actor_id, None)
        self._count()

    def _count(self) -> None:
        self._away = frozenset(self._groups[actor_id] for actor_id in self._dead)
