"""The supervisor as an actor: hears every actor's heartbeats, tells the mesh who died, answers `meshctl`.

Decides nothing: deaths and restarts are `mesh/supervision/core.py`, processes are `cli/supervisor/keeper.py`.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from cli.protocol import (
    SUPERVISOR_CODEC,
    ActorProof,
    ActorStatus,
    ListActors,
    ProveActor,
    RestartActors,
    Restarting,
    StopMesh,
    Stopping,
)
from cli.supervisor.memory_relay import relay
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.errors import CallError
from mesh.membership.view import SUPERVISOR, Member
from mesh.transport.base import Channel
from mesh.wire.codec import Codec
from mesh.wire.frames import Leave, PeerDown
from nodes.actor_figures import ActorFigures, actor_figures
from nodes.numerics import kernels_note, numerics_note, quantization_note
from nodes.protocol.memory import ListMemory, ReleaseMemory, ResumeMemory
from nodes.roles import SupervisorAttributes
from nodes.stats import ask_stats

if TYPE_CHECKING:
    from cli.supervisor.keeper import ProcessKeeper

_LEAVE_TIMEOUT_S = 1.0
_STATS_TIMEOUT_S = 1.0
"""Who is stopped or hangs is shown without figures."""


class UnknownActor(Exception):
    """No actor and no role has this name."""


class NotRecordable(Exception):
    """No new epoch can be recorded, so nobody could be started again."""


class NotGiven(Exception):
    """An actor is the supervisor's own to start, and nobody else gets a proof to be it."""


class SupervisorActor(Actor):
    """The supervisor's half of the mesh; `keeper` owns the processes."""

    role: ClassVar[str] = SUPERVISOR
    codec: ClassVar[Codec] = SUPERVISOR_CODEC

    def __init__(self, keeper: "ProcessKeeper", pid: int) -> None:
        self._keeper = keeper
        self._pid = pid
        self._started_at = 0.0

    async def start(self) -> None:
        """Remember when."""
        self._started_at = self.ctx.now()

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        """An actor is alive."""
        self._keeper.beat(peer, state, progress)

    def on_ask(self, call: Call) -> None:
        """Answer `meshctl`."""
        message: Any = call.message
        match message:
            case ListActors():
                self.ctx.spawn(self._list(call, message), name="list")
            case StopMesh():
                call.reply(Stopping(pid=self._pid))
                self._keeper.stop(message.reason, force=message.force)
            case RestartActors():
                try:
                    epochs = self._keeper.restart(message.names, stay_away=message.stay_away)
                except UnknownActor as error:
                    call.fail("unknown_actor", str(error))
                except NotRecordable as error:
                    call.fail("not_recordable", str(error))
                else:
                    call.reply(Restarting(epochs=epochs))
            case ProveActor(actor_id, epoch, role):
                try:
                    call.reply(ActorProof(proof=self._keeper.prove(actor_id, epoch, role)))
                except NotGiven as error:
                    call.fail("not_given", str(error))
            case ReleaseMemory() | ResumeMemory() | ListMemory():
                self.ctx.spawn(relay(self.ctx, call, message), name="memory")
            case _:
                super().on_ask(call)

    async def _list(self, call: Call, question: ListActors) -> None:
        members = {member.actor_id: member for member in [self.ctx.describe(), *self.ctx.members.all()]}
        figures: dict[str, ActorFigures] = {}
        if question.figures:
            answers = await ask_stats(self.ctx, list(members.values()), _STATS_TIMEOUT_S)
            figures = actor_figures(list(members.values()), answers)
        answer = self._keeper.list_actors()
        actors = [self._status(), *answer.actors]
        known = {actor.actor_id for actor in actors}
        actors += [_foreign(member) for member in self.ctx.members.all() if member.actor_id not in known]
        call.reply(
            msgspec.structs.replace(
                answer,
                actors=[
                    msgspec.structs.replace(actor, figures=figures.get(actor.actor_id, actor.figures))
                    for actor in actors
                ],
                notes=[
                    *answer.notes,
                    *(
                        note
                        for told in (quantization_note, numerics_note, kernels_note)
                        if (note := told(members.values()))
                    ),
                ],
            )
        )

    def _status(self) -> ActorStatus:
        return msgspec.structs.replace(
            _foreign(self.ctx.describe()), pid=self._pid, uptime_s=self.ctx.now() - self._started_at, supervised=True
        )

    def tell_dead(self, dead: Address, reason: str) -> None:
        """Tell everybody that an incarnation was reaped, so that nobody waits for it."""
        down = PeerDown(actor_id=dead.actor_id, epoch=dead.epoch, reason=reason)
        for member in self.ctx.members.all():
            if member.actor_id not in (dead.actor_id, self.ctx.address.actor_id):
                self.ctx.tell(member.actor_id, down, channel=Channel.CONTROL)
        self.ctx.spawn(self._leave(dead, reason), name=f"leave-{dead}")

    def tell_drained(self, drained: dict[str, int]) -> None:
        """Tell everybody, those who come later too, who stays away by an operator's wish: ids and last epochs."""
        self.ctx.announce(**msgspec.structs.asdict(SupervisorAttributes(drained=drained)))

    async def _leave(self, dead: Address, reason: str) -> None:
        leave = Leave(actor_id=dead.actor_id, epoch=dead.epoch, reason=reason)
        for registry in self.ctx.members.by_role("registry", ready=False):
            try:
                await self.ctx.ask(registry.actor_id, leave, timeout_s=_LEAVE_TIMEOUT_S)
            except CallError:
                # Its lease ends by itself.
                return


def _foreign(member: Member) -> ActorStatus:
    """A member that somebody else has started."""
    return ActorStatus(
        actor_id=member.actor_id,
        role=member.role,
        pid=member.pid,
        epoch=member.epoch,
        endpoint=member.endpoint,
        state=member.state,
        supervised=False,
    )
