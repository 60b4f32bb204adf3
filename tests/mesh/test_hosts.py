"""Actors of several hosts: a registry at fixed ports is found by its endpoint alone, whichever incarnation it is."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from mesh.address import Address, Endpoint, host_of
from mesh.errors import CallError, PeerLost
from mesh.membership.proof import HostSecret
from mesh.membership.view import StaticBootstrap
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem
from mesh.testing.leaks import assert_no_leaks
from mesh.wire.frames import Ping
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import QUICK, Recorder, Say, until
from tests.mesh.two_hosts import ANY_EPOCH, TwoHosts

HI = Say(text="hi")
TOLD = StaticBootstrap(ANY_EPOCH, Endpoint("sim://registry/c", "sim://registry/d"))


async def started(network, name, epoch, secret=None, **settings):
    """The registry at the endpoint that all hosts are told, with `settings`, or a recorder of the host in its name."""
    address, is_registry = Address(name, epoch), name == "registry"
    transport = network.transport(address, *(["registry"] if is_registry else []))
    options = replace(QUICK, host=host_of(name) or "head", secret=secret)
    actor = RegistryActor(**settings) if is_registry else Recorder()
    system = ActorSystem(actor, address, transport, TOLD, options)
    await system.start()
    return system


@pytest.mark.virtual_time
async def test_a_registry_is_found_by_its_endpoint_alone_and_again_after_each_restart():
    network = SimulatedNetwork(seed=0)
    loop = asyncio.get_running_loop()

    async def start_registry(epoch):
        return await started(network, "registry", epoch)

    registry = await start_registry(5)
    address = Address("a", 1)
    a = ActorSystem(Recorder(), address, network.transport(address), TOLD, QUICK)
    with capture_logs() as logs:
        began = loop.time()
        await a.start()
        await a.joined()
        assert loop.time() - began < 0.01, "at once, without a pause before the second dial"
        for epoch in (6, 9):
            network.crash(registry.address)
            await registry.stop()
            registry = await start_registry(epoch)
            await until(lambda e=epoch: a.registration.registry == Address("registry", e))
            assert registry.actor.core.knows(address)
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []
    # Without its files and with a clock of yesterday it learns above which epoch it has to be.
    network.crash(registry.address)
    await registry.stop()
    registry = await start_registry(4)
    assert await asyncio.wait_for(registry.shutdown_asked(), 10) == "superseded"
    assert registry.over.known_epoch == 9
    await registry.stop()
    registry = await start_registry(10)
    await until(lambda: a.registration.registry == Address("registry", 10))
    # The registry that it has found is believed that a later incarnation of it is there.
    successor = ActorSystem(Recorder(), Address("a", 2), network.transport(Address("a", 2)), TOLD, QUICK)
    await successor.start()
    assert await asyncio.wait_for(a.shutdown_asked(), 10) == "superseded"
    for system in (a, successor, registry):
        await system.stop()


@pytest.mark.virtual_time
async def test_the_registrys_host_returns_without_files_and_a_day_behind():
    """Who knew its actors before knows them by later epochs: they go above those, and above the registry's."""

    network = SimulatedNetwork(seed=0)
    ids = {"head": ["registry", "x.head"], "d": ["y.d"], "e": ["z.e"]}
    systems = {}

    async def start(secret, name, epoch):
        systems[name] = await started(network, name, epoch, secret, lease_s=2.0)

    async def start_host(host, epoch):
        secret = HostSecret.draw("m", host, ids[host], ["recorder"])
        for name in ids[host]:
            await start(secret, name, epoch)
        return secret

    def agree():
        registry, *others = systems.values()
        members = registry.actor.core.members()
        views = [[one.address for one in system.registration.view.all()] for system in others]
        return len(members) == 4 and views == [[one.address for one in members]] * 3

    for host in ids:
        await start_host(host, 86_400)
    await until(agree)
    for name in ids["head"]:
        network.crash(systems[name].address)
        await systems[name].stop()
    secret = await start_host("head", 5)
    # As its supervisor does: who was refused comes again, above what the refusal named.
    while not agree():
        for name in ids["head"]:
            if systems[name].over is not None:
                known = systems[name].over.known_epoch
                await systems[name].stop()
                await start(secret, name, max(systems[name].address.epoch, known) + 1)
        await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() < 60
    # `x.head` goes above the registry's own: others may remember an epoch of it that the registry has yet to hear of.
    assert [systems[name].address.epoch for name in ids["head"]] == [86_401, 86_402]
    for asker, asked in (("y.d", "x.head"), ("x.head", "z.e"), ("z.e", "x.head")):
        assert await answers(systems[asker], asked)
    for system in systems.values():
        await system.stop()


