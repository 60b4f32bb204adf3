"""The registry's actor on virtual time: leases end, absences are forgiven, the run directory is told."""

import asyncio
import contextlib

import msgspec
import pytest
from structlog.testing import capture_logs

from mesh.actor import Actor
from mesh.address import Address
from mesh.errors import RemoteError, WrongMesh, WrongSpec
from mesh.membership.keys import AllowList, HostKey
from mesh.options import SystemOptions
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.run_directory import RunDirectory
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from mesh.testing.actors import Actors
from mesh.wire.codec import Codec
from mesh.wire.frames import Join, ListMembers, MembersChanged, Ping
from nodes.registry import roll
from nodes.registry.actor import RegistryActor
from nodes.registry.config import RegistryConfig
from tests.mesh.mesh_under_test import until

pytestmark = pytest.mark.virtual_time


class Nobody(Actor):
    role = "nobody"
    codec = Codec(Ping)


class Mesh(Actors):
    def __init__(self, allowed=None):
        vet_host = None if allowed is None else allowed.vet
        super().__init__(SimulatedNetwork(1), SystemOptions(host="", pid=1, vet_host=vet_host))

    async def start(self, actor, actor_id, epoch=0):
        return await super().start(actor_id, actor, epoch=epoch)

    @property
    def registry(self):
        return self.systems["registry"]

    def members(self):
        return [str(m.address) for m in self.registry.actor.core.members()]


@pytest.fixture
@contextlib.asynccontextmanager
async def mesh():
    mesh = Mesh()
    yield mesh
    await mesh.stop()


async def test_a_member_that_crashes_is_gone_after_its_lease(mesh):
    await mesh.start(RegistryActor(lease_s=RegistryConfig().lease_s), "registry")
    a, b = await mesh.start(Nobody(), "a"), await mesh.start(Nobody(), "b")
    loop = asyncio.get_running_loop()
    mesh.network.crash(b.address)
    died = loop.time()
    await b.stop()
    await until(lambda: "b#1" not in mesh.members(), 10.0)
    assert 4.0 < loop.time() - died < 6.5
    await asyncio.sleep(0.1)
    assert a.registration.view.get("b") is None
    await asyncio.sleep(60)
    assert mesh.members() == ["a#1", "registry#1"]


async def test_who_finds_the_registry_full_is_told_so_by_a_code_and_joins_once_there_is_room(mesh, monkeypatch):
    await mesh.start(RegistryActor(), "registry")
    a = await mesh.start(Nobody(), "a")
    taken = sum(len(msgspec.msgpack.encode(member)) for member in mesh.registry.actor.core.members())
    monkeypatch.setattr(roll, "MAX_BYTES", taken)
    b = await Actors.start(mesh, "b", Nobody(), waits=False)
    with pytest.raises(RemoteError, match="all members together would announce") as caught:
        await b.asking.ask("registry", Join(member=b.describe()), timeout_s=5)
    assert (caught.value.code, caught.value.retryable) == ("registry_full", True)
    assert mesh.registry.metrics.value("mesh_members_refused_total", code="registry_full") >= 1
    await a.stop()
    await until(lambda: "b#1" in mesh.members(), 30.0)


@pytest.mark.parametrize("roles", [("nobody",), None])
async def test_a_host_without_a_supervisor_ends_nobody_of_others(roles):
    """Neither members, by later incarnations that it makes up, nor a registry of which it says that it was followed."""
    allowed = AllowList(0, ()).with_host("head", HostKey.new("head").public_key, ("registry", "*"))
    for host, its in (("d", None), ("evil", roles)):
        allowed = allowed.with_host(host, HostKey.new(host).public_key, its)
    mesh = Mesh(allowed)
    registry = await mesh.start(RegistryActor(), "registry")
    evil = await mesh.start(Nobody(), "x.evil")
    named = msgspec.structs.replace(evil.describe(), actor_id="y.d", epoch=70)
    join = Join(member=evil.describe(), known_epoch=0, known_version=0, known_members=[named])
    await evil.actor.ctx.ask("registry", join, timeout_s=1.0)
    assert ("y.d#70" in mesh.members()) == (roles is None)
    await asyncio.sleep(RegistryConfig().lease_s)
    assert registry.actor.is_outlived(evil.address, 70) == (roles is None)
    for system in (evil, registry):
        await system.stop()


