"""`meshctl up`: plan a mesh, then print it, serve it in the foreground, or send it to the background."""

import contextlib
import errno
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cli.errors import BadConfig, CannotBind, CliError, NoMemory, StartFailed, WrongUsage
from cli.exit_codes import ExitCode
from cli.plan.api_keys import given_keys, settle_api_keys, take_given_keys
from cli.plan.disk import look_at_disk
from cli.plan.keys import settle_keys
from cli.plan.limits import LEAST, require
from cli.plan.model import names_hub, plan_model
from cli.plan.settings import Settings
from cli.plan.sources import API_KEYS_VARIABLE, foreign_variables, load_settings
from cli.plan.topology import Machine, Topology, plan_topology
from cli.supervisor.device_memory import ask_devices
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.processes.by_pid import leave_terminal, on_signals
from cli.supervisor.told.progress import READY_MARK, Progress
from mesh.membership.view import SUPERVISOR
from mesh.runtime.process_limits import raise_limits, read_limits


def up(file: Path | None, options: dict[str, Any], *, join: str | None, detach: bool, dry_run: bool) -> ExitCode:
    """Start a mesh, or join one, and wait until it serves. Raises CliErrors; then nothing is left running."""
    if join is not None:
        return _join(join, file, options, detach=detach, dry_run=dry_run)
    for name in ("address", "ports"):
        if options.pop(name, None) is not None:
            raise WrongUsage(
                f"--{name} can only be used with --join",
                why=f"a host of a topology file has its {name} there",
                do=f"set [hosts.NAME] {name}, or leave it out",
            )
    settings = settings_in_force(file, options)
    if dry_run:
        progress = Progress(2, is_terminal=sys.stderr.isatty())
        topology = plan(settings, progress, fetches=False, reading=progress)
        tell_notes(topology)
        if given_keys(os.environ) is not None:
            place = topology.settings.api_key_file
            sys.stderr.write(f"note: `meshctl up` writes the hashes of {API_KEYS_VARIABLE}'s keys to {place}\n")
        return _print(topology)
    if not names_hub(settings.model):
        # Report unusable settings before anything else. Free memory does not count yet: it is looked at again when an
        # earlier mesh's leftovers are gone, and if a mesh of this name runs, that is the error.
        with contextlib.suppress(NoMemory):
            # What takes long is said now, all the rest by the second plan.
            plan(settings, Progress(None), fetches=False, reading=Progress(2))
    return _start(MeshDirectory(settings.name), lambda: settings, detach=detach)


def _join(token: str, file: Path | None, options: dict[str, Any], *, detach: bool, dry_run: bool) -> ExitCode:
    from cli.commands.join import Join

    if dry_run:
        raise WrongUsage(
            "--dry-run cannot be combined with --join",
            why="what would run depends on what the registry tells a host that joins",
            do="leave one of them out",
        )
    join = Join(token, file, options, os.environ)
    directory = MeshDirectory(join.token.mesh)
    return _start(directory, lambda: join.settings(directory.run), detach=detach)


def _start(directory: MeshDirectory, make_settings: Callable[[], Settings], *, detach: bool) -> ExitCode:
    # Looked up before a child leaves the terminal.
    is_terminal = sys.stderr.isatty()
    directory.create()
    if detach:
        return _in_background(make_settings, directory, is_terminal=is_terminal)
    return _serve(make_settings, directory, Progress(2, is_terminal=is_terminal))


def settings_in_force(file: Path | None, options: dict[str, Any]) -> Settings:
    """The settings, after a warning for each variable that only looks like one. Raises BadConfig."""
    settings = load_settings(file, os.environ, options)
    for warning in foreign_variables(os.environ):
        sys.stderr.write(f"warning: {warning}\n")
    return settings


def tell_notes(topology: Topology) -> None:
    for note in topology.notes:
        sys.stderr.write(f"note: {note}\n")


def plan(
    settings: Settings,
    progress: Progress,
    *,
    fetches: bool,
    reading: Progress | None = None,
    checks_limits: bool = True,
) -> Topology:
    """The topology on this machine; with `fetches` a model of the hub is fetched if it is not there.

    `reading` as in `plan_model`: without it, what is planned cannot be started. `checks_limits` False leaves limits
    that are too low for it to whoever reports them all.

    Raises BadConfig (including BadKeys), BadModel, NoMemory, LimitTooLow.
    """
    # Actors may run in another directory, and `down` certainly does.
    try:
        directory = os.path.abspath(os.path.expanduser(settings.kv.directory))
    except OSError as error:
        raise _no_pools(settings.kv.directory, error) from error
    disk = settings.kv.disk
    if disk.directory:
        disk = msgspec.structs.replace(disk, directory=os.path.abspath(os.path.expanduser(disk.directory)))
    settings = msgspec.structs.replace(
        settings, kv=msgspec.structs.replace(settings.kv, directory=directory, disk=disk)
    )
    settings = settle_api_keys(settle_keys(settings, os.environ), os.environ)
    # The model comes last: it may take an hour, and what else is wrong is said before.
    machine = _look_at_machine(settings)
    if checks_limits:
        require(LEAST, machine.limits)
    model = plan_model(settings, progress, fetches=fetches, reading=reading)
    topology = plan_topology(model.settings, model.spec, model.argument, machine, model.origin)
    if checks_limits:
        require(topology.needs, machine.limits)
    return msgspec.structs.replace(topology, notes=[*model.notes, *topology.notes])