@pytest.mark.virtual_time
async def test_a_host_alone_does_not_end_the_registry_that_others_have_joined():
    network = SimulatedNetwork(seed=0)
    systems = {}
    for name, host in (("registry", "head"), ("x.d", "d"), ("y.e", "e")):
        secret = HostSecret.draw("m", host, [name], ["recorder"])
        systems[name] = await started(network, name, 5, secret, lease_s=1.0)
    registry, liar = systems["registry"], systems["x.d"]
    await until(lambda: all(registry.actor.core.knows(Address(name, 5)) for name in ("x.d", "y.e")))

    def refused():
        return registry.metrics.value("mesh_members_refused_total", code="wrong_epoch")

    for epoch in (6, 1 << 63):
        for _ in range(5):
            # Whenever it is told which one there is it says that it knows a later one still.
            liar.incarnation.bootstrap.learn(Address("registry", epoch))
            liar.links.lose(registry.address, "a lie")
            before = refused()
            with contextlib.suppress(CallError):
                await liar.actor.ctx.ask("registry", Ping(), timeout_s=1)
            await until(lambda b=before: refused() > b)
    assert registry.over is None
    assert await answers(systems["y.e"], "x.d")
    for system in systems.values():
        await system.stop()


async def answers(asker, actor_id):
    return (await asker.actor.ctx.ask(actor_id, HI, timeout_s=5)).message == HI


async def all_joined(systems, epoch):
    await until(lambda: all(s.registration.registry == Address("registry", epoch) for s in systems), 10)
    await until(lambda: all(len(s.registration.view.all()) == 4 for s in systems))


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "keys"])
def test_two_hosts_with_a_run_directory_each(run, short_path, once_per_process, keys):
    async def main():
        mesh = TwoHosts(short_path, keys=keys)
        registry = await mesh.start_registry(5)
        systems = near, far, neighbour = await mesh.start_recorders()
        for epoch in (5, 8):
            await all_joined(systems, epoch)
            assert near.incarnation.locate("registry")[1].control.startswith("ipc://")
            assert far.incarnation.locate("registry") == (Address("registry", epoch), mesh.registry_endpoint)
            assert far.incarnation.locate("y.d")[1].control == f"ipc://{short_path}/d/s/y.d.1.c"
            assert near.incarnation.locate("x.d")[1].control.startswith("tcp://127.0.0.3:")
            for asker, asked in ((near, "x.d"), (far, "x.head"), (far, "y.d"), (neighbour, "x.d")):
                assert await answers(asker, asked)
            if epoch == 5:
                await registry.stop()
                registry = await mesh.start_registry(8)
        for system in (*systems, registry):
            await system.stop()

    with assert_no_leaks(shm_prefix="none of this test", within_s=1.0):
        run(main)


def interface(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True, timeout=10)


async def lose_network(path):
    """The way between two hosts goes, for longer than a lease, and comes again; called in a network of its own."""
    interface("up")
    mesh = TwoHosts(path)
    registry = await mesh.start_registry(5)
    systems = near, far, _ = await mesh.start_recorders()
    await all_joined(systems, 5)
    assert await answers(far, "y.d")
    assert await answers(near, "x.d")
    began = time.monotonic()
    interface("down")
    with pytest.raises(PeerLost):
        await near.actor.ctx.ask("x.d", HI, timeout_s=30)
    assert time.monotonic() - began < 3, "1.5 s without a heartbeat, which is looked for every 0.5 s"
    with pytest.raises(PeerLost):
        await far.actor.ctx.ask("x.head", HI, timeout_s=30)
    assert time.monotonic() - began < 4, "on the side that was dialed too"
    await until(lambda: not registry.actor.core.knows(Address("y.d", 1)))
    assert await answers(far, "y.d")
    interface("up")
    await all_joined(systems, 5)
    assert await answers(near, "x.d")
    assert await answers(far, "y.d")
    assert {address.actor_id for address, _ in far.actor.lost} == {"x.head", "registry"}, "never who is on its host"
    for system in (*systems, registry):
        await system.stop()


def test_links_within_a_host_outlive_its_network(short_path):
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("ip") is None or subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network of its own can be made here")
    code = f"""
import asyncio, pathlib
from tests.mesh.test_hosts import lose_network
asyncio.run(lose_network(pathlib.Path({str(short_path)!r})))
"""
    done = subprocess.run(
        [*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
