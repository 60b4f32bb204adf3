"""Gauges of a kv_agent's core and transports, for `/metrics`."""

from collections import Counter

from kvstore.transfer.selection import Selection
from kvstore.transfer.session import Phase
from nodes.actor_figures import PULLED_BYTES
from nodes.kv_agent.core import AgentCore


def gauges(core: AgentCore) -> dict[str, float]:
    """Current figures; those whose names end in `_total` only rise."""
    phases: Counter[str] = Counter()
    copying = waiting = 0
    for session in core.sessions:
        phases[session.phase.value] += 1
        copying += session.num_copying
        waiting += 0 if session.has_ended else len(session.grant.pages) - session.num_pages - session.num_copying
    figures = {f'mesh_kv_sessions{{state="{phase.value}"}}': float(phases[phase.value]) for phase in Phase}
    figures.update(
        {
            "mesh_kv_grants_open": float(core.num_live),
            'mesh_kv_pages_in_transfer{state="granted"}': float(waiting),
            'mesh_kv_pages_in_transfer{state="copying"}': float(copying),
            "mesh_kv_transfer_pages_total": float(core.num_pages_pulled),
            "mesh_kv_transfer_bytes_total": float(core.num_bytes),
            "mesh_kv_transfers_total": float(core.num_transfers),
            "mesh_kv_foreign_pools": float(core.sources.num_mapped),
        }
    )
    for code, number in core.failures.items():
        figures[f'mesh_kv_transfer_failures_total{{code="{code}"}}'] = float(number)
    return figures


def transport_gauges(transports: Selection) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, num_bytes in transports.pulled_bytes.items():
        figures[f'{PULLED_BYTES}{{transport="{name}"}}'] = float(num_bytes)
    for why, number in transports.refused.items():
        figures[f'mesh_kv_connections_refused_total{{why="{why}"}}'] = float(number)
    if transports.far:
        figures["mesh_kv_pairs_on_fallback"] = float(len(transports.fallbacks))
        figures["mesh_kv_fallbacks_total"] = float(transports.num_fallbacks)
    return figures
