"""`meshctl up`: plan a mesh, then print it, serve it in the foreground, or send it to the background."""

import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from cli.errors import BadConfig, BadModel, CannotBind, CliError
from cli.exit_codes import ExitCode
from cli.launch.mesh_directory import MeshDirectory
from cli.launch.nvidia_smi import ask_devices
from cli.launch.progress import READY_MARK, Progress
from cli.settings import Settings, load_settings
from cli.topology import Machine, Topology, plan_topology
from mesh.membership import SUPERVISOR
from nodes.model_spec import ModelError, resolve_model


def up(file: Path | None, options: dict[str, Any], *, detach: bool, dry_run: bool) -> ExitCode:
    """See `meshctl up --help`. Raises CliErrors; then nothing is left running."""
    settings = load_settings(file, os.environ, options)
    if dry_run:
        return _print(plan(settings))
    directory = MeshDirectory(settings.name)
    directory.create()
    if detach:
        return _in_background(settings, directory)
    return _serve(settings, directory, Progress(2))


def plan(settings: Settings) -> Topology:
    """The topology on this machine. Raises BadConfig, BadModel, NoMemory."""
    model = model_argument(settings.model)
    try:
        spec = resolve_model(model)
    except ModelError as error:
        raise BadModel(f"the model {settings.model!r} cannot be served", why=error.message) from error
    directory = settings.kv.directory
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise BadConfig(
            f"KV pools cannot lie in {directory}", why=os.strerror(error.errno or 0), do="set kv.directory to a tmpfs"
        ) from error
    devices = ask_devices(settings.device, os.environ)
    machine = Machine(len(os.sched_getaffinity(0)), status.f_bavail * status.f_frsize, os.getuid(), devices)
    return plan_topology(settings, spec, model, machine)


def model_argument(model: str) -> str:
    """The model as every actor finds it, whatever directory it runs in."""
    path = Path(model).expanduser()
    named = model.partition("?")[0] in ("tiny", "echo") or model.startswith("random:")
    return model if named else str(path.resolve())


def check_port(host: str, port: int) -> None:
    """Raise CannotBind if the gateway could not listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
            probe.listen(1)
    except OSError as error:
        raise CannotBind(
            f"{host}:{port} cannot be listened on",
            why=error.strerror or str(error),
            do="stop what listens there (`ss -ltnp` shows it), or give another --port or --host",
        ) from error


def _print(topology: Topology) -> ExitCode:
    for launch in topology.actors:
        config = msgspec.json.encode(launch.config).decode()
        words = ["meshctl", "run", launch.role, "--name", topology.settings.name, "--actor-id", launch.actor_id]
        sys.stdout.write(f"{shlex.join([*words, '--config', config])}\n")
    return ExitCode.OK


def _serve(settings: Settings, directory: MeshDirectory, progress: Progress) -> ExitCode:
    # Only whoever supervises needs ZeroMQ and the mesh.
    from cli.launch.mesh_process import run_mesh

    def make_topology() -> Topology:
        topology = plan(settings)
        check_port(settings.host, settings.port)
        return topology

    return run_mesh(make_topology, directory, progress)


def _in_background(settings: Settings, directory: MeshDirectory) -> ExitCode:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _leave_terminal(directory)
        progress = Progress(writer, is_pipe=True)
        code = ExitCode.FAILED
        try:
            code = _serve(settings, directory, progress)
        except CliError as error:
            progress.line(str(error))
            code = error.exit_code
        return code
    os.close(writer)
    with _passing_on_signals(child):
        ready = _forward(reader)
    os.close(reader)
    if ready:
        sys.stdout.write(f"{directory.mesh}\n")
        return ExitCode.OK
    _, status = os.waitpid(child, 0)
    try:
        return ExitCode(os.waitstatus_to_exitcode(status))
    except ValueError:
        return ExitCode.FAILED


def _leave_terminal(directory: MeshDirectory) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(directory.log(SUPERVISOR), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(out)


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


@contextlib.contextmanager
def _passing_on_signals(child: int) -> Generator[None]:
    """Until the mesh is ready, whoever interrupts this process means the mesh."""
    before: dict[signal.Signals, Any] = {}

    def pass_on(number: int, _frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
