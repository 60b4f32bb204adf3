"""A host that would disturb the mesh which it finds does not start."""

import asyncio
import shlex
import socket
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.commands.join import Join
from cli.errors import AlreadyRunning, BadConfig, BadKeys, CannotBind, HostTaken, MeshFull, NotRunning
from cli.plan.hosts import HostSettings
from cli.plan.settings import Settings
from cli.plan.token import JoinToken
from cli.supervisor.hosts.welcome import Asker, not_taken_in, require_welcome
from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.errors import WrongMesh
from mesh.membership.keys import HostKey
from mesh.membership.view import Member, StaticBootstrap
from mesh.options import SystemOptions
from mesh.runtime.key_files import KeyDirectory
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import VirtualTimeLoop
from mesh.system import ActorSystem
from mesh.testing.ports import free_port
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from mesh.wire.codec import Codec
from mesh.wire.frames import Members, Ping, Pong
from nodes.registry.actor import RegistryActor
from tests.cli.refused import refused

HOSTS = {"head": HostSettings(address="127.0.0.1", gateways=1), "d": HostSettings(address="127.0.0.2", decode=1)}
SPEC = {"release": "1.2", "model": "tiny", "page_size": "16"}
SUPERVISOR = Member(
    actor_id="supervisor.d",
    role="supervisor",
    epoch=7,
    endpoint=Endpoint("tcp://127.0.0.2:1", "tcp://127.0.0.2:2", "ipc:///theirs.c", "ipc:///theirs.d"),
    pid=4321,
)


class Joiner(Actor):
    """Joins as a supervisor does, and starts nothing."""

    role = "supervisor"
    codec = Codec(Ping)


def asked(on="d", name="blue", answer=None, pong=None):
    """What was asked of whom on the way to the end."""
    questions = []

    async def ask(peer, endpoint, question):
        questions.append((peer, endpoint.control, type(question)))
        assert not endpoint.local_control, "another machine's files"
        return pong if isinstance(question, Ping) else answer

    asyncio.run(require_welcome(Settings(name=name, hosts=HOSTS, on=on), SPEC, ask))
    return [str(peer) for peer, _, _ in questions]


def members(*known, mesh="blue", release="1.2", spec=SPEC):
    return Members(members=list(known), mesh=mesh, release=release, spec=spec)


def test_who_finds_no_registry_or_has_it_begins():
    assert asked() == ["registry#0"]
    assert asked(on="head") == []


def test_who_is_new_or_was_dead_begins():
    assert asked(answer=members()) == ["registry#0"]
    assert asked(answer=members(SUPERVISOR)) == ["registry#0", "supervisor.d#7"]


