"""Whose keys are taken is said at the registry's host and known on all, late joiners and returning hosts too."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.protocol import TakeAllowList
from cli.supervisor.actor import SupervisorActor
from cli.supervisor.hosts.allow_list import Telling
from mesh.address import Address, Endpoint
from mesh.errors import RemoteError
from mesh.membership.keys import HostKey
from mesh.membership.view import StaticBootstrap
from mesh.runtime.key_files import KeyDirectory, KeyRing
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import QUICK, until
from tests.mesh.two_hosts import allow

ADDRESSES = [Address(f"supervisor.{host}", epoch) for host in "ab" for epoch in (1, 2)]


@given(st.lists(st.tuples(st.sampled_from(ADDRESSES), st.booleans(), st.integers(1, 3)), max_size=30))
def test_everybody_is_asked_until_it_has_the_version_and_never_twice_at_once(turns):
    telling, asked = Telling(), {}
    version = 0
    for address, has_answered, newest in turns:
        version = max(version, newest)
        for one in telling.due(ADDRESSES, version):
            assert one not in asked
            asked[one] = version
        if address in asked:
            told = asked.pop(address)
            telling.answered(address, told if has_answered else None)
    for one, told in list(asked.items()):
        telling.answered(one, told)
    assert {*telling.due(ADDRESSES, version + 1)} == {*ADDRESSES}
    for one in ADDRESSES:
        telling.answered(one, version + 1)
    assert telling.due(ADDRESSES, version + 1) == []
    telling.due([], version + 1)
    assert telling.due(ADDRESSES[:1], version + 1) == ADDRESSES[:1], "who has left and come again has files of before"


class Hosts:
    """Supervisors of three hosts with keys; `head` has the registry."""

    def __init__(self, path):
        self.network = SimulatedNetwork(seed=0)
        self.pairs = {host: HostKey.new(host) for host in ("head", "d", "e")}
        self.directories = {host: KeyDirectory(path / host) for host in self.pairs}
        for host, directory in self.directories.items():
            directory.write_key(self.pairs[host])
            # What a token gives a host that joins: the registry's host, and itself.
            directory.write_allowed(allow(self.pairs["head"], *[self.pairs[host]] * (host != "head"), version=0))
        self.systems = {}

    async def start(self, host, epoch=1):
        address, ring = Address(f"supervisor.{host}", epoch), KeyRing(self.directories[host])
        actor = SupervisorActor(SimpleNamespace(beat=lambda *_: None), 1, ring)
        system = ActorSystem(actor, address, self.network.transport(address), self, QUICK)
        await system.start()
        await system.joined()
        self.systems[host] = system, ring

    def lookup(self):
        return StaticBootstrap(self.registry.address, self.registry.describe().endpoint).lookup()

    async def start_registry(self):
        address = Address("registry", 1)
        there = StaticBootstrap(address, Endpoint("", ""))
        self.registry = ActorSystem(RegistryActor(), address, self.network.transport(address), there, QUICK)
        await self.registry.start()

    def say(self, version, *hosts):
        """Write the list at the registry's host, whose supervisor's transport would see it within a heartbeat."""
        self.directories["head"].write_allowed(allow(*map(self.pairs.get, ("head", *hosts)), version=version))
        self.systems["head"][1].poll()

    def version(self, host):
        return self.directories[host].read_allowed().version

    async def stop(self):
        for system, _ in reversed(self.systems.values()):
            await system.stop()
        await self.registry.stop()


@pytest.mark.virtual_time
async def test_all_hosts_have_the_list_of_the_registrys_host(tmp_path):
    hosts = Hosts(tmp_path)
    await hosts.start_registry()
    await hosts.start("head")
    await hosts.start("d")
    hosts.say(3, "d", "e")
    await until(lambda: hosts.version("d") == 3)
    await hosts.start("e")
    await until(lambda: hosts.version("e") == 3)
    # Cut off it keeps what it has, and hears the rest when it is back.
    hosts.network.crash(Address("supervisor.e", 1))
    hosts.say(4, "d", "e")
    await until(lambda: hosts.version("d") == 4)
    assert hosts.version("e") == 3
    await hosts.systems.pop("e")[0].stop()
    await hosts.start("e", 2)
    await until(lambda: hosts.version("e") == 4)

    (head, _), (d, ring) = hosts.systems["head"], hosts.systems["d"]
    ring.poll()
    # An older one is answered with what there is, and nobody but the registry's host is believed.
    answer = await head.actor.ctx.ask("supervisor.d", TakeAllowList(allowed=allow(hosts.pairs["head"])), timeout_s=1)
    assert answer.message.version == 4
    for liar, told in ((d, "supervisor.head"), (hosts.systems["e"][0], "supervisor.d")):
        lie = allow(hosts.pairs["e"], hosts.pairs["d"], version=9)
        with pytest.raises(RemoteError, match="registry's host") as refused:
            await liar.actor.ctx.ask(told, TakeAllowList(allowed=lie), timeout_s=1)
        assert refused.value.code == "wrong_key"
    assert {hosts.version(host) for host in hosts.pairs} == {4}
    # Who starts there again needs it.
    for host in ("head", "d"):
        hosts.directories[host].allowed_file.write_text("{")
    await until(lambda: all(one.allowed_file.read_text() != "{" for one in hosts.directories.values()))
    assert {hosts.version(host) for host in hosts.pairs} == {4}
    await hosts.stop()