async def test_who_cannot_measure_itself_still_renews_its_lease(mesh, monkeypatch):
    def fail(*_):
        raise OSError(24, "Too many open files")

    await mesh.start(RegistryActor(), "registry")
    await mesh.start(Nobody(), "a")
    monkeypatch.setattr(OwnFigures, "sample", fail)
    # Else every failure is made into a page of text.
    with capture_logs() as log:
        await asyncio.sleep(3 * RegistryConfig().lease_s)
    assert mesh.members() == ["a#1", "registry#1"]
    assert {one["handler"] for one in log} == {"tick"}


async def test_who_is_only_known_by_name_is_told_nothing(mesh):
    """It has not joined this registry, would refuse what it tells, and gets everything with its own join."""

    await mesh.start(RegistryActor(), "registry")
    a = await mesh.start(Nobody(), "a")
    actor = mesh.registry.actor
    told = []
    actor.ctx.tell_all = lambda actor_ids, *_, **__: told.extend(actor_ids)
    heard = msgspec.structs.replace(a.describe(), actor_id="b", epoch=4)
    actor.core.join(Join(member=a.describe(), known_epoch=0, known_version=0, known_members=[heard]), actor.ctx.now())
    assert "b#4" in mesh.members()
    await asyncio.sleep(0.1)
    actor._tell_all(MembersChanged(registry_epoch=1, version=9, upserted=[], left=[]))
    assert told == ["a"]


async def test_a_registry_that_was_stopped_itself_forgives(mesh):
    await mesh.start(RegistryActor(), "registry")
    await mesh.start(Nobody(), "a")
    actor = mesh.registry.actor
    # By private names: on virtual time nobody can be stopped without the others.
    actor.core._expiry["a"] = actor.ctx.now() - 1.0
    actor._check_at -= 60.0
    await asyncio.sleep(2.0)
    assert mesh.members() == ["a#1", "registry#1"]


async def test_an_old_incarnation_cannot_join(mesh):
    await mesh.start(RegistryActor(), "registry")
    a = await mesh.start(Nobody(), "a", epoch=3)
    later = Join(member=msgspec.structs.replace(a.describe(), epoch=4))
    mesh.registry.actor.core.join(later, mesh.registry.actor.ctx.now())
    with pytest.raises(RemoteError) as caught:
        await a.actor.ctx.ask("registry", Join(member=a.describe()), timeout_s=5)
    assert (caught.value.code, caught.value.known_epoch) == ("stale_epoch", 4)


async def test_the_run_directory_is_told(mesh, tmp_path):
    directory = RunDirectory(tmp_path)
    registry = await mesh.start(RegistryActor(directory), "registry", epoch=7)
    assert directory.bootstrap().lookup() == (Address("registry", 7), registry.describe().endpoint)
    assert registry.actor.stats() == {'mesh_registry_members{member_role="registry"}': 1.0}


@pytest.mark.parametrize("damage", [b"{", b"", None, b'{"actor_id":"registry","epoch":6,"control":"c","data":"d"}'])
async def test_a_damaged_file_does_not_keep_newcomers_out(mesh, tmp_path, damage):
    directory = RunDirectory(tmp_path)
    registry = await mesh.start(RegistryActor(directory), "registry", epoch=7)
    own = registry.describe().address, registry.describe().endpoint
    if damage is None:
        directory.registry_file.unlink()
    else:
        directory.registry_file.write_bytes(damage)
    with capture_logs() as log:
        await asyncio.sleep(2.0)
    assert directory.bootstrap().lookup() == own
    assert [line["event"] for line in log] == ["registry_file_lost"], "once, and for all to read"
    # What a later incarnation has said stands.
    directory.write_registry(Address("registry", 8), own[1])
    await asyncio.sleep(2.0)
    assert directory.bootstrap().lookup() == (Address("registry", 8), own[1])


