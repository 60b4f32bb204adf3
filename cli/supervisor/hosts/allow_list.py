"""Passes on the list of hosts whose keys are accepted, from the registry's host to all others.

    supervisor of the registry's host --TakeAllowList, until answered--> supervisors of the other hosts
    supervisor of another host --allowed.json--> its actors, which look at the file every heartbeat

So each host has a copy, which holds while the registry is away. A later version replaces an earlier one, never the
other way round. A file that is damaged or gone is written again as it was. Owned by `SupervisorActor` on a mesh with
keys.
"""

from collections.abc import Iterable
from typing import Final

from cli.protocol import AllowListTaken, TakeAllowList
from cli.supervisor.hosts.whole_mesh import ask, other_supervisors
from mesh.actor import Context
from mesh.address import Address, host_of
from mesh.errors import WRONG_KEY, CallError, FrameRefused
from mesh.membership.keys import AllowList, BadKey
from mesh.runtime.key_files import KeyFileError, KeyRing

_LOOK_S: Final = 1.0
"""The longest until a change is told; also the pause before it is told again to a supervisor that did not answer."""


class Telling:
    """Which supervisors still have to be told which version. Pure."""

    def __init__(self) -> None:
        self._taken: dict[Address, int] = {}
        self._asked: set[Address] = set()

    def due(self, supervisors: Iterable[Address], version: int) -> list[Address]:
        """Those to ask now; they count as asked until `answered`. Any not among `supervisors` are forgotten."""
        known = set(supervisors)
        self._taken = {address: taken for address, taken in self._taken.items() if address in known}
        found = sorted(address for address in known - self._asked if self._taken.get(address, -1) < version)
        self._asked.update(found)
        return found

    def answered(self, address: Address, version: int | None) -> None:
        """An ask has ended: the supervisor has this version; None if it has not said so."""
        self._asked.discard(address)
        if version is not None:
            self._taken[address] = version


class AllowListPush:
    """Tells other supervisors the list if this host is the registry's, and takes what the registry's host tells.

    The owner of the transport has `keys` check whether their file has changed.
    """

    def __init__(self, ctx: Context, keys: KeyRing) -> None:
        self._ctx = ctx
        self._keys = keys
        self._telling = Telling()
        self._trouble = ""
        self._tick()

    def look(self) -> None:
        allowed = self._keys.allowed
        if allowed.registry().host != self._keys.own.host:
            return
        for address in self._telling.due((peer.address for peer in other_supervisors(self._ctx)), allowed.version):
            self._ctx.spawn(self._tell(address, allowed), name=f"keys-{address}")

    def take(self, sender: Address, message: TakeAllowList) -> AllowListTaken:
        """Take a list that has come, but only over a connection made with the key of the registry's host.

        Raises FrameRefused, BadKey, KeyFileError.
        """
        # The file may have been written since, for instance by the message before this one.
        self._keys.poll()
        allowed = self._keys.allowed
        if host_of(sender.actor_id) != allowed.registry().host:
            raise FrameRefused(WRONG_KEY, f"{sender} sent an allow list, which only the registry's host may do")
        if message.allowed.version > allowed.version:
            try:
                message.allowed.check()
                self._keys.write(message.allowed)
            except (BadKey, KeyFileError) as error:
                self._ctx.log.warning("keys not taken", version=message.allowed.version, why=error.message)
                raise
            self._ctx.log.info("keys", version=message.allowed.version, hosts=len(message.allowed.hosts))
        return AllowListTaken(version=max(message.allowed.version, allowed.version))

    async def _tell(self, address: Address, allowed: AllowList) -> None:
        version = None
        try:
            version = (await ask(self._ctx, address.actor_id, TakeAllowList(allowed=allowed), AllowListTaken)).version
        except CallError as error:
            self._ctx.log.debug("keys not told", peer=str(address), why=str(error))
        finally:
            self._telling.answered(address, version)

    def _tick(self) -> None:
        self._ctx.later(_LOOK_S, self._tick)
        if why := self._keys.restore():
            self._ctx.log.warning("keys_restored", why=why, version=self._keys.allowed.version)
        if self._keys.trouble != self._trouble:
            self._trouble = self._keys.trouble
            if self._trouble:
                self._ctx.log.warning("keys cannot be read", why=self._trouble)
        self.look()
