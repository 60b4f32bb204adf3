"""Owns the processes of a mesh: performs what the supervision core decides, and tells it what happens.

Runs on the event loop of the `meshctl up` process, in its main thread.
"""

import asyncio
import contextlib
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, assert_never

import msgspec

from cli.exit_codes import FATAL_EXITS, ExitCode
from cli.plan.keys import links_note
from cli.plan.settings import Settings
from cli.plan.topology import ActorLaunch, Topology
from cli.protocol import ActorList
from cli.supervisor.forks.role import LastWords, RoleRun
from cli.supervisor.forks.zygote_client import ZygoteClient
from cli.supervisor.hosts.others import SHARED
from cli.supervisor.kept.log_files import LastLines
from cli.supervisor.kept.manifest_file import ManifestFile
from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory, ProcessRecord
from cli.supervisor.kept_actor import KeptActor
from cli.supervisor.processes.by_pid import Process
from cli.supervisor.processes.children import Children, actor_environment, spawn_process
from cli.supervisor.processes.exits import Exit, Exits
from cli.supervisor.told.record import ZYGOTE, SupervisionRecord
from cli.supervisor.told.refusals import NotGiven, NotRecordable, meant
from mesh.address import MAX_EPOCH, Address
from mesh.membership.proof import NEVER_GIVEN, HostSecret
from mesh.membership.view import DRAINING, READY, RELEASED, SUPERVISOR, Member
from mesh.runtime.driver import CoreDriver
from mesh.runtime.process_limits import read_limits
from mesh.runtime.supervisor_line import SupervisorEnd
from mesh.runtime.timers import DeadlineTimer
from mesh.supervision.core import Supervisor
from mesh.supervision.events import (
    DRAIN_OVERDUE,
    DRAINED,
    AwaitOthers,
    Beat,
    Begin,
    Command,
    Died,
    Event,
    Exited,
    Kill,
    MeshReady,
    MeshStopped,
    OthersDone,
    Policy,
    Report,
    Restart,
    Served,
    Spawn,
    Spawned,
    SpawnFailed,
    StartOverdue,
    Stop,
    Supervised,
    Terminate,
    Tick,
)

_LINE_FD: Final = 3
"""Where an actor that is not forked finds its line."""


class Listeners(msgspec.Struct, kw_only=True):
    """The keeper's callbacks: `dead` and `drained` tell the mesh, `ready` and `stopped` the command.

    `drained` takes all actors that stay away now, with their last epochs; `member` looks an actor up in the view;
    `unserved` says what the mesh as a whole still lacks once all its actors are ready. `signalled` is told which actor
    was told to end by somebody else, and `await_others` to call `others_done` once no other host needs an actor of this
    one.
    """

    dead: Callable[[Address, str], None]
    drained: Callable[[dict[str, int]], None]
    ready: Callable[[], None]
    stopped: Callable[[ExitCode, str], None]
    member: Callable[[str], Member | None]
    unserved: Callable[[], str]
    signalled: Callable[[str, signal.Signals], None]
    await_others: Callable[[], object]


