"""Watches whether the registry takes this host in; reported in the log, by `meshctl ps`, and while `up` waits.

    member --a join has failed, and a second later none has succeeded--> apart --a join succeeds--> member

The actors of a host that is apart wait for each other, and each knows of the others only that they are no members.
"""

from typing import Final

from cli.supervisor.told.record import SupervisionRecord
from mesh.actor import Context

_LOOK_S: Final = 1.0
"""A failed join that nobody refused is repeated sooner than that."""


class RegistryWatch:
    """Looks once a second, from `begin` on, and tells `record` of changes. `where` is the address of the registry."""

    def __init__(self, host: str, where: str, record: SupervisionRecord) -> None:
        self._what = f"host {host} is waiting for the registry at {where}"
        self._record = record
        self._was_apart = False
        self.trouble = ""
        """What people should know; empty if the host is a member, or no join has failed yet."""

    def begin(self, ctx: Context) -> None:
        self._ctx = ctx
        self._look()

    def _look(self) -> None:
        self._ctx.later(_LOOK_S, self._look)
        why = self._ctx.join_trouble
        # The very first join goes to an epoch that nobody has, and fails.
        text = f"{self._what}: {why}" if why and self._was_apart else ""
        self._was_apart = bool(why)
        if text != self.trouble:
            self.trouble = text
            self._record.apart(text)
        self._record.working(self._ctx.address.actor_id, text)
