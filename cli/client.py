"""`meshctl` as a peer in the mesh: asks a running supervisor one question, for `ps`, `down`, `drain` and others."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator
from typing import ClassVar, Final, NamedTuple, Protocol, TypeVar

from cli.errors import BadManifest, CliError, HostAway, NotRunning, TryAgain, WrongUsage
from cli.protocol import SUPERVISOR_CODEC, ActorList, ActorStatus, ListActors
from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory
from cli.supervisor.processes.by_pid import is_alive
from mesh.actor import Actor, Context
from mesh.address import Address, Endpoint
from mesh.errors import CallError, DeadlineExceeded, PeerLost, RemoteError, Unreachable
from mesh.membership.keys import CLIENT
from mesh.membership.view import StaticBootstrap
from mesh.runtime.telemetry import setup_log
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.wire.codec import Codec
from mesh.wire.message import Message

ASK_TIMEOUT_S: Final = 3.0
"""A healthy supervisor answers in milliseconds, a starved one late; one that hangs for more is as good as dead."""
_UNKNOWN_NAME: Final = ("unknown_actor", "unknown_group", "unknown_host", "unknown_store")
_WHERE_NAMED: Final = {
    "unknown_group": "see meshctl memory --name {mesh}",
    "unknown_store": "see meshctl kv ls --name {mesh}",
}
_REMEDIES: Final = {
    "not_given": "use another --actor-id or role",
    "not_restartable": "use meshctl down, then meshctl up",
    "store_not_flushed": "see `dmesg`; pages that a restart finds are used as before",
}
_AWAY: Final = ("absent_host", DeadlineExceeded.code, PeerLost.code, Unreachable.code)
"""Codes that mean: another host's supervisor could not be reached, or did not answer."""

_numbers: Final = itertools.count(1)

Reply = TypeVar("Reply", bound=Message)


class ClientActor(Actor):
    """Asks and leaves again; it is no member of the mesh."""

    role: ClassVar[str] = CLIENT
    codec: ClassVar[Codec] = SUPERVISOR_CODEC
    joins: ClassVar[bool] = False


@contextlib.asynccontextmanager
async def client(name: str, options: ZeroMQOptions, peer: Address, endpoint: Endpoint) -> AsyncGenerator[Context]:
    """Be the actor `name`, which asks `peer` at `endpoint`. Raises BindError."""
    actor = ClientActor()
    system = ActorSystem(actor, Address(name, 1), ZeroMQTransport(options), StaticBootstrap(peer, endpoint))
    await system.start()
    try:
        yield actor.ctx
    finally:
        await system.stop()


class RunningMesh(NamedTuple):
    """A mesh, as its supervisor has recorded it."""

    directory: MeshDirectory
    manifest: Manifest

    def ask(self, question: Message, answer_type: type[Reply], timeout_s: float = ASK_TIMEOUT_S) -> Reply:
        """Ask the supervisor, over a connection of its own. Raises as `Ask` does."""

        async def once() -> Reply:
            async with connected(self) as ask:
                return await ask(question, answer_type, timeout_s)

        return asyncio.run(once())

    def actors(self, *, whole_mesh: bool = False) -> list[ActorStatus]:
        """The actors of its host, or of all hosts. Raises NotRunning."""
        return self.ask(ListActors(whole_mesh=whole_mesh), ActorList).actors


def find_mesh(name: str) -> RunningMesh:
    """The mesh of this name, if its supervisor lives. Raises NotRunning or BadManifest."""
    directory = MeshDirectory(name)
    try:
        manifest = directory.load_manifest()
    except BadManifest as error:
        raise _with_holder(error, directory) from None
    if manifest is not None and is_alive(manifest.pid, manifest.start_time):
        return RunningMesh(directory, manifest)
    raise not_running(name)


def not_running(name: str) -> NotRunning:
    """The error for a mesh that is not there."""
    others = [other for other in running_meshes() if other != name]
    return NotRunning(
        f"no mesh named {name!r} is running",
        why=f"running meshes: {', '.join(others)}" if others else "no mesh of yours is running on this host",
        do="give one of these with --name" if others else "start one with `meshctl up`",
    )


def running_meshes() -> list[str]:
    """Names of this user's meshes whose supervisors live, by their manifest or, where it is damaged, by their lock."""
    return [name for name in MeshDirectory.all_names() if _lives(name)]


class Ask(Protocol):
    """Asks the supervisor that a command is connected to."""

    async def __call__(self, question: Message, answer_type: type[Reply], timeout_s: float = ..., /) -> Reply:
        """The supervisor's answer. Raises NotRunning if none comes within `timeout_s`, CliError if it refuses."""
        ...


def refusal(error: RemoteError, mesh: str) -> CliError:
    look = f"see meshctl ps --name {mesh}"
    if error.code in _UNKNOWN_NAME:
        do = _WHERE_NAMED.get(error.code, look).format(mesh=mesh)
        return WrongUsage(f"nothing in the mesh {mesh!r} has that name", why=error.message, do=do)
    if error.code in _AWAY:
        return HostAway(f"a host of the mesh {mesh!r} does not answer", why=error.message, do=f"try again; {look}")
    what = f"the mesh {mesh!r} refuses this"
    if error.retryable:
        return TryAgain(what, why=error.message, do="try again in a moment")
    kind = WrongUsage if error.code == "not_restartable" else CliError
    return kind(what, why=error.message, do=_REMEDIES.get(error.code, f"correct it; {look}"))


@contextlib.asynccontextmanager
async def connected(mesh: RunningMesh) -> AsyncGenerator[Ask]:
    """Be a peer of a mesh's supervisor."""
    setup_log(level="error")
    directory, manifest = mesh
    options = ZeroMQOptions(run_directory=directory.run)
    supervisor, endpoint = manifest.supervisor
    # Every connection has an id of its own: two at a time would take each other's answers, and one right after another
    # would find its identity still in use at the supervisor's socket, and never be welcomed.
    name = f"meshctl-{os.getpid()}-{next(_numbers)}"

    async def ask(question: Message, answer_type: type[Reply], timeout_s: float = ASK_TIMEOUT_S) -> Reply:
        try:
            answer = (await ctx.ask(supervisor.actor_id, question, timeout_s=timeout_s)).message
        except RemoteError as error:
            raise refusal(error, manifest.mesh) from error
        except CallError as error:
            raise NotRunning(
                f"the supervisor of {manifest.mesh!r} (process {manifest.pid}) does not answer",
                why=str(error),
                do=f"look at {directory.logs}, or end it with `meshctl down --force --name {manifest.mesh}`",
            ) from error
        if not isinstance(answer, answer_type):
            raise NotRunning(
                f"the supervisor of {manifest.mesh!r} gave an unexpected answer",
                why=f"it answered {type(question).__name__} with {type(answer).__name__}",
                do="use the meshctl that started the mesh",
            )
        return answer

    async with client(name, options, supervisor, endpoint) as ctx:
        yield ask


def _lives(name: str) -> bool:
    directory = MeshDirectory(name)
    try:
        named = directory.load_manifest()
    except BadManifest:
        named = directory.holder()
    except CliError:
        return False
    return named is not None and is_alive(named.pid, named.start_time)


def _with_holder(error: BadManifest, directory: MeshDirectory) -> BadManifest:
    holder = directory.holder()
    if holder is None or not is_alive(*holder):
        return error
    why = f"{error.why}; the mesh is still running: its supervisor, process {holder.pid}, holds the lock"
    return BadManifest(error.what, why=why, do=error.do)