def test_who_says_neither_mesh_nor_release_is_not_refused():
    assert asked(answer=members(mesh="", release="")) == ["registry#0"]


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (members(mesh="green"), BadConfig, "belongs to the mesh 'green'"),
        (members(release="1.1"), BadConfig, "runs kvmesh 1.1, but this is 1.2"),
        (members(spec={"model": "echo", "later": "x"}), BadConfig, "model is tiny here and echo in the mesh"),
        (members(spec=SPEC | {"page_size": "32"}), BadConfig, "page size is 16 here and 32 in the mesh"),
        (members(SUPERVISOR), AlreadyRunning, "process 4321 there, answers at tcp://127.0.0.2:1"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_with_what_to_do(answer, kind, why):
    with refused(kind, why=why, do="`meshctl down --host d --name blue`" if kind is AlreadyRunning else ""):
        asked(answer=answer, pong=Pong())


@pytest.mark.parametrize("first", [5, 7], ids=["the earlier first", "the later first"])
def test_of_two_machines_of_one_name_the_earlier_is_told_that_the_other_has_it(first):
    """Both began before there was a registry to ask."""

    async def main():
        network = SimulatedNetwork(seed=0)
        told = StaticBootstrap(Address("registry", 1), Endpoint("sim://registry#1/c", "sim://registry#1/d"))

        async def start(actor, name, epoch):
            address = Address(name, epoch)
            system = ActorSystem(actor, address, network.transport(address), told, SystemOptions(host="d"))
            await system.start()
            return system

        both = {
            epoch: await start(Joiner(), "supervisor.d", epoch) for epoch in sorted((5, 7), key=lambda e: e != first)
        }
        registry = await start(RegistryActor(), "registry", 1)
        assert await asyncio.wait_for(both[5].shutdown_asked(), 30) == "superseded"
        error = not_taken_in(both[5].over, "blue", "d")
        assert (type(error), error.code) == (HostTaken, "host_taken")
        assert both[7].describe().endpoint.control in error.why
        assert "as another host" in error.do
        assert both[7].over is None
        for system in (*both.values(), registry):
            await system.stop()

    loop = VirtualTimeLoop()
    loop.run_until_complete(main())
    loop.close()


def test_a_host_of_another_mesh_is_told_to_correct_that():
    error = not_taken_in(WrongMesh("it is of green"), "blue", "d")
    assert (type(error), error.why) == (BadConfig, "it is of green")


@asynccontextmanager
async def registry_of(mesh, **options):
    """The port of a registry over sockets, and the run directory of another host, of the mesh blue."""
    with tempfile.TemporaryDirectory(prefix="kvt") as path:
        port = free_port()
        head, other = RunDirectory(Path(path) / "head" / mesh), RunDirectory(Path(path) / "other" / "blue")
        for directory in (head, other):
            directory.path.parent.mkdir(mode=0o700)
            directory.create()
        head.write_host(HostRecord("head", "127.0.0.1", "127.0.0.1"))
        transport = ZeroMQTransport(ZeroMQOptions.of_host(head, port))
        actor = RegistryActor(head)
        registry = ActorSystem(actor, Address("registry", 5), transport, head.bootstrap(), SystemOptions(**options))
        await registry.start()
        try:
            yield port, other
        finally:
            await registry.stop()


def joins(port, run):
    """What a host e asks that has a token of the mesh blue, whose registry was at `port`."""
    join = Join(JoinToken("blue", "127.0.0.1", port, "head").text(), None, {"decode": 1, "host": "e"}, {})
    return asyncio.to_thread(join.settings, run)


def starts(port, run):
    """What the host d of the mesh blue asks, whose file says that the registry is at `port`."""
    settings = Settings(name="blue", hosts=HOSTS, on="d", registry_port=port)
    return require_welcome(settings, SPEC, Asker(run, "d"))


@pytest.mark.parametrize(
    ("come", "why", "do"),
    [
        (starts, "belongs to the mesh 'green'", "correct `name`, `registry_port`"),
        (joins, "is now that of 'green'", "get a new one: `meshctl keys token`"),
    ],
)
async def test_a_registry_of_another_mesh_is_told_to_be_one(why, do, come):
    async with registry_of("green") as (port, run):
        with refused(BadConfig, why=why, do=do):
            await come(port, run)


async def test_a_registry_that_tells_no_settings_takes_nobody_by_a_token():
    async with registry_of("blue") as (port, run):
        with refused(BadConfig, "accepts no further hosts", do="the same release"):
            await joins(port, run)


async def test_what_is_no_registry_is_said_to_be_none():
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvt") as path:
        run = RunDirectory(Path(path) / "blue")
        run.create()
        listener = socket.create_server(("127.0.0.1", port))
        with listener, pytest.raises(NotRunning, match="does not answer") as caught:
            await joins(port, run)
    assert caught.value.why == f"something listens at 127.0.0.1:{port}, but it is not a registry without keys"
    assert "get a new token" in caught.value.do


async def test_a_host_whose_key_is_unknown_is_told_where_to_type_what(monkeypatch):
    async def nobody(asker, peer, endpoint, question):
        return None

    monkeypatch.setattr(Asker, "__call__", nobody)
    with tempfile.TemporaryDirectory(prefix="kvt") as path, socket.create_server(("127.0.0.1", 0)) as listener:
        run, keys = RunDirectory(Path(path) / "blue"), Path(path) / "keys"
        run.create()
        token = JoinToken("blue", "127.0.0.1", listener.getsockname()[1], "head", HostKey.new("head").public_key)
        join = Join(token.text(), None, {"decode": 1, "host": "e", "keys": str(keys)}, {})
        with pytest.raises(BadKeys, match="does not accept this host") as caught:
            await asyncio.to_thread(join.settings, run)
        own = KeyDirectory(keys).read_key().public_key
    add = f"on host head: `meshctl keys add e '{own}' --name blue`"
    assert caught.value.do == f"{add}, then run this command here again"


@pytest.mark.parametrize(("come", "host"), [(starts, "d"), (joins, "e")])
async def test_a_run_directory_that_is_too_long_for_a_socket_is_said_to_be(host, come):
    with tempfile.TemporaryDirectory(prefix="kvt") as path:
        run = RunDirectory(Path(path) / ("x" * 60) / "blue")
        run.create()
        with refused(CannotBind, f"host {host} cannot listen", why="is too long for a socket"):
            await come(free_port(), run)


@pytest.mark.parametrize(("come", "host"), [(starts, "d"), (joins, "e")])
async def test_a_registry_without_room_says_so(host, come):
    async with registry_of("blue", max_peers=0) as (port, run):
        with refused(MeshFull, f"host {host} cannot join", why="already linked to 0 peers", do="meshctl ps"):
            await come(port, run)


def test_a_host_whose_key_may_be_unknown_is_told_the_command(tmp_path):
    own = HostKey.new("d")
    KeyDirectory(tmp_path / "keys").write_key(own)

    async def nobody(peer, endpoint, question):
        return None

    async def noted(port):
        settings = Settings(name="blue", hosts=HOSTS, on="d", registry_port=port, keys=str(tmp_path / "keys"))
        return await require_welcome(settings, SPEC, nobody)

    async def main():
        port = free_port()
        assert await noted(port) == "", "nobody is there: it comes later"
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
            return await noted(port)

    words = shlex.split(asyncio.run(main()).partition("on host head: `")[2].partition("`")[0])
    assert words == ["meshctl", "keys", "add", "d", own.public_key, "--name", "blue"]
