"""Checks, before one of several hosts starts anything, whether the mesh that is there already can take it in.

Hosts start in any order, so if no registry answers nothing is known, and the host starts anyway. Called by
`cli/supervisor/mesh_process.py`; a mesh's name is checked again whenever an actor joins.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from cli.client import client
from cli.errors import AlreadyRunning, BadConfig, CannotBind, CliError, HostTaken, MeshFull, StartFailed
from cli.plan.keys import read_own, words_to_add
from cli.plan.names import on_host, supervisor_id
from cli.plan.settings import Settings
from cli.supervisor.host_files import registry_endpoint
from mesh.address import Address, Endpoint
from mesh.errors import TOO_MANY_PEERS, BindError, CallError, MeshError, PeerLost, Superseded, WrongMesh
from mesh.membership.spec import spec_faults
from mesh.runtime.run_directory import RunDirectory
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.wire.frames import ListMembers, Members, Ping, Pong
from mesh.wire.message import Message
from nodes.roles import REGISTRY

_ASK_S: Final = 2.0
_ANY_EPOCH: Final = 0


class Ask(Protocol):
    """Asks one actor, wherever it is; None if it does not answer in time."""

    async def __call__(self, peer: Address, endpoint: Endpoint, question: Message) -> object:
        """The answer of `peer`, which listens at `endpoint`."""
        ...


class Asker(NamedTuple):
    """Asks over ZeroMQ, as a peer of the host `host` that joins no mesh."""

    run: RunDirectory
    host: str

    async def __call__(self, peer: Address, endpoint: Endpoint, question: Message) -> object:
        """The answer; None if there is none within 2 s, or somebody else listens there.

        Raises MeshFull, CannotBind.
        """
        # It dials as this host, with its keys, and listens nowhere.
        options = replace(ZeroMQOptions.of_host(self.run), bind="")
        name = on_host(f"meshctl-{os.getpid()}-{type(question).__name__}", self.host)
        try:
            async with client(name, options, peer, endpoint) as ctx:
                for _ in range(2):
                    try:
                        return (await ctx.ask(peer.actor_id, question, timeout_s=_ASK_S)).message
                    except PeerLost as error:
                        if TOO_MANY_PEERS in error.message:
                            raise MeshFull(
                                f"host {self.host} cannot join the mesh",
                                why=f"{peer.actor_id} at {endpoint.control} accepts no more peers: {error.message}",
                                do="stop what is not needed of what `meshctl ps` lists there, and try again",
                            ) from error
                        # The first dial is to an epoch that nobody has; the refusal names the one to dial.
        except BindError as error:
            raise CannotBind(
                f"host {self.host} cannot listen", why=error.message, do="correct it, then start again"
            ) from error
        except CallError:
            pass
        return None


async def require_welcome(settings: Settings, spec: Mapping[str, str], ask: Ask) -> str:
    """Raise BadConfig or AlreadyRunning if this host would only disturb the mesh that it found.

    `spec` is what this host takes the mesh to be. Returns what people should know about a registry that does not
    answer, else "".
    """
    host = settings.on
    if not host or host == settings.registry_host:
        return ""
    endpoint = registry_endpoint(settings)
    there = await ask(Address(REGISTRY, _ANY_EPOCH), endpoint, ListMembers())
    if not isinstance(there, Members):
        return await _unknown_key(settings) if settings.keys else ""
    where = f"the registry at {endpoint.control}"
    if there.mesh and there.mesh != settings.name:
        raise BadConfig(
            f"host {host} cannot join the mesh {settings.name!r}",
            why=f"{where} belongs to the mesh {there.mesh!r}",
            do=f"correct `name`, `registry_port` or [hosts.{settings.registry_host}] address, or give --name",
        )
    release = spec.get("release", there.release)
    if there.release and there.release != release:
        raise BadConfig(
            f"host {host} cannot join the mesh {settings.name!r}",
            why=f"{where} runs kvmesh {there.release}, but this is {release}",
            do="install the same release on all hosts",
        )
    if faults := spec_faults(spec, there.spec):
        raise BadConfig(
            f"host {host} cannot join the mesh {settings.name!r}",
            why="; ".join(faults),
            do="start it with the mesh's own topology file, or with `meshctl up --join TOKEN` without those options",
        )
    known = next((member for member in there.members if member.actor_id == supervisor_id(host)), None)
    if known is None:
        return ""
    # Not by its local endpoints, which are another machine's files. No answer: it died, and this is its return.
    answer = await ask(known.address, Endpoint(known.endpoint.control, known.endpoint.data), Ping())
    if isinstance(answer, Pong):
        raise AlreadyRunning(
            f"the mesh {settings.name!r} already has a host {host}",
            why=f"its supervisor, process {known.pid} there, answers at {known.endpoint.control}",
            do=f"stop it there with `meshctl down --host {host} --name {settings.name}`, or start this "
            "machine as another host (--host)",
        )
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


async def _unknown_key(settings: Settings) -> str:
    """A peer whose key is not on the list is disconnected without a message; a registry that hangs looks the same."""
    own = read_own(Path(settings.keys))
    address, port = settings.hosts[settings.registry_host].address, settings.registry_port
    try:
        async with asyncio.timeout(_ASK_S):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
    except OSError:
        return ""
    if own is None:
        return ""
    add = words_to_add(settings, own.host, own.public_key)
    do = f"on host {settings.registry_host}: `{add}`"
    return f"the registry at {address}:{port} does not answer; if it does not know this host's key, {do}"