class ProcessKeeper:
    """All actors of one mesh. `secret` is what actors of this host prove their identity with.

    Each is a fork of the zygote or an interpreter of its own, with a line by which it is told what to be.
    """

    def __init__(
        self,
        topology: Topology,
        directory: MeshDirectory,
        children: Children,
        record: SupervisionRecord,
        listeners: Listeners,
        secret: HostSecret,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._topology = topology
        self.directory = directory
        self._children = children
        self._record = record
        self._exits = Exits()
        self._listeners = listeners
        self._secret = secret
        self._drained: dict[str, int] = {}
        self.manifest = ManifestFile(directory, record)
        self._failure_code = ExitCode.NOT_READY
        self._has_changed = False
        self._environment = actor_environment(topology.num_threads)
        supervision = topology.settings.supervision
        self._zygote = ZygoteClient(
            children,
            self._exits,
            topology.preloads,
            on_death=record.zygote_death,
            log=directory.log(ZYGOTE),
            environment=self._environment,
            timeout_s=supervision.start_timeout_s,
        )
        policy = Policy(
            budget=supervision.restart_budget,
            budget_window_s=supervision.restart_window_s,
            kill_after_s=supervision.kill_after_s,
            drain_timeout_s=supervision.drain_timeout_s,
            start_timeout_s=topology.start_timeout_s,
        )
        epochs = {launch.actor_id: directory.last_epoch(launch.actor_id) for launch in topology.actors}
        actors = [
            Supervised(a.actor_id, a.drain_tier, a.start_timeout_s, a.kind, a.role in SHARED) for a in topology.actors
        ]
        self.core = Supervisor(actors, policy, epochs)
        self._actors = {a.actor_id: KeptActor(a, self.core.watches[a.actor_id]) for a in topology.actors}
        # Every actor ends with this process, so ending it over one event would take the whole mesh down. A lost event
        # leaves one actor's state wrong, and that actor's next heartbeat, exit or deadline sets it right.
        self._driver = CoreDriver[Event, Command](record, "supervision", self._handle, self._perform, ends_owner=False)
        self._timer = DeadlineTimer(lambda: record.ctx, self.core.deadline, lambda _: self._feed(Tick()))

    def begin(self, manifest: Manifest) -> None:
        """Start everything. `manifest` is the one that processes are added to."""
        self.manifest.begin(manifest)
        with self.directory.written():
            roles = {launch.actor_id: launch.role for launch in self._topology.actors}
            self.directory.write_actors({SUPERVISOR: SUPERVISOR, ZYGOTE: ZYGOTE, **roles})
            for launch in self._topology.actors:
                self.directory.write_config(launch.actor_id, launch.supervised_config)
        if self._topology.forks:
            # It takes longer than any actor.
            self._zygote.start()
        self._feed(Begin())
        if self._driver.has_failed:
            # Nothing serves yet that could be saved by going on, and a half-started mesh would wait for ever.
            raise RuntimeError(f"supervision failed at its first event: see {self.directory.log(SUPERVISOR)}")

    def beat(self, address: Address, state: str, progress: str) -> None:
        if (kept := self._actors.get(address.actor_id)) is None:
            return
        is_ready = kept.watch.state == READY
        if not is_ready:
            self._record.hello(address.actor_id)
        if address.epoch == kept.watch.epoch:
            kept.is_released = state == RELEASED
        if progress or kept.watch.progress or not is_ready:
            self._record.working(address.actor_id, progress)
        self._driver.feed(Beat(address.actor_id, address.epoch, state in (READY, DRAINING, RELEASED), progress))
        # A beat that changes nothing only puts deadlines off, and an armed timer is never put off.
        if self._has_changed:
            self._timer.arm()

    def served(self) -> None:
        """The start is over: the mesh serves, or waits for other hosts, which may take any time."""
        self._feed(Served())

    def stop(self, reason: str, *, force: bool) -> None:
        self._record.stops(reason, force=force)
        self._feed(Stop(reason, force))

    def others_done(self) -> None:
        self._feed(OthersDone())

    def restart(self, names: list[str], *, stay_away: bool) -> dict[str, int]:
        """Begin to drain actors, named by id or role. Returns their epochs.

        Raises UnknownActor, NotRestartable, or NotRecordable if they are to be started again: nothing happened then.
        """
        found = meant(names, ((launch.actor_id, launch.role) for launch in self._topology.actors))
        # Actors go before those that serve them.
        actor_ids = sorted(found, key=lambda actor_id: self._actors[actor_id].launch.drain_tier)
        epochs = {actor_id: self.core.watches[actor_id].epoch for actor_id in actor_ids}
        # Otherwise a healthy actor would end, and none could take its place. This writes what is there already, which
        # takes as many bytes as the next epoch will.
        try:
            for address in () if stay_away else epochs.items():
                self.directory.issue(*address, self._record.trouble)
        except OSError as error:
            raise NotRecordable(f"the next epoch cannot be recorded in {self.directory.path}: {error}") from error
        self._feed(Restart(tuple(epochs), stay_away))
        return epochs

    def prove(self, actor_id: str, epoch: int, role: str) -> bytes:
        """The proof of an actor that somebody starts by hand. Raises NotGiven for an id or role that is reserved."""
        if actor_id in self._secret.supervised or role in NEVER_GIVEN:
            raise NotGiven(f"only the supervisor may start {actor_id} as {role}")
        return self._secret.prove(actor_id, epoch, role)

    @property
    def settings(self) -> Settings:
        return self._topology.settings

    @property
    def gateway_config(self) -> dict[str, Any]:
        return self._topology.gateway

    def list_actors(self) -> ActorList:
        topology, now = self._topology, self._loop.time()
        ready = all(watch.state in (READY, DRAINED) for watch in self.core.watches.values())
        actors = [kept.status(self._listeners.member(actor_id), now) for actor_id, kept in self._actors.items()]
        name, notes = topology.settings.name, [*filter(None, [links_note(topology.settings)])]
        about = (name, topology.url, topology.model_name, ready, actors, topology.context, notes)
        return ActorList(*about, ends=self.core.stopping)

    def close(self) -> None:
        """Let the zygote end: all actors have ended, or are being killed. Calling this again is harmless."""
        self._timer.cancel()
        for actor_id in self._actors:
            self._close_line(actor_id)
        self._zygote.close()

    def _feed(self, event: Event) -> None:
        self._driver.feed(event)
        self._timer.arm()

    def _handle(self, event: Event, now: float) -> list[Command]:
        commands = self.core.handle(event, now)
        # Of the supervisor's messages nearly all are beats, and of these nearly all change nothing.
        self._has_changed = bool(commands) or not isinstance(event, Beat)
        if self._has_changed and self.core.drained != self._drained:
            # Before any actor is asked to end, so that others know by then that it does so by request.
            self._drained = self.core.drained
            self._listeners.drained(self._drained)
        return commands

    def _perform(self, command: Command) -> None:
        match command:
            case Spawn(actor_id, epoch):
                self._spawn(self._actors[actor_id], Address(actor_id, epoch))
            case Kill(actor_id):
                process = self._actors[actor_id].process
                assert process is not None, f"{actor_id} has a process that can be killed"
                # By pid, which is safe: a child's pid cannot be reused before it is reaped, here, on this loop.
                self._children.signal(process.pid, signal.SIGKILL)
            case Terminate(actor_id, within_s):
                # None once this is closed, which has told everybody.
                if (line := self._actors[actor_id].line) is not None:
                    line.finish(within_s)
            case AwaitOthers():
                self._listeners.await_others()
            case Died():
                self._record.death(command)
                self._listeners.dead(Address(command.actor_id, command.epoch), command.reason)
            case Report():
                self._record.state(command)
            case MeshReady():
                self._listeners.ready()
            case StartOverdue(unready):
                self._feed(Stop("the start takes too long", failure=self._why_unready(unready)))
                # Nothing more is forked, and a zygote that hangs would hold the end up for as long again.
                self._zygote.close()
            case MeshStopped(failure):
                self._listeners.stopped(self._failure_code if failure else ExitCode.OK, failure)
            case _:
                assert_never(command)

    def _why_unready(self, unready: Sequence[str]) -> str:
        """Why the start is over: who is not ready, with the last reasons that were given."""
        who: defaultdict[str, list[str]] = defaultdict(list)
        for actor_id in unready:
            who[self._actors[actor_id].why_unready()].append(actor_id)
        said = [f"{', '.join(actor_ids)}: {why}" for why, actor_ids in who.items()] or [self._listeners.unserved()]
        timeout_s = self.core.policy.start_timeout_s
        return self._with_limit(f"not ready within start_timeout_s ({timeout_s:g} s): {'; '.join(said)}")

    def _with_limit(self, reason: str) -> str:
        """With the limit of the system that the reason's words are about, unless they name it already."""
        limits = read_limits()
        limit = limits.met_in(reason)
        return reason if limit is None or limit.shown_by in reason else f"{reason}; {limits.explain(limit)}"

    def _spawn(self, kept: KeptActor, address: Address) -> None:
        log = self.directory.log(address.actor_id)
        spawned, failed = partial(self._spawned, address), partial(self._spawn_failed, address)
        failure = "its epoch cannot be recorded"
        try:
            # Before anything is started, so that no epoch is issued twice.
            self.directory.issue(*address, self._record.trouble)
            failure = "no line to it can be opened"
            kept.line = line = SupervisorEnd()
            self._loop.add_reader(line.fileno(), self._on_line, address.actor_id, line)
            kept.last_lines = LastLines(log)
            failure = "no process can be started"
            line.give_order(self._order(kept.launch, address.epoch))
            if kept.launch.start == "fork":
                self._zygote.fork(log, line.theirs.fileno(), spawned, failed)
                return
            arguments = ["-m", "cli.supervisor.forks.role", str(_LINE_FD), address.actor_id]
            process = spawn_process(arguments, log, {_LINE_FD: line.theirs.fileno()}, self._environment)
        except OSError as error:
            # Not at once: the commands that the core's last event led to are still being performed.
            self._loop.call_soon(failed, f"{failure}: {error}", False)
        else:
            self._loop.call_soon(spawned, process)

    def _order(self, launch: ActorLaunch, epoch: int) -> bytes:
        run = RoleRun(
            mesh=self.directory.mesh,
            role=launch.role,
            actor_id=launch.actor_id,
            epoch=epoch,
            config=launch.supervised_config,
            drain_timeout_s=self.settings.supervision.drain_timeout_s,
            secret=self._secret,
        )
        return msgspec.msgpack.encode(run)

    def _on_line(self, actor_id: str, line: SupervisorEnd) -> None:
        if not line.read(partial(self._listeners.signalled, actor_id)):
            # Its process has ended, which is heard of when it is reaped.
            self._loop.remove_reader(line.fileno())

    def _last_words(self, actor_id: str) -> LastWords | None:
        """What an actor said of its end before it came, if anything."""
        if (line := self._actors[actor_id].line) is not None:
            # Its process may be reaped before the loop sees what it has said.
            self._on_line(actor_id, line)
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.msgpack.decode(line.last_words, type=LastWords)
        return None

    def _close_line(self, actor_id: str) -> None:
        kept = self._actors[actor_id]
        line, kept.line = kept.line, None
        if line is not None:
            self._loop.remove_reader(line.fileno())
            line.close()

    def _spawned(self, address: Address, process: Process) -> None:
        if (line := self._actors[address.actor_id].line) is not None:
            # It has its own copy, and this one would keep the line open after its end.
            line.theirs.close()
        self._now_runs(address, process)
        self._children.watch(process, partial(self._exited, address))
        self._feed(Spawned(*address))

    def _now_runs(self, address: Address, process: Process | None) -> None:
        kept = self._actors[address.actor_id]
        kept.process, kept.is_released = None, False
        if process is not None:
            (pid, start_time), role = process, kept.launch.role
            kept.process = ProcessRecord(actor_id=address.actor_id, role=role, pid=pid, start_time=start_time)
        self.manifest.write([kept.process for kept in self._actors.values() if kept.process is not None])

    def _spawn_failed(self, address: Address, reason: str, foreign: bool) -> None:
        self._close_line(address.actor_id)
        self._feed(SpawnFailed(*address, self._with_limit(reason), foreign))

    def _exited(self, address: Address, status: int) -> None:
        kept = self._actors[address.actor_id]
        # What the actor said of its end says more than its exit status does.
        said = self._last_words(address.actor_id)
        self._close_line(address.actor_id)
        self._now_runs(address, None)
        try:
            # An actor that was killed leaves them behind, and the next incarnation's have other names.
            self.directory.run.remove_sockets(address)
        except OSError as error:
            self._record.trouble(f"sockets of {address} cannot be removed: {error}")
        if said is not None and said.core:
            self._record.core_failure(address.actor_id, said.core)
        end = self._exits.read(status)
        if status == ExitCode.TIMED_OUT:
            end = Exit(f"not drained within {kept.watch.drain_s:g} s", DRAIN_OVERDUE, foreign=False)
        reason = end.text if said is None else said.message
        if said is None and status and kept.watch.ready_since is None and kept.last_lines is not None:
            reason = kept.last_lines.added_to(reason)
        fatal = status in FATAL_EXITS
        if fatal and not self.core.was_ready:
            self._failure_code = ExitCode(status)
        known_epoch = said.known_epoch if said is not None and said.known_epoch < MAX_EPOCH else 0
        if status and status != ExitCode.TIMED_OUT and not end.foreign:
            # Aborts and signals say nothing of the limit that led to them, but their words do.
            reason = self._with_limit(reason)
        self._feed(Exited(*address, reason, fatal, end.cause, end.foreign, known_epoch))
