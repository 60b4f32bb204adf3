"""Topologies that are planned and not started."""

from typing import Any

from cli.plan.names import on_host
from cli.plan.role_configs import check_config
from cli.plan.topology import Machine, Topology

MACHINE = Machine(num_cores=4, pool_free_bytes=8 << 30, uid=1000)
AGENT = "kv-agent-0"
AROUND_GROUPS = ("gateway-0", AGENT, "tokenizer-0", "detokenizer-0")
"""The place for a new role that every mesh gets. Where there is no group, there is no agent."""


def ids_of(*groups: str, host: str = "", serves: bool = True) -> list[str]:
    """Ids of the actors of a host with these groups, in their order; `serves`: it also has what is around groups."""
    around = [one for one in AROUND_GROUPS if (groups if one == AGENT else serves)]
    of_groups = [f"{role}-{group}" for group in groups for role in ("worker", "scheduler")]
    return ["registry"] * serves + [on_host(one, host) for one in (*around, *of_groups)]


def configs(topology: Topology, role: str) -> list[Any]:
    """Of the actors of a role, in their order."""
    return [check_config(role, launch.config) for launch in topology.actors if launch.role == role]
