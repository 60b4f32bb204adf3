"""Whether the mesh serves, as its gateway on this host says, and which of several hosts are absent from the mesh."""

from typing import Final

from cli.http_get import get_page
from cli.plan.names import supervisor_id
from cli.plan.settings import Settings
from mesh.membership.view import Membership

_ASK_S: Final = 1.0
"""The gateway answers from memory; a gateway that is starved is asked again 0.05 s later."""


async def unready_reason(host: str, port: int) -> str:
    """What the gateway's readiness route says is missing, by one HTTP request; empty if requests are served."""
    # Addresses to listen at; one cannot connect to them.
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        page = await get_page(target, port, "/health/ready", _ASK_S)
    except (OSError, TimeoutError, ValueError):
        return "the gateway does not answer"
    return "" if page.status == 200 else page.reasons or "the gateway is not ready"


def absent_hosts(settings: Settings, members: Membership) -> str:
    """Hosts of the topology whose supervisors are no members, in words; empty if all are, or there is one host."""
    absent = [name for name in settings.hosts if name != settings.on and members.get(supervisor_id(name)) is None]
    if not absent:
        return ""
    return f"host{'s' * (len(absent) > 1)} {', '.join(absent)} {'are' if len(absent) > 1 else 'is'} not in the mesh"
