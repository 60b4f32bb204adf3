"""Drains and restarts over the hosts of a mesh: one at a time in the whole mesh, host after host.

    meshctl --ask--> supervisor.b --the same--> supervisor of the registry's host --`here`--> each host in its turn

The supervisor of the registry's host holds the lease: while a restart is under way, it refuses any other. A host's own
supervisor goes from one of its actors to the next; hosts go one after the other, so that two actors that stand in for
each other are never both away by request.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from cli.plan.names import supervisor_id
from cli.protocol import ActorStatus, RestartActors, Restarting
from cli.supervisor.hosts.whole_mesh import ask
from cli.supervisor.told.refusals import RestartRunning, meant
from mesh.actor import Call, Context
from mesh.errors import CallError
from mesh.supervision.events import GIVEN_UP

_LOOK_S: Final = 0.2
"""An actor takes half a second or more to end and to start again; a look takes a millisecond a host."""
_PATIENCE_S: Final = 600.0
"""For one host: a drain has its own timeout, and loading a large model from a slow disk takes minutes."""


class WholeRestart:
    """Owned by the supervisor of the registry's host. `look` lists the actors of the whole mesh.

    `absent` says which hosts are not in it, empty if all are.
    """

    def __init__(
        self, ctx: Context, look: Callable[[], Awaitable[list[ActorStatus]]], absent: Callable[[], str]
    ) -> None:
        self._ctx = ctx
        self._look = look
        self._absent = absent
        self.is_running = False

    async def run(self, call: Call, request: RestartActors) -> None:
        """Answer `call` with the actors named, and restart them in turn. Raises Refused instead of answering."""
        if self.is_running:
            raise RestartRunning("another drain or restart is under way in this mesh")
        self.is_running = True
        try:
            actors = {actor.actor_id: actor for actor in await self._look() if actor.supervised}
            by_host: dict[str, dict[str, int]] = {}
            for name in meant(request.names, ((id_, actor.role) for id_, actor in actors.items()), self._absent()):
                by_host.setdefault(actors[name].host, {})[name] = actors[name].epoch
            epochs = {name: epoch for some in by_host.values() for name, epoch in some.items()}
            call.reply(Restarting(epochs=epochs, note=self._absent()))
            for host, epochs in by_host.items():
                if not await self._roll(supervisor_id(host), request, epochs):
                    return
        finally:
            self.is_running = False

    async def _roll(self, supervisor: str, request: RestartActors, epochs: Mapping[str, int]) -> bool:
        """Restart one host's. False if it cannot be asked, or an actor does not return: later hosts are left alone."""
        ctx = self._ctx
        order = RestartActors(names=list(epochs), stay_away=request.stay_away, here=True)
        try:
            await ask(ctx, supervisor, order, Restarting)
        except CallError as error:
            ctx.log.warning("restart_ended", peer=supervisor, why=error.message)
            return False
        deadline, waiting = ctx.now() + _PATIENCE_S, dict(epochs)
        while waiting and ctx.now() < deadline:
            await asyncio.sleep(_LOOK_S)
            for actor in await self._look():
                if (epoch := waiting.get(actor.actor_id)) is None:
                    continue
                if actor.state == GIVEN_UP:
                    ctx.log.warning("restart_ended", peer=actor.actor_id, why="it could not be started again")
                    return False
                if actor.is_restarted(epoch, stay_away=request.stay_away):
                    del waiting[actor.actor_id]
        return not waiting
