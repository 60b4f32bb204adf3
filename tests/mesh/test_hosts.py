"""Actors of several hosts: a registry at fixed ports is found by its endpoint alone, whichever incarnation it is."""

import asyncio
from dataclasses import replace

from structlog.testing import capture_logs

from mesh.address import Address, Endpoint
from mesh.membership.view import StaticBootstrap
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import VirtualTimeLoop
from mesh.system import ActorSystem
from mesh.testing.leaks import assert_no_leaks
from mesh.testing.ports import free_port
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import QUICK, Recorder, Say, until

HI = Say(text="hi")
ANY_EPOCH = Address("registry", 0)


def test_a_registry_is_found_by_its_endpoint_alone_and_again_after_each_restart(run):
    async def main():
        network = SimulatedNetwork(seed=0)
        loop = asyncio.get_running_loop()
        told = StaticBootstrap(ANY_EPOCH, Endpoint("sim://registry/c", "sim://registry/d"))

        async def start_registry(epoch):
            address = Address("registry", epoch)
            system = ActorSystem(RegistryActor(), address, network.transport(address, "registry"), told, QUICK)
            await system.start()
            return system

        registry = await start_registry(5)
        address = Address("a", 1)
        a = ActorSystem(Recorder(), address, network.transport(address), told, QUICK)
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
        # The registry that it has found is believed that a later incarnation of it is there.
        successor = ActorSystem(Recorder(), Address("a", 2), network.transport(Address("a", 2)), told, QUICK)
        await successor.start()
        assert await asyncio.wait_for(a.shutdown_asked(), 10) == "superseded"
        for system in (a, successor, registry):
            await system.stop()

    run(main, VirtualTimeLoop)


def test_two_hosts_with_a_run_directory_each(run, short_path, once_per_process):
    async def main():
        port = free_port()
        head, d = (
            (RunDirectory(short_path / name), HostRecord(name, f"127.0.0.{number}", f"127.0.0.{number}"))
            for name, number in (("head", 2), ("d", 3))
        )
        for directory, record in (head, d):
            directory.create()
            directory.write_host(record)
        there = Endpoint(f"tcp://127.0.0.2:{port}", f"tcp://127.0.0.2:{port + 1}")
        d[0].write_registry(ANY_EPOCH, there)

        async def start(actor, address, host, port=0):
            directory, record = host
            transport = ZeroMQTransport(ZeroMQOptions.of_host(directory, port))
            options = replace(QUICK, host=record.name)
            system = ActorSystem(actor, address, transport, directory.bootstrap(), options)
            await system.start()
            return system

        registry = await start(RegistryActor(head[0]), Address("registry", 5), head, port)
        systems = [
            await start(Recorder(), Address(actor_id, 1), host)
            for actor_id, host in (("x.head", head), ("x.d", d), ("y.d", d))
        ]
        near, far, neighbour = systems
        for epoch in (5, 8):
            await until(lambda e=epoch: all(s.registration.registry == Address("registry", e) for s in systems), 10)
            await until(lambda: all(len(s.registration.view.all()) == 4 for s in systems))
            assert near.locate("registry")[1].control.startswith("ipc://")
            assert far.locate("registry") == (Address("registry", epoch), there)
            assert far.locate("y.d")[1].control == f"ipc://{short_path}/d/s/y.d.1.c"
            assert near.locate("x.d")[1].control.startswith("tcp://127.0.0.3:")
            for asker, asked in ((near, "x.d"), (far, "x.head"), (far, "y.d"), (neighbour, "x.d")):
                assert (await asker.actor.ctx.ask(asked, HI, timeout_s=5)).message == HI
            if epoch == 5:
                await registry.stop()
                registry = await start(RegistryActor(head[0]), Address("registry", 8), head, port)
        for system in (*systems, registry):
            await system.stop()

    with assert_no_leaks(shm_prefix="none of this test", within_s=1.0):
        run(main)
