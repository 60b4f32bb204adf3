"""The supervisor as an actor: hears every actor's heartbeats, tells the mesh who died, answers `meshctl`.

It decides nothing: deaths and restarts are decided in `mesh/supervision/core.py`; `cli/supervisor/keeper.py` owns the
processes.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from cli.plan.names import supervisor_id
from cli.protocol import (
    SUPERVISOR_CODEC,
    ActorList,
    ActorProof,
    ActorStatus,
    ListActors,
    ListLogs,
    LogList,
    ProveActor,
    ReadLogs,
    RestartActors,
    Restarting,
    StopMesh,
    Stopping,
    TakeAllowList,
)
from cli.supervisor.allow_list import AllowListPush
from cli.supervisor.deaths import Deaths
from cli.supervisor.log_files import LogFolder
from cli.supervisor.memory_relay import relay
from cli.supervisor.readiness import absent_hosts
from cli.supervisor.refusals import Refused
from cli.supervisor.registry_watch import RegistryWatch
from cli.supervisor.whole_mesh import ASK_TIMEOUT_S, list_whole_mesh, other_supervisors
from cli.supervisor.whole_restart import WholeRestart
from cli.supervisor.whole_stop import stop_whole_mesh
from mesh.actor import Actor, Call
from mesh.address import Address, host_of
from mesh.errors import CallError
from mesh.membership.view import SUPERVISOR, Member
from mesh.runtime.key_files import KeyRing
from mesh.wire.codec import Codec
from mesh.wire.frames import PeerDown
from nodes.actor_figures import ActorFigures, actor_figures
from nodes.numerics import kernels_note, numerics_note, quantization_note
from nodes.protocol.memory import ListMemory, ReleaseMemory, ResumeMemory
from nodes.roles import SupervisorAttributes
from nodes.stats import ask_stats

if TYPE_CHECKING:
    from cli.supervisor.keeper import ProcessKeeper

_STATS_TIMEOUT_S = 1.0
"""An actor that is stopped or hangs is shown without figures."""

_Passed = StopMesh | RestartActors | ListLogs | ReadLogs


class SupervisorActor(Actor):
    """The supervisor's half of the mesh; `keeper` owns the processes. `keys` are this host's, None without any.

    `watch` is None if the registry is this host's own.
    """

    role: ClassVar[str] = SUPERVISOR
    codec: ClassVar[Codec] = SUPERVISOR_CODEC

    def __init__(
        self, keeper: "ProcessKeeper", pid: int, keys: KeyRing | None = None, watch: RegistryWatch | None = None
    ) -> None:
        self._keeper = keeper
        self._pid = pid
        self._keys = keys
        self._watch = watch
        self._push: AllowListPush | None = None
        self._started_at = 0.0
        self._changed = asyncio.Event()
        self._lost: set[Address] = set()

    async def start(self) -> None:
        """Note the time, and make what needs the actor's context."""
        self._started_at = self.ctx.now()
        self._deaths = Deaths(self.ctx)
        self._rolling = WholeRestart(self.ctx, self._look, self._absent)
        if self._keys is not None:
            self._push = AllowListPush(self.ctx, self._keys)
        if self._watch is not None:
            self._watch.begin(self.ctx)

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        """An actor is alive."""
        self._keeper.beat(peer, state, progress)

    def on_ask(self, call: Call) -> None:
        """Answer `meshctl`."""
        try:
            self._answer(call, call.message)
        except Refused as error:
            call.fail(error.code, error.message)

    def _answer(self, call: Call, message: Any) -> None:
        match message:
            case StopMesh(host=host) | ListLogs(host=host) | ReadLogs(host=host) if host not in ("", self._host):
                self.ctx.spawn(self._pass_on(call, msgspec.structs.replace(message, host=""), host), name="pass-on")
            case ListActors():
                self.ctx.spawn(self._list(call, message), name="list")
            case StopMesh():
                self._stop(call, message)
            case RestartActors():
                self._restart(call, message)
            case ProveActor(actor_id, epoch, role):
                call.reply(ActorProof(proof=self._keeper.prove(actor_id, epoch, role)))
            case ListLogs() | ReadLogs():
                self._logs(call, message)
            case TakeAllowList() if self._push is not None:
                self._push.take(call, message)
            case ReleaseMemory() | ResumeMemory() | ListMemory():
                self.ctx.spawn(relay(self.ctx, call, message, self._absent()), name="memory")
            case _:
                super().on_ask(call)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        """Wake those that wait for an actor to be gone; tell supervisors that have come the allow list."""
        self._look_again()
        if self._push is not None:
            self._push.look()

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        """Wake them for a lost supervisor too: without a registry nobody says that it has left."""
        if peer.actor_id in [one.actor_id for one in other_supervisors(self.ctx)]:
            self._lost.add(peer)
            self._look_again()

    def _look_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _restart(self, call: Call, request: RestartActors) -> None:
        if not request.here and (host := self._keeper.settings.registry_host):
            lessor = supervisor_id(host)
            if lessor == self.ctx.address.actor_id:
                self.ctx.spawn(self._rolling.run(call, request, supervisor_id), name="restart")
            else:
                self.ctx.spawn(self._pass_on(call, request, host), name="restart")
            return
        call.reply(Restarting(epochs=self._keeper.restart(request.names, stay_away=request.stay_away)))

    @property
    def _host(self) -> str:
        return host_of(self.ctx.address.actor_id)

    @property
    def _other_hosts(self) -> set[str]:
        """The other hosts that are in the mesh now."""
        return {host_of(one.actor_id) for one in other_supervisors(self.ctx)}

    def _absent(self) -> str:
        return absent_hosts(self._keeper.settings, self.ctx.members)

    async def _look(self) -> list[ActorStatus]:
        return (await self._listed(ListActors(whole_mesh=True))).actors

    def _stop(self, call: Call, request: StopMesh) -> None:
        call.reply(Stopping(pid=self._pid))
        if request.whole_mesh and self._host:
            self.ctx.spawn(self._stop_whole_mesh(request), name="stop")
        else:
            self._keeper.stop(request.reason, force=request.force)

    def _logs(self, call: Call, request: ListLogs | ReadLogs) -> None:
        folder = LogFolder(self._keeper.directory)
        if isinstance(request, ReadLogs):
            call.reply(folder.read(request))
        else:
            hosts = {*self._keeper.settings.hosts} | self._other_hosts
            call.reply(LogList(roles=folder.roles(), hosts=sorted(hosts - {self._host})))

    async def _pass_on(self, call: Call, request: _Passed, host: str) -> None:
        """Pass a request on to another host's supervisor, and its answer back."""
        other = supervisor_id(host)
        if self.ctx.members.get(other) is None:
            if host in self._keeper.settings.hosts:
                call.fail("absent_host", f"host {host} is not in the mesh", retryable=True)
                return
            there = ", ".join(sorted({self._host} | self._other_hosts))
            call.fail("unknown_host", f"host {host} is not in the mesh; its hosts are {there}")
            return
        try:
            answer = await self.ctx.ask(other, request, timeout_s=ASK_TIMEOUT_S)
        except CallError as error:
            call.fail(error.code, f"the supervisor of {host}: {error.message}", retryable=error.retryable)
        else:
            call.reply(answer.message)

    async def _stop_whole_mesh(self, request: StopMesh) -> None:
        # A supervisor that was lost earlier and found again is here.
        self._lost.clear()
        try:
            registry_host, drain_s = self._keeper.settings.registry_host, self._keeper.drain_timeout_s
            await stop_whole_mesh(self.ctx, request, registry_host, drain_s, self._left)
        finally:
            self._keeper.stop(request.reason, force=request.force)

    async def _left(self, actor_id: str, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (member := self.ctx.members.get(actor_id)) is not None and member.address not in self._lost:
                    await self._changed.wait()

    async def _list(self, call: Call, question: ListActors) -> None:
        call.reply(await self._listed(question))

    async def _listed(self, question: ListActors) -> ActorList:
        me = self.ctx.describe()
        members = {member.actor_id: member for member in [me, *self.ctx.members.all()]}
        figures: dict[str, ActorFigures] = {}
        if question.figures:
            # The supervisor of another host asks its own actors.
            here = [one for one in members.values() if not me.host or one.host == me.host]
            figures = actor_figures(here, await ask_stats(self.ctx, here, _STATS_TIMEOUT_S))
        answer = self._keeper.list_actors()
        actors = [self._status(), *answer.actors]
        known = {actor.actor_id for actor in actors}
        actors += [_foreign(member) for member in self.ctx.members.all() if member.actor_id not in known]
        notes = (told(members.values()) for told in (quantization_note, numerics_note, kernels_note))
        own = msgspec.structs.replace(
            answer,
            actors=[
                msgspec.structs.replace(
                    actor, figures=figures.get(actor.actor_id, actor.figures), host=_host_of(me, members, actor)
                )
                for actor in actors
            ],
            notes=[*self._troubles(), *answer.notes, *filter(None, notes)],
        )
        if question.whole_mesh:
            return await list_whole_mesh(self.ctx, own, self._keeper.settings.hosts, figures=question.figures)
        return own

    def _troubles(self) -> list[str]:
        """What keeps this host apart from the others."""
        found = [self._watch.trouble] if self._watch is not None and self._watch.trouble else []
        if self._keys is not None and self._keys.trouble:
            found.append(f"host {self._host} cannot read its keys: {self._keys.trouble}")
        return found

    def _status(self) -> ActorStatus:
        return msgspec.structs.replace(
            _foreign(self.ctx.describe()), pid=self._pid, uptime_s=self.ctx.now() - self._started_at, supervised=True
        )

    def tell_dead(self, dead: Address, reason: str) -> None:
        """Tell everybody that an incarnation was reaped."""
        self._deaths.tell(dead, reason)

    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        """Tell this host's actors who is dead on another host."""
        self._deaths.pass_on(sender, down)

    def tell_drained(self, drained: dict[str, int]) -> None:
        """Announce who stays away at an operator's request, also to those that come later: ids and last epochs."""
        self.ctx.announce(**msgspec.structs.asdict(SupervisorAttributes(drained=drained)))


def _host_of(me: Member, members: Mapping[str, Member], actor: ActorStatus) -> str:
    """The actor's host; empty on a mesh of one host, where it would be the same for all."""
    own = host_of(me.actor_id)
    if not own or actor.supervised:
        return own
    return host_of(actor.actor_id) or members[actor.actor_id].host


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
