"""The process of `meshctl up`: takes the lock, sweeps, supervises until told to stop, leaves nothing behind."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from typing import Final

import uvloop

from cli.errors import CannotBind, CliError, limit_too_low
from cli.exit_codes import ExitCode
from cli.plan.keys import links_note
from cli.plan.names import supervisor_id
from cli.plan.role_configs import CONFIG_TYPES
from cli.plan.settings import Settings
from cli.plan.topology import Topology
from cli.supervisor.actor import SupervisorActor
from cli.supervisor.hosts.welcome import Asker, not_taken_in, require_welcome
from cli.supervisor.keeper import Listeners, ProcessKeeper
from cli.supervisor.kept.cut_calls import end_calls
from cli.supervisor.kept.dead_engines import sweep_engines
from cli.supervisor.kept.host_files import registry_endpoint, write_host_files
from cli.supervisor.kept.log_files import keep_small
from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory
from cli.supervisor.kept.sweep import sweep
from cli.supervisor.owner import Owner
from cli.supervisor.processes.by_pid import STOP_SIGNALS, start_time
from cli.supervisor.processes.children import Children
from cli.supervisor.told.progress import Progress
from cli.supervisor.told.readiness import absent_hosts, unready_reason
from cli.supervisor.told.ready import ready_text, ready_text_elsewhere
from cli.supervisor.told.record import SupervisionRecord
from cli.supervisor.told.registry_watch import RegistryWatch
from mesh.address import Address, Endpoint
from mesh.errors import BindError, MeshError, Superseded
from mesh.membership.proof import HostSecret
from mesh.membership.view import SUPERVISOR, Member
from mesh.options import MAX_PEERS, SystemOptions
from mesh.runtime.plain_structlog import structlog
from mesh.runtime.process_limits import peers_that_fit
from mesh.runtime.process_usage import process_usage
from mesh.runtime.telemetry import LogSettings, setup_log
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes.engine.startup import AllReady
from nodes.numerics import kernels_note, quantization_note

_PROBE_INTERVAL_S: Final = 0.05
"""At most 3 % of a start (1.5 s for `echo`); a probe takes the gateway a millisecond, while it starts."""
_ORPHAN_GRACE_S: Final = 2.0
"""Orphans see at once that their parent is gone, and end; one that does not holds a stop up no longer than this."""


def run_mesh(
    make_topology: Callable[[], Topology], directory: MeshDirectory, progress: Progress, owner: Owner | None = None
) -> ExitCode:
    """Serve until a signal, `meshctl down`, or the end of its `owner`. Raises CliErrors; then nothing is left running.

    `make_topology` is called once this process holds the lock and leftovers are gone: it looks at memory and ports.
    """
    try:
        return _run_locked(make_topology, directory, progress, owner)
    except Exception as error:
        # A limit of the system is met anywhere, under any name; what is about none is raised as it is.
        if (told := limit_too_low(f"the mesh {directory.mesh!r} could not be started", error)) is not None:
            raise told from error
        raise


def _run_locked(
    make_topology: Callable[[], Topology], directory: MeshDirectory, progress: Progress, owner: Owner | None
) -> ExitCode:
    with directory.locked():
        directory.sign_lock()
        for left in sweep_engines():
            progress.note(f"removed what a dead engine left: {left}")
        # Before the topology: what a dead mesh still holds (memory, ports) would be counted as taken.
        for left in sweep(directory):
            progress.note(f"removed what an earlier supervisor left: {left}")
        try:
            topology = make_topology()
        except CliError:
            directory.remove_new()
            raise
        for note in topology.notes:
            progress.line(f"note: {note}")
        with directory.written():
            log = directory.log(SUPERVISOR).open("a", buffering=1)
        with log:
            setup_log(level=LogSettings.from_environment(os.environ).level, stream=log)
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(_MeshProcess(topology, directory, progress, owner).run())
            except BindError as error:
                raise CannotBind(
                    "the supervisor cannot listen", why=error.message, do="correct it, then start again"
                ) from error
            finally:
                structlog.reset_defaults()
                sweep(directory)


def draw_secret(settings: Settings, supervised: Iterable[str]) -> HostSecret:
    """A new secret for a host's supervisor. With `external` the mesh's own roles need no proof."""
    return HostSecret.draw(settings.name, settings.on, supervised, () if settings.external else CONFIG_TYPES)


class _MeshProcess:
    def __init__(
        self, topology: Topology, directory: MeshDirectory, progress: Progress, owner: Owner | None = None
    ) -> None:
        self._owner = owner
        self._topology = topology
        self._directory = directory
        self._progress = progress
        self._num_signals = 0
        self._was_ready = False
        self._interrupted = False
        self._unserved = ""
        self._refusal: MeshError | None = None

    async def run(self) -> ExitCode:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[ExitCode, str]] = loop.create_future()
        name = supervisor_id(self._topology.settings.on)
        address = Address(name, self._directory.last_epoch(name) + 1)
        with self._directory.written():
            self._directory.issue(*address, self._progress.note)
            write_host_files(self._directory.run, self._topology.settings, self._topology.spec)
        settings = self._topology.settings
        if note := await require_welcome(settings, self._topology.spec, Asker(self._directory.run, settings.on)):
            self._progress.line(f"note: {note}")
        children = Children(loop)
        try:
            roles = {launch.actor_id: launch.role for launch in self._topology.actors}
            record = self._record = SupervisionRecord(self._progress, lambda: self._actor.ctx, roles)
            secret = draw_secret(settings, [name, *roles])
            keeper = self._keeper = ProcessKeeper(
                self._topology, self._directory, children, record, self._listeners(), secret
            )
            listen = ZeroMQOptions.of_host(self._directory.run)
            is_elsewhere = settings.on != settings.registry_host
            watch = RegistryWatch(settings.on, registry_endpoint(settings).control, record) if is_elsewhere else None
            actor = self._actor = SupervisorActor(keeper, os.getpid(), listen.keys, watch)
            options = self._options(secret, listen)
            bootstrap = self._directory.run.bootstrap(secret)
            system = self._system = ActorSystem(actor, address, ZeroMQTransport(listen), bootstrap, options)
            for number in STOP_SIGNALS:
                loop.add_signal_handler(number, self._signalled, number)
            rotating = loop.create_task(
                keep_small(self._directory.logs, settings.supervision.max_log_bytes), name="logs"
            )
            watching = loop.create_task(self._end_if_refused(), name="refusal")
            keeping = loop.create_task(keeper.manifest.keep(), name="manifest")
            try:
                await system.start()
                self._begin(keeper, self._manifest(address, system.describe().endpoint))
                code, failure = await self._ended
                actor.ctx.log.info("mesh_stopped", failure=failure)
            finally:
                for task in (rotating, watching, keeping):
                    task.cancel()
                keeper.close()
                await system.stop()
                # After the system: by now renderers, and forks of a zygote that died, have no other parent.
                await children.end_unwatched(_ORPHAN_GRACE_S)
        finally:
            children.close()
        return self._outcome(code, failure)

    def _options(self, secret: HostSecret, listen: ZeroMQOptions) -> SystemOptions:
        return SystemOptions(
            mesh=self._directory.mesh,
            spec=self._topology.spec,
            host=self._directory.run.host_name(),
            usage=process_usage,
            secret=secret,
            vet_host=listen.vet_host,
            max_peers=peers_that_fit(MAX_PEERS),
        )

    def _begin(self, keeper: ProcessKeeper, manifest: Manifest) -> None:
        keeper.begin(manifest)
        if self._owner is not None:
            self._owner.begin(keeper, self._topology.gateway)

    async def _end_if_refused(self) -> None:
        """End this host, with the reason, if a registry that came later refuses it for good: it would serve nobody."""
        await self._system.shutdown_asked()
        self._refusal = self._system.over
        if self._refusal is not None:
            if isinstance(self._refusal, Superseded):
                # The next start goes above the known epoch.
                self._directory.issue(self._system.address.actor_id, self._refusal.known_epoch)
            self._keeper.stop(self._refusal.message, force=True)

    def _listeners(self) -> Listeners:
        return Listeners(
            dead=self._dead,
            drained=lambda drained: self._actor.tell_drained(drained),
            ready=self._all_ready,
            stopped=self._stopped,
            member=self._member,
            unserved=lambda: f"{self._topology.url}/health/ready does not report ready ({self._unserved})",
            signalled=self._actor_signalled,
            await_others=lambda: self._actor.ctx.spawn(self._actor.await_others(), name="await_others"),
        )

    def _dead(self, address: Address, reason: str) -> None:
        self._actor.tell_dead(address, reason)
        # Here and not in a thread, so that it is done before the next incarnation begins: of a gateway with calls it
        # takes 10 ms to read a file of 1 MiB and a ring, of others there is no such file.
        ctx = self._actor.ctx
        try:
            num = end_calls(self._directory.requests, self._directory.traces, address, reason, ctx.now())
        except OSError as error:
            ctx.log.warning("cut_calls_not_told", gateway=str(address), error=str(error))
        else:
            if num:
                ctx.log.warning("calls_cut", gateway=str(address), num=num, reason=reason)

    def _member(self, actor_id: str) -> Member | None:
        """What an actor said of itself in its hello: news from the registry may come later than its heartbeat."""
        peer = self._system.links.get(actor_id)
        if peer is not None and peer.member is not None:
            return peer.member
        return self._actor.ctx.members.get(actor_id)

    def _manifest(self, address: Address, endpoint: Endpoint) -> Manifest:
        topology, where = self._topology, endpoint.on_its_host
        return Manifest(
            mesh=self._directory.mesh,
            pid=os.getpid(),
            start_time=start_time(os.getpid()) or 0,
            supervisor_id=address.actor_id,
            epoch=address.epoch,
            control=where.control,
            data=where.data,
            url=topology.url,
            pool_directory=os.path.abspath(topology.settings.kv.directory),
            pool_prefix=topology.pool_prefix,
        )

    def _signalled(self, number: signal.Signals) -> None:
        # A terminal that closes may send SIGHUP more than once, and that is no request to hurry.
        self._num_signals += number != signal.SIGHUP
        self._interrupted = self._interrupted or (number == signal.SIGINT and not self._was_ready)
        self._keeper.stop(signal.Signals(number).name, force=self._num_signals > 1)

    def _actor_signalled(self, actor_id: str, number: signal.Signals) -> None:
        # Whoever signals every process of a job does so once to each: that is no request to hurry.
        if not self._keeper.core.stopping:
            self._keeper.stop(f"{number.name} to {actor_id}", force=False)

    def _all_ready(self) -> None:
        self._actor.ctx.spawn(self._wait_until_served(), name="probe")

    async def _wait_until_served(self) -> None:
        topology, settings = self._topology, self._topology.settings
        if self._owner is not None:
            # Which sees for itself when it is served.
            self._tell_ready("mesh_ready", f"{settings.name} is ready\n{topology.limits}\n{self._notes()}")
            self._owner.tell(AllReady())
            return
        if not topology.has_gateway:
            # The gateway's host says what is served. Hosts may start in any order, so this one does not wait for it.
            found = self._directory.run.bootstrap().lookup()
            registry = found[1].control if found is not None else ""
            self._tell_ready("host_ready", ready_text_elsewhere(topology, self._progress.elapsed_s, registry))
            return
        if settings.on:
            # On several hosts this takes until the others have come.
            self._keeper.served()
        while waits_for := await unready_reason(settings.host, settings.port):
            # It may have been told to stop meanwhile, or the start has taken too long.
            if self._keeper.core.stopping:
                return
            absent = absent_hosts(settings, self._actor.ctx.members)
            self._unserved = f"waiting: {'; '.join(filter(None, (waits_for, absent)))}"
            self._record.working("mesh", self._unserved)
            await asyncio.sleep(_PROBE_INTERVAL_S)
        self._record.working("mesh", "")
        # The same again: `ready` must not be the last message of a mesh that ends.
        if self._keeper.core.stopping:
            return
        self._tell_ready("mesh_ready", ready_text(topology, self._progress.elapsed_s, self._notes()))

    def _notes(self) -> str:
        members = self._actor.ctx.members.all()
        said = links_note(self._topology.settings), quantization_note(members), kernels_note(members)
        return "\n".join(filter(None, said))

    def _tell_ready(self, event: str, text: str) -> None:
        self._was_ready = True
        self._keeper.served()
        self._actor.ctx.log.info(event, elapsed_s=round(self._progress.elapsed_s, 3))
        self._progress.ready(text)

    def _stopped(self, code: ExitCode, failure: str) -> None:
        if not self._ended.done():
            self._ended.set_result((code, failure))

    def _outcome(self, code: ExitCode, failure: str) -> ExitCode:
        if self._refusal is not None:
            raise not_taken_in(self._refusal, self._directory.mesh, self._topology.settings.on)
        if failure:
            error = CliError(
                f"the mesh {self._directory.mesh!r} could not be started",
                why=failure,
                do=f"see the logs in {self._directory.logs}; nothing is left running",
            )
            error.exit_code = code
            raise error
        self._progress.note("stopped")
        return ExitCode.INTERRUPTED if self._interrupted else code
