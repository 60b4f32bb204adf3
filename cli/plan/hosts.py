"""What a topology file says about its hosts (`[hosts.NAME]`), and what has to hold for all of them together. Pure.

Used by `cli/plan/settings.py` when it has read everything; a mesh on one host has no such table.
"""

import ipaddress
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, cast

import msgspec

from cli.errors import BadConfig
from cli.plan.faults import Fault, find_fault, unknown_name
from mesh.address import HOST_NAME

HostName = Annotated[
    str,
    msgspec.Meta(
        pattern=HOST_NAME,
        description="lower-case letters, digits and dashes, at most 12, and not a number (actor ids end in it)",
    ),
]
Count = Annotated[int, msgspec.Meta(ge=0, le=256)]
Several = Annotated[int, msgspec.Meta(ge=0, le=64)]
Device = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(cpu|cuda|cuda:\d{1,3}(,cuda:\d{1,3})*)$",
        description="cpu, cuda (all that are visible), or the devices to use, like cuda:0 or cuda:0,cuda:1",
    ),
]
Address = Annotated[
    str,
    msgspec.Meta(
        # With `_`, which no host may have and containers do; with the dot of a name that is not searched for.
        pattern=r"^([A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?"
        r"|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$",
        description="an IP address or a DNS name, without a port (ports are chosen; the registry's is registry_port)",
    ),
]
Ports = Annotated[
    str,
    msgspec.Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$", description='the first and the last port, like "7500-7599"'),
]

OF_HOSTS: Final = ("prefill", "decode", "mixed", "gateways", "tokenizers", "detokenizers")
"""Settings of the mesh if it has one host, and of each host if there are several."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs on one of several hosts."""

    address: Address
    """What the other hosts dial."""
    bind: str = "0.0.0.0"
    """The IP address it listens at."""
    ports: Ports = ""
    """The ports it listens at, like 7500-7599, for a firewall that has to know them; empty: any."""
    registry: bool = False
    """Whether the registry runs there: on one host, by default the first of the file."""
    gateways: Several = 0
    """Number of gateways, and of the others below, on this host."""
    tokenizers: Several = 0
    detokenizers: Several = 0
    prefill: Count = 0
    decode: Count = 0
    mixed: Count = 0
    device: Device | None = None
    """Where its models run; by default as in the mesh."""

    @property
    def is_on_loopback(self) -> bool:
        return is_loopback(self.bind)

    @property
    def port_range(self) -> tuple[int, int] | None:
        first, _, last = self.ports.partition("-")
        return (int(first), int(last)) if self.ports else None

    @property
    def groups(self) -> tuple[int, int, int]:
        """How many prefill, decode and mixed groups it has."""
        return self.prefill, self.decode, self.mixed


def hosts_fault(table: Any) -> Fault | None:
    if not isinstance(table, Mapping):
        return find_fault(table, dict[str, Any], "hosts", strict=True)
    for name, fields in cast("Mapping[str, Any]", table).items():
        path = f"hosts.{name}"
        fault = find_fault(name, HostName, "the name of a host", strict=True)
        fault = fault or find_fault(fields, HostSettings, path, strict=True)
        if fault is None and "address" not in fields:
            fault = Fault(f"{path}.address is not given", "give what the other hosts dial: an IP address or a DNS name")
        if fault is not None:
            return fault
    return None


def check_host_name(name: str) -> None:
    """Raises BadConfig if no host can have this name."""
    fault = find_fault(name, HostName, "the name of a host", strict=True)
    if fault is not None:
        raise BadConfig(f"{name!r} cannot be the name of a host", why=fault.why, do=fault.do)


def registry_host(hosts: Mapping[str, HostSettings]) -> str:
    """The host that the registry runs on: the one that says so, or else the first; "" without hosts."""
    return next((name for name, host in hosts.items() if host.registry), next(iter(hosts), ""))


def mesh_groups(hosts: Mapping[str, HostSettings]) -> tuple[int, int, int]:
    prefill, decode, mixed = zip(*(host.groups for host in hosts.values()), strict=True)
    return sum(prefill), sum(decode), sum(mixed)


def check_hosts(hosts: Mapping[str, HostSettings], own: str, given: Collection[str]) -> None:
    """Raises BadConfig if the hosts do not make up a mesh, or `own` names none of them.

    `given` are the settings that were given for the mesh as a whole.
    """
    if not own:
        raise BadConfig(
            "it is not clear which host of the topology file this is",
            why=f"the file is for several hosts: {', '.join(hosts)}",
            do=f"name it with --host (or KVMESH_HOST), for example --host {next(iter(hosts))}",
        )
    check_named(hosts, own)
    both = [name for name in OF_HOSTS if name in given]
    if both:
        raise BadConfig(
            f"{', '.join(both)} cannot be set together with [hosts]",
            why="with several hosts, each host has its own settings for what it runs",
            do=f"remove it, and set it for a host, for example [hosts.{own}] {both[0]} = 1",
        )
    registries = [name for name, host in hosts.items() if host.registry]
    if len(registries) > 1:
        raise BadConfig(
            f"{' and '.join(registries)} cannot both have the registry",
            why="a mesh has one, which all others look for at its host's address",
            do="set registry = true for one host only",
        )
    for name, host in hosts.items():
        _check_listening(name, host)
    _check_served(hosts)


def check_named(hosts: Mapping[str, HostSettings], own: str) -> None:
    """Raises BadConfig if the hosts of a topology file do not include this one."""
    if own not in hosts:
        do, why = unknown_name(own, hosts, "host").do, f"its hosts are {', '.join(hosts)}"
        raise BadConfig(f"--host {own} is not a host of the topology file", why=why, do=do)


def _check_listening(name: str, host: HostSettings) -> None:
    address = _ip(host.address)
    if (address is not None and address.is_unspecified) or (address is None and ":" in host.address):
        raise BadConfig(
            f"[hosts.{name}] address is {host.address}, which other hosts cannot dial",
            why="it is where the other hosts reach this one; where to listen is `bind`",
            do="give an IP address of that host, or a name that the other hosts can look up",
        )
    if host.port_range is not None and not 1 <= host.port_range[0] < host.port_range[1] <= 65535:
        raise BadConfig(
            f"[hosts.{name}] ports is {host.ports}, which is not a port range",
            why="it must be FIRST-LAST, from 1 to 65535",
            do='write it like "7500-7599": each actor of the host takes two, and so does the supervisor',
        )
    if _ip(host.bind) is None:
        raise BadConfig(
            f"[hosts.{name}] bind is {host.bind!r}, which cannot be listened on",
            why="it is not an IP address",
            do="give one of that host's addresses, or 0.0.0.0 for all of them",
        )


def _check_served(hosts: Mapping[str, HostSettings]) -> None:
    for field, what in (("gateways", "gateway"), ("tokenizers", "tokenizer"), ("detokenizers", "detokenizer")):
        if not any(getattr(host, field) for host in hosts.values()):
            raise BadConfig(
                f"no host has a {what}",
                why="a mesh of hosts cannot serve without one",
                do=f"set {field} = 1 for a host, for example in [hosts.{next(iter(hosts))}]",
            )
    if not any(mesh_groups(hosts)):
        raise BadConfig(
            "no host has a worker group",
            why="prefill, decode and mixed are all 0",
            do=f"set mixed = 1 for a host, for example in [hosts.{next(iter(hosts))}]",
        )


def is_loopback(address: str) -> bool:
    """Whether it is an IP address that only its own machine reaches."""
    found = _ip(address)
    return found is not None and found.is_loopback


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