def _no_pools(directory: str, error: OSError) -> BadConfig:
    why = os.strerror(error.errno or 0)
    do = "set [kv] directory to a directory of yours, in memory (a tmpfs)"
    return BadConfig(f"KV pools cannot be placed in {directory}", why=why, do=do)


def _look_at_machine(settings: Settings) -> Machine:
    # As every actor does.
    raise_limits()
    directory = settings.kv.directory
    try:
        status = os.statvfs(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "")
    except OSError as error:
        raise _no_pools(directory, error) from error
    disk = look_at_disk(settings.kv.disk.directory) if settings.kv.disk.directory else None
    devices = ask_devices(settings.device, os.environ)
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        pool_free_bytes=status.f_bavail * status.f_frsize,
        uid=os.getuid(),
        devices=devices,
        limits=read_limits(),
        disk=disk,
    )


def check_ports(settings: Settings) -> None:
    """Raise CannotBind if the registry or a gateway of this host could not listen where others look for it."""
    free, own = "stop what listens there (`ss -ltnp` shows it)", settings.own_host
    if own is not None and settings.on == settings.registry_host:
        do = f"{free}, or set another registry_port or bind in the file of all hosts"
        for port in (settings.registry_port, settings.registry_port + 1):
            check_port(own.bind, port, what=f"the registry cannot listen at {own.bind}:{port}", do=do)
    if settings.own_counts.gateways:
        # With hosts, --host names one of them.
        do = f"{free}, give another --port, or set another `host` in the file of all hosts" if settings.hosts else ""
        check_port(settings.host, settings.port, do=do)


def check_port(host: str, port: int, *, what: str = "", do: str = "") -> None:
    """Raise CannotBind if nobody could listen there; `what` and `do` replace the words for a gateway on a mesh of one
    host.
    """
    of_this_machine = "give an address of this machine with --host: 127.0.0.1, or 0.0.0.0 for all of them"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        why = (error.strerror if isinstance(error, socket.gaierror) else None) or str(error)
        raise CannotBind(what or f"--host {host} is not a valid address", why=why, do=do or of_this_machine) from error
    try:
        with socket.socket(found[0], found[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
            probe.listen(1)
    except OSError as error:
        taken = "stop what listens there (`ss -ltnp` shows it), or give another --port or --host"
        raise CannotBind(
            what or f"{host}:{port} cannot be listened on",
            why=error.strerror or str(error),
            do=do or (of_this_machine if error.errno == errno.EADDRNOTAVAIL else taken),
        ) from error


def _print(topology: Topology) -> ExitCode:
    for launch in topology.actors:
        config = msgspec.json.encode(launch.config).decode()
        words = ["meshctl", "run", launch.role, "--name", topology.settings.name, "--actor-id", launch.actor_id]
        sys.stdout.write(f"{shlex.join([*words, '--config', config])}\n")
    sys.stderr.write(f"{topology.limits}\n")
    return ExitCode.OK


def _serve(make_settings: Callable[[], Settings], directory: MeshDirectory, progress: Progress) -> ExitCode:
    # Imported here: only a supervisor needs ZeroMQ and the mesh.
    from cli.supervisor.mesh_process import run_mesh

    def make_topology() -> Topology:
        settings = make_settings()
        check_ports(settings)
        topology = plan(settings, progress, fetches=True, reading=progress)
        with directory.written():
            take_given_keys(directory.api_keys, os.environ)
        return topology

    return run_mesh(make_topology, directory, progress)


def _in_background(make_settings: Callable[[], Settings], directory: MeshDirectory, *, is_terminal: bool) -> ExitCode:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        leave_terminal(directory.log(SUPERVISOR))
        progress = Progress(writer, is_pipe=True, is_terminal=is_terminal)
        try:
            return _serve(make_settings, directory, progress)
        except CliError as error:
            progress.line(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            # The user did that and knows.
            raise
        except BaseException:
            # A fault of ours; its traceback goes where stderr goes now.
            progress.line(str(_died(directory, "ended because of an unexpected error")))
            raise
    os.close(writer)

    def pass_on(number: int, _frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    # Until the mesh is ready, a signal to this process is meant for the mesh.
    with on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), pass_on):
        ready = _forward(reader)
    os.close(reader)
    if ready:
        sys.stdout.write(f"{directory.mesh}\n")
        return ExitCode.OK
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    if ended < 0:
        raise _died(directory, f"was killed by {signal.Signals(-ended).name}")
    return ExitCode(ended)


def _died(directory: MeshDirectory, how: str) -> StartFailed:
    return StartFailed(
        f"the mesh {directory.mesh!r} could not be started",
        why=f"its supervisor {how}",
        do=f"see the end of {directory.log(SUPERVISOR)}",
    )


def _forward(reader: int) -> bool:
    """Copy the progress of the mesh's process to stderr; True once it is ready, False if it ends before."""
    mark = READY_MARK.encode()
    pending = b""
    while chunk := os.read(reader, 4096):
        pending += chunk
        if mark in pending:
            sys.stderr.write(pending[: pending.index(mark)].decode())
            return True
        # A mark may arrive in two pieces, and begins with a byte that no line has.
        text, nul, rest = pending.partition(mark[:1])
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()
        pending = nul + rest
    return False
