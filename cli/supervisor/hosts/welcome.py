"""Checks, before one of several hosts starts anything, whether the mesh that is there already can take it in.

Hosts start in any order, so if no registry answers nothing is known, and the host starts anyway. Called by
`cli/supervisor/mesh_process.py`; a mesh's name is checked again whenever an actor joins.
"""

import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from cli.client import client
from cli.errors import AlreadyRunning, BadConfig, CannotBind, CliError, HostTaken, MeshFull, StartFailed
from cli.plan.keys import HostKeys, words_to_add
from cli.plan.names import on_host, supervisor_id
from cli.plan.settings import Settings
from cli.supervisor.kept.host_files import SOME_REGISTRY, registry_endpoint
from mesh.address import Address, Endpoint
from mesh.errors import TOO_MANY_PEERS, BindError, CallError, MeshError, PeerLost, Superseded, WrongMesh
from mesh.membership.spec import spec_faults
from mesh.runtime.run_directory import RunDirectory
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.wire.frames import ListMembers, Members, Ping, Pong
from mesh.wire.message import Message

_ASK_S: Final = 2.0
"""A registry answers a stranger within 20 ms on a busy machine, and a refused connection is known at once. Only a host
that drops packets or hangs is waited for, and a start is held up no longer than by a lost packet or two sent again."""

Ask = Callable[[Address, Endpoint, Message], Awaitable[object]]
"""Asks one actor, wherever it is; None if it does not answer in time."""


class Asker(NamedTuple):
    """Asks over ZeroMQ, as a peer of the host `host` that joins no mesh."""

    run: RunDirectory
    host: str

    async def __call__(self, peer: Address, endpoint: Endpoint, question: Message) -> object:
        """The answer; None if there is none within 2 s, or somebody else listens there. Raises MeshFull, CannotBind."""
        # It dials as this host, with its keys, and listens nowhere.
        options = replace(ZeroMQOptions.of_host(self.run), bind="")
        name = on_host(f"meshctl-{os.getpid()}-{type(question).__name__}", self.host)
        try:
            async with client(name, options, peer, endpoint) as ctx:
                for _ in range(2):
                    try:
                        return (await ctx.ask(peer.actor_id, question, timeout_s=_ASK_S)).message
                    except PeerLost as error:
                        # The first dial is to an epoch that nobody has; the refusal names the one to dial.
                        if error.refusal == TOO_MANY_PEERS:
                            why = f"{peer.actor_id} at {endpoint.control} accepts no more peers: {error.message}"
                            do = "stop what is not needed of what `meshctl ps` lists there, and try again"
                            raise MeshFull(f"host {self.host} cannot join the mesh", why=why, do=do) from error
        except BindError as error:
            do = "correct it, then start again"
            raise CannotBind(f"host {self.host} cannot listen", why=error.message, do=do) from error
        except CallError:
            pass
        return None


def unreachable(address: str, port: int) -> str:
    """Why nothing listens there; empty if something does, such as a registry that disconnects an unknown key."""
    try:
        with socket.create_connection((address, port), _ASK_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


async def require_welcome(settings: Settings, spec: Mapping[str, str], ask: Ask) -> str:
    """Raise BadConfig or AlreadyRunning if this host would only disturb the mesh that it found.

    `spec` is what this host takes the mesh to be. Returns what people should know about a registry that does not
    answer, else "".
    """
    host, name = settings.on, settings.name
    if not host or host == settings.registry_host:
        return ""
    endpoint, why, do = registry_endpoint(settings), "", ""
    there = await ask(SOME_REGISTRY, endpoint, ListMembers())
    if not isinstance(there, Members):
        return _unknown_key(settings) if settings.keys else ""
    where, release = f"the registry at {endpoint.control}", spec.get("release", there.release)
    if there.mesh and there.mesh != name:
        why = f"{where} belongs to the mesh {there.mesh!r}"
        do = f"correct `name`, `registry_port` or [hosts.{settings.registry_host}] address, or give --name"
    elif there.release and there.release != release:
        why = f"{where} runs kvmesh {there.release}, but this is {release}"
        do = "install the same release on all hosts"
    elif faults := spec_faults(spec, there.spec):
        why = "; ".join(faults)
        do = "start it with the mesh's own topology file, or with `meshctl up --join TOKEN` without those options"
    if why:
        raise BadConfig(f"host {host} cannot join the mesh {name!r}", why=why, do=do)
    known = next((member for member in there.members if member.actor_id == supervisor_id(host)), None)
    # Not by its local endpoints, which are another machine's files. No answer: it died, and this is its return.
    if known is not None and isinstance(
        await ask(known.address, Endpoint(known.endpoint.control, known.endpoint.data), Ping()), Pong
    ):
        why = f"its supervisor, process {known.pid} there, answers at {known.endpoint.control}"
        do = f"stop it there with `meshctl down --host {host} --name {name}`, or start this machine as another host "
        raise AlreadyRunning(f"the mesh {name!r} already has a host {host}", why=why, do=f"{do}(--host)")
    return ""


def not_taken_in(refusal: MeshError, mesh: str, host: str) -> CliError:
    """The error for a host that began before it could ask, and that the registry then does not take in."""
    kind, what = StartFailed, f"the mesh {mesh!r} does not accept this host"
    do = "correct that and start it again; nothing is left running"
    if isinstance(refusal, WrongMesh):
        kind = BadConfig
    elif isinstance(refusal, Superseded) and host:
        # Of two hosts of this name that began before there was a registry, the one with the higher epoch stays.
        kind, what = HostTaken, f"the mesh {mesh!r} has a host {host} that started later than this one"
        do = f"if that is another machine, start this one as another host (--host); otherwise, start {host} again"
    return kind(what, why=refusal.message, do=do)


def _unknown_key(settings: Settings) -> str:
    """A peer whose key is not on the list is disconnected without a message; a registry that hangs looks the same."""
    own = HostKeys(settings, Path(settings.keys)).read_key()
    registry, port = settings.registry_host, settings.registry_port
    address = settings.hosts[registry].address
    if own is None or unreachable(address, port):
        return ""
    do = f"on host {registry}: `{words_to_add(settings, own.host, own.public_key)}`"
    return f"the registry at {address}:{port} does not answer; if it does not know this host's key, {do}"
