"""What the supervisor of one host of several leaves for its actors: which host this is, and where the registry is."""

from typing import Final

from cli.plan.settings import Settings
from mesh.address import Address, Endpoint
from mesh.runtime.run_directory import HostRecord, RunDirectory
from nodes.roles import REGISTRY

SOME_REGISTRY: Final = Address(REGISTRY, 0)
"""A registry of an epoch that nobody has: the one that listens there says which incarnation it is."""


def write_host_files(run: RunDirectory, settings: Settings, spec: dict[str, str]) -> None:
    """Write `host.json`, and `registry.json` where the registry is on another host, before any actor starts.

    On a mesh of one host none is written: its registry says itself where it is. `spec` is as in `HostRecord`. Raises
    OSError.
    """
    host = settings.hosts.get(settings.on)
    if host is None:
        run.write_host(None)
        return
    run.write_host(
        HostRecord(settings.on, host.bind, host.address, settings.insecure, settings.keys, spec, host.port_range)
    )
    if settings.registry_host != settings.on:
        run.write_registry(SOME_REGISTRY, registry_endpoint(settings))


def registry_endpoint(settings: Settings) -> Endpoint:
    """Where other hosts dial the registry of a mesh of several: its control channel, and its data at the port after."""
    return endpoint_at(settings.hosts[settings.registry_host].address, settings.registry_port)


def endpoint_at(address: str, port: int) -> Endpoint:
    """The same for an address and its first port."""
    where = f"[{address}]" if ":" in address else address
    control, data = (f"tcp://{where}:{port + number}" for number in range(2))
    return Endpoint(control, data)
