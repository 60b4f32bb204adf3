"""The settings of a host that joins by a token: those of the mesh, with this host added. Pure.

`cli/commands/join.py` asks the registry for them.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from cli.errors import BadConfig, WrongUsage
from cli.plan.hosts import OF_HOSTS, HostSettings, check_host_name, hosts_fault, is_loopback
from cli.plan.settings import Settings
from cli.plan.sources import load_settings
from cli.plan.token import JoinToken


class Joiner(NamedTuple):
    """A host that joins: its name, what runs there, and the other options of its command line."""

    name: str
    host: HostSettings
    options: dict[str, Any]


def plan_joiner(options: Mapping[str, Any], token: JoinToken, machine: str, routed: str) -> Joiner:
    """The host that a command line describes; `machine` and `routed` are its name and address by default.

    Raises BadConfig, WrongUsage.
    """
    given = {name: value for name, value in options.items() if value is not None}
    name = given.pop("host", None) or host_name_of(machine)
    check_host_name(name)
    if name == token.host:
        why = f"the mesh {token.mesh!r} has its registry on the host of that name"
        do = "give it another name with --host"
        raise BadConfig(f"this machine cannot join as {name}", why=why, do=do)
    if given.pop("name", token.mesh) != token.mesh:
        why = f"--name (or KVMESH_NAME) says {options['name']!r}"
        do = "leave out the name, or get a token for that mesh"
        raise BadConfig(f"the token is for the mesh {token.mesh!r}", why=why, do=do)
    counts = {field: given.pop(field) for field in OF_HOSTS if field in given}
    if not any(counts.values()):
        why, do = "a host that joins runs what its command line says", "say what: --decode 1, --prefill 1 or --mixed 1"
        raise WrongUsage("nothing would run on this host", why=why, do=do)
    address = given.pop("address", None) or routed
    own: dict[str, Any] = {"address": address, **counts}
    if is_loopback(address):
        own["bind"] = address
    own |= {field: given.pop(field) for field in ("device", "ports") if field in given}
    fault = hosts_fault({name: own})
    if fault is not None:
        raise BadConfig("this host cannot join", why=fault.why, do=fault.do)
    return Joiner(name, msgspec.convert(own, HostSettings), given)


def joined_settings(
    token: JoinToken, joiner: Joiner, told: Mapping[str, Any], environment: Mapping[str, str]
) -> Settings:
    """The settings that the mesh told, with the host that joins and its command line's options. Raises BadConfig."""
    own = {name: value for name, value in msgspec.to_builtins(joiner.host).items() if value is not None}
    hosts, kv = dict(told.get("hosts", {})), dict(told.get("kv", {}))
    for size, other in (("pages", "memory"), ("memory", "pages")):
        if joiner.options.get(f"kv__{size}") is not None:
            kv.pop(other, None)
    document = dict(told) | {"name": token.mesh, "hosts": hosts | {joiner.name: own}, "kv": kv}
    options = {**joiner.options, "host": joiner.name}
    return load_settings(None, environment, options, document)


def host_name_of(machine: str) -> str:
    """A valid host name of at most 12 characters, made from the machine's own name up to its first dot."""
    name = re.sub(r"[^a-z0-9-]", "-", machine.partition(".")[0].lower()).strip("-")[:12].strip("-")
    return name if name and not name.isdigit() else f"h{name}"[:12]
