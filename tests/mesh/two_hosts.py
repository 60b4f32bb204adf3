"""Two hosts on loopback addresses of one machine, with keys or without."""

from dataclasses import replace
from pathlib import Path

from mesh.address import Address, Endpoint
from mesh.membership.keys import AllowedHost, AllowList, HostKey
from mesh.runtime.key_files import KeyDirectory
from mesh.runtime.run_directory import HostRecord, RunDirectory
from mesh.system import ActorSystem
from mesh.testing.ports import free_port
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import QUICK, Recorder

ANY_EPOCH = Address("registry", 0)


def allow(*pairs, version=1):
    """A list of these hosts, the first of which has the registry too."""
    roles = [("*", "registry"), *[None] * (len(pairs) - 1)]
    hosts = [AllowedHost(pair.host, pair.public_key, granted) for pair, granted in zip(pairs, roles, strict=True)]
    return AllowList(version, tuple(hosts))


class TwoHosts:
    """A head with the registry and a host d, each with a run directory and a loopback address of its own.

    With `keys` each has a pair, and both are on the list of each.
    """

    def __init__(self, path, *, keys=False):
        port = free_port()
        self.registry_endpoint = Endpoint(f"tcp://127.0.0.2:{port}", f"tcp://127.0.0.2:{port + 1}")
        self.hosts = {
            name: (
                RunDirectory(path / name),
                HostRecord(name, address, address, keys=str(path / f"{name}.keys") if keys else ""),
                port * (name == "head"),
            )
            for name, address in (("head", "127.0.0.2"), ("d", "127.0.0.3"))
        }
        self.pairs = {name: HostKey.new(name) for name in self.hosts} if keys else {}
        self.allowed = allow(*self.pairs.values()) if keys else None
        for name, pair in self.pairs.items():
            self.key_directory(name).write_key(pair)
            self.key_directory(name).write_allowed(self.allowed)
        for directory, record, _ in self.hosts.values():
            directory.create()
            directory.write_host(record)
        self.transports = {}
        self.hosts["d"][0].write_registry(ANY_EPOCH, self.registry_endpoint)

    def key_directory(self, host):
        return KeyDirectory(Path(self.hosts[host][1].keys))

    async def start(self, name, actor=None, host="head", epoch=1):
        directory, record, port = self.hosts[host]
        listen = ZeroMQOptions.of_host(directory, port if actor is not None else 0)
        options = replace(QUICK, host=record.name, vet_host=listen.vet_host)
        transport = self.transports[name] = ZeroMQTransport(listen)
        system = ActorSystem(actor or Recorder(), Address(name, epoch), transport, directory.bootstrap(), options)
        await system.start()
        return system

    async def start_registry(self, epoch):
        return await self.start("registry", RegistryActor(self.hosts["head"][0], lease_s=1.0), epoch=epoch)

    async def start_recorders(self):
        return [
            await self.start(*where) for where in (("x.head", None, "head"), ("x.d", None, "d"), ("y.d", None, "d"))
        ]
