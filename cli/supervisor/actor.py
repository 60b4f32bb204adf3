"""The supervisor as an actor: hears every actor's heartbeats, tells the mesh who died, answers `meshctl`.

It decides nothing: deaths and restarts are decided in `mesh/supervision/core.py`; `cli/supervisor/keeper.py` owns the
processes.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

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
from cli.supervisor.hosts.allow_list import AllowListPush
from cli.supervisor.hosts.call_finder import find_calls, find_notes
from cli.supervisor.hosts.deaths import pass_on_death, tell_death
from cli.supervisor.hosts.memory_relay import relay
from cli.supervisor.hosts.others import until_others_are_done
from cli.supervisor.hosts.store_relay import find_fates, flush_stores, list_stores
from cli.supervisor.hosts.whole_mesh import ask, list_whole_mesh, other_supervisors
from cli.supervisor.hosts.whole_restart import WholeRestart
from cli.supervisor.hosts.whole_stop import stop_whole_mesh
from cli.supervisor.keeper import ProcessKeeper
from cli.supervisor.kept.log_files import log_roles, read_logs
from cli.supervisor.processes.by_pid import proportional_bytes
from cli.supervisor.told.readiness import absent_hosts
from cli.supervisor.told.refusals import AbsentHost, UnknownHost
from cli.supervisor.told.registry_watch import RegistryWatch
from mesh.actor import Actor, Call
from mesh.address import Address, host_of
from mesh.errors import CallError, MeshError, RemoteError
from mesh.membership.view import SUPERVISOR, Member
from mesh.runtime.key_files import KeyRing
from mesh.wire.codec import Codec
from mesh.wire.frames import PeerDown
from mesh.wire.message import Message
from nodes.actor_figures import ActorFigures, actor_figures
from nodes.api_keys.note import api_keys_notes
from nodes.numerics import kernels_note, numerics_note, quantization_note, scheduler_numerics, weights_note
from nodes.protocol.memory import ListMemory, ReleaseMemory, ResumeMemory
from nodes.protocol.records import FindCalls, FindNotes
from nodes.protocol.stores import FindFates, FlushStores, ListStores
from nodes.roles import GATEWAY, SupervisorAttributes
from nodes.stats import ask_stats

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
        self, keeper: ProcessKeeper, pid: int, keys: KeyRing | None = None, watch: RegistryWatch | None = None
    ) -> None:
        self._keeper = keeper
        self._pid = pid
        self._keys = keys
        self._watch = watch
        self._push: AllowListPush | None = None
        self._started_at = 0.0
        self._lost: set[Address] = set()

    async def start(self) -> None:
        self._started_at = self.ctx.now()
        self._rolling = WholeRestart(self.ctx, self._look, self._absent)
        if self._keys is not None:
            self._push = AllowListPush(self.ctx, self._keys)
        if self._watch is not None:
            self._watch.begin(self.ctx)

    def on_heartbeat(self, peer: Address, state: str, progress: str) -> None:
        self._keeper.beat(peer, state, progress)

    def on_ask(self, call: Call) -> None:
        try:
            answer = self._answer(call, call.message)
        except MeshError as error:
            _fail(call, error)
        else:
            if isinstance(answer, Message):
                call.reply(answer)
            elif answer is not None:
                self.ctx.spawn(self._answer_later(call, answer), name=type(call.message).__name__)

    def _answer(self, call: Call, message: Any) -> Message | Coroutine[Any, Any, Message | None] | None:
        """The answer, or what is still to be done for it; None if it is answered. Raises MeshError to refuse."""
        lessor = self._keeper.settings.registry_host if isinstance(message, RestartActors) and not message.here else ""
        match message:
            case StopMesh(host=host) | ListLogs(host=host) | ReadLogs(host=host) if host not in ("", self._host):
                return self._pass_on(msgspec.structs.replace(message, host=""), host)
            case RestartActors() if lessor and lessor != self._host:
                return self._pass_on(message, lessor)
            case RestartActors() if lessor:
                return self._rolling.run(call, message)
            case RestartActors():
                return Restarting(epochs=self._keeper.restart(message.names, stay_away=message.stay_away))
            case ListActors():
                return self._list(message)
            case StopMesh():
                self.ctx.spawn(self._stop(message), name="stop")
                return Stopping(pid=self._pid)
            case ProveActor(actor_id, epoch, role):
                config = self._keeper.gateway_config if role == GATEWAY else {}
                return ActorProof(proof=self._keeper.prove(actor_id, epoch, role), config=config)
            case ReadLogs():
                return read_logs(self._keeper.directory, message)
            case ListLogs():
                hosts = {*self._keeper.settings.hosts} | self._other_hosts
                return LogList(roles=log_roles(self._keeper.directory), hosts=sorted(hosts - {self._host}))
            case FindCalls():
                return find_calls(self.ctx, message, self._keeper.directory.requests)
            case FindNotes():
                return find_notes(self.ctx, message, self._keeper.directory.traces)
            case TakeAllowList() if self._push is not None:
                return self._push.take(call.sender, message)
            case ReleaseMemory() | ResumeMemory() | ListMemory():
                return relay(self.ctx, message, self._absent())
            case ListStores():
                return list_stores(self.ctx)
            case FindFates():
                return find_fates(self.ctx, message)
            case FlushStores():
                return flush_stores(self.ctx, message, self._absent())
            case _:
                return super().on_ask(call)

    async def _answer_later(self, call: Call, answering: Coroutine[Any, Any, Message | None]) -> None:
        try:
            if (answer := await answering) is not None:
                call.reply(answer)
        except MeshError as error:
            _fail(call, error)

    def on_members(self, joined: list[Member], left: list[Member], changed: list[Member]) -> None:
        if self._push is not None:
            self._push.look()

    def on_peer_lost(self, peer: Address, reason: str) -> None:
        """Note a lost supervisor: without a registry nobody says that it has left."""
        if peer.actor_id in [supervisor.actor_id for supervisor in other_supervisors(self.ctx)]:
            self._lost.add(peer)

    @property
    def _host(self) -> str:
        return host_of(self.ctx.address.actor_id)

    @property
    def _other_hosts(self) -> set[str]:
        return {host_of(supervisor.actor_id) for supervisor in other_supervisors(self.ctx)}

    def _absent(self) -> str:
        return absent_hosts(self._keeper.settings, self.ctx.members)

    async def _look(self) -> list[ActorStatus]:
        return (await self._list(ListActors(whole_mesh=True))).actors

    async def _pass_on(self, request: _Passed, host: str) -> Message:
        other = supervisor_id(host)
        if self.ctx.members.get(other) is None:
            if host in self._keeper.settings.hosts:
                raise AbsentHost(f"host {host} is not in the mesh")
            there = ", ".join(sorted({self._host} | self._other_hosts))
            raise UnknownHost(f"host {host} is not in the mesh; its hosts are {there}")
        try:
            return await ask(self.ctx, other, request, Message)
        except CallError as error:
            raise RemoteError(error.code, f"the supervisor of {host}: {error.message}", error.retryable) from error

    async def _stop(self, request: StopMesh) -> None:
        settings = self._keeper.settings
        try:
            if request.whole_mesh and self._host:
                # A supervisor that was lost earlier and found again is here.
                self._lost.clear()
                timeout_s = self._keeper.core.policy.gone_after_s
                await stop_whole_mesh(self.ctx, request, settings.registry_host, timeout_s, self._is_there)
        finally:
            self._keeper.stop(request.reason, force=request.force)

    async def await_others(self) -> None:
        """Tell the keeper once no other host needs this one's actors."""
        try:
            await until_others_are_done(self.ctx, [actor.role for actor in self._keeper.list_actors().actors])
        finally:
            self._keeper.others_done()

    def _is_there(self, actor_id: str) -> bool:
        member = self.ctx.members.get(actor_id)
        return member is not None and member.address not in self._lost

    async def _list(self, question: ListActors) -> ActorList:
        me, host = self.ctx.describe(), self._host
        figures: dict[str, ActorFigures] = {}
        if question.figures:
            # The supervisor of another host asks its own actors.
            here = [member for member in (me, *self.ctx.members.all()) if not me.host or member.host == me.host]
            figures = actor_figures(here, await ask_stats(self.ctx, here, _STATS_TIMEOUT_S))
        answer, members = self._keeper.list_actors(), self.ctx.members.all()
        uptime_s = self.ctx.now() - self._started_at
        itself = msgspec.structs.replace(_foreign(me, host), pid=self._pid, uptime_s=uptime_s, supervised=True)
        actors = {actor.actor_id: msgspec.structs.replace(actor, host=host) for actor in (itself, *answer.actors)}
        # In a thread: all of them take longer than heartbeats may wait.
        pss = await asyncio.to_thread(_pss_of, list(actors.values())) if question.pss else {}
        actors |= {member.actor_id: _foreign(member, host) for member in members if member.actor_id not in actors}
        notes = (told([me, *members]) for told in (quantization_note, weights_note, numerics_note, kernels_note))
        numerics = scheduler_numerics(members)

        def shown(id_: str, row: ActorStatus) -> ActorStatus:
            told = figures.get(id_, row.figures)
            return msgspec.structs.replace(row, figures=told, pss_bytes=pss.get(id_), numerics=numerics.get(id_, ""))

        own = msgspec.structs.replace(
            answer,
            actors=[shown(id_, row) for id_, row in actors.items()],
            at=time.time(),
            notes=[*self._troubles(), *answer.notes, *filter(None, notes), *api_keys_notes(members)],
        )
        if question.whole_mesh:
            return await list_whole_mesh(self.ctx, own, self._keeper.settings.hosts, question)
        return own

    def _troubles(self) -> list[str]:
        found = [self._watch.trouble] if self._watch is not None and self._watch.trouble else []
        if self._keys is not None and self._keys.trouble:
            found.append(f"host {self._host} cannot read its keys: {self._keys.trouble}")
        return found

    def tell_dead(self, dead: Address, reason: str) -> None:
        tell_death(self.ctx, dead, reason)

    def on_peer_down(self, sender: Address, down: PeerDown) -> None:
        pass_on_death(self.ctx, sender, down)

    def tell_drained(self, drained: dict[str, int]) -> None:
        """Announce who stays away at an operator's request, also to those that come later: ids and last epochs."""
        self.ctx.announce(**msgspec.structs.asdict(SupervisorAttributes(drained=drained)))


def _fail(call: Call, error: MeshError) -> None:
    call.fail(error.code, error.message, retryable=error.retryable)


def _pss_of(actors: Sequence[ActorStatus]) -> dict[str, int | None]:
    return {actor.actor_id: proportional_bytes(actor.pid) for actor in actors if actor.pid}


def _foreign(member: Member, here: str) -> ActorStatus:
    """A member that somebody else has started, as host `here` lists it, which is "" on a mesh of one host."""
    host = (host_of(member.actor_id) or member.host) if here else ""
    of_member = (member.actor_id, member.role, member.pid, member.epoch, member.endpoint, member.state)
    return ActorStatus(*of_member, supervised=False, host=host)
