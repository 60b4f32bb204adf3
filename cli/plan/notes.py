"""What people should know about a topology before it starts, though nothing is wrong with it. Pure."""

from typing import Final

from cli.plan.settings import Settings
from nodes.gateway.config import GatewayConfig

_OWN_FILES: Final = 64
"""A gateway without peers and clients has some forty: logs, bound sockets, ZeroMQ's own, the event loop's."""
_PEER_FILES: Final = 8
"""File descriptors of a link: two sockets each way, with those by which ZeroMQ wakes itself."""


def topology_notes(
    settings: Settings, gateway: GatewayConfig | None, num_actors: int, max_files: int | None
) -> list[str]:
    """Notes on the whole mesh, and on this host's gateway if it has one. A process may have `max_files` descriptors."""
    notes: list[str] = []
    prefill, decode, mixed = settings.mesh_groups
    if not mixed and not decode:
        notes.append("there is no decode group: prefill groups decode, too")
    if not mixed and not prefill:
        notes.append("there is no prefill group: decode groups prefill, too")
    at: dict[str, list[str]] = {}
    for name, host in settings.hosts.items():
        if not host.is_on_loopback:
            at.setdefault(host.address, []).append(name)
    notes += [
        f"hosts {', '.join(names)} have the address {address}, which is only right on one machine"
        for address, names in at.items()
        if len(names) > 1
    ]
    if gateway is None or max_files is None:
        return notes
    wanted = gateway.max_connections
    own = _OWN_FILES + _PEER_FILES * num_actors
    if wanted + own > max_files:
        notes.append(
            f"`ulimit -Hn` is {max_files:,}: a gateway can hold about {max(0, max_files - own):,} connections, not the "
            f"{wanted:,} of max_connections; raise it to {wanted + own:,}, or set [roles.gateway] max_connections"
        )
    return notes
