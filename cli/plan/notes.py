"""What people should know about a topology before it starts, though nothing is wrong with it. Pure."""

from cli.plan.settings import Settings
from nodes.gateway.config import GatewayConfig


def topology_notes(settings: Settings, gateway: GatewayConfig | None, num_connections: int | None) -> list[str]:
    """Notes on the whole mesh, and on this host's gateway if it has one, which can hold `num_connections`, or any."""
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
    if gateway is not None and num_connections is not None and num_connections < gateway.max_connections:
        wanted = gateway.max_connections
        notes.append(
            f"`ulimit -Hn` lets a gateway hold about {num_connections:,} connections, not the {wanted:,} of "
            f"max_connections; raise it by {wanted - num_connections:,}, or set [roles.gateway] max_connections"
        )
    return notes