async def test_where_the_registry_cannot_be_written_it_serves_and_tries_again(mesh, tmp_path):
    directory = RunDirectory(tmp_path / "gone")
    with capture_logs() as log:
        registry = await mesh.start(RegistryActor(directory), "registry")
        await asyncio.sleep(2.0)
    assert [line["event"] for line in log] == ["registry_file_unwritten"]
    directory.path.mkdir()
    await asyncio.sleep(1.0)
    assert directory.bootstrap().lookup() == (Address("registry", 1), registry.describe().endpoint)


async def test_a_member_meant_for_another_mesh_ends_and_disturbs_nobody(mesh, tmp_path):
    (tmp_path / "blue").mkdir()
    registry = await mesh.start(RegistryActor(RunDirectory(tmp_path / "blue"), release="1.2"), "registry")
    ours = await mesh.start(Nobody(), "ours")
    with capture_logs() as log:
        address = Address("stray", 9)
        stray = ActorSystem(
            Nobody(), address, mesh.network.transport(address), mesh, SystemOptions(mesh="green", host="h", pid=1)
        )
        await stray.start()
        assert await stray.shutdown_asked() == "wrong_mesh"
    assert isinstance(stray.over, WrongMesh)
    assert "mesh 'green', but the registry it found belongs to mesh 'blue'" in stray.over.message
    assert [line["code"] for line in log if line["event"] == "member_refused"] == ["wrong_mesh"]
    assert registry.metrics.value("mesh_members_refused_total", code="wrong_mesh") == 1
    assert mesh.members() == ["ours#1", "registry#1"]
    listed = (await ours.actor.ctx.ask("registry", ListMembers(), timeout_s=5)).message
    assert (listed.mesh, listed.release) == ("blue", "1.2")
    await stray.stop()


async def test_a_member_of_a_host_that_serves_something_else_ends_and_is_told_what(mesh):
    config = RegistryConfig(spec={"model": "tiny", "page_size": "16"}, settings={"model": "tiny"})
    await mesh.start(RegistryActor(config=config), "registry")
    ours, stray = [
        ActorSystem(Nobody(), address, mesh.network.transport(address), mesh, SystemOptions(spec=spec))
        for address, spec in (
            (Address("ours", 1), {"model": "tiny", "later": "x"}),
            (Address("stray", 9), {"model": "tiny", "page_size": "32"}),
        )
    ]
    await ours.start()
    await stray.start()
    assert await stray.shutdown_asked() == "wrong_spec"
    assert isinstance(stray.over, WrongSpec)
    assert "page size" in stray.over.message
    assert mesh.members() == ["ours#1", "registry#1"]
    listed = (await ours.actor.ctx.ask("registry", ListMembers(), timeout_s=5)).message
    assert (listed.spec, listed.settings) == (config.spec, config.settings)
    for system in (stray, ours):
        await system.stop()


async def test_a_registry_that_stops_tells_what_it_has_gathered_and_nothing_after(mesh):
    await mesh.start(RegistryActor(), "registry")
    a, b, c = [await mesh.start(Nobody(), name) for name in "abc"]
    # The first change is told at once, what follows within 20 ms waits for more.
    for member in (b, c):
        member.announce(mark=1)
    await until(lambda: mesh.registry.actor.core.find("c").attributes.get("mark") == 1)
    await mesh.registry.stop()
    await asyncio.sleep(1.0)
    assert [a.registration.view.get(name).attributes for name in "bc"] == [{"mark": 1}] * 2
    assert mesh.registry.metrics.value("mesh_handler_errors_total", handler="_tell_pending") == 0
