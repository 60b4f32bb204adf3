"""Topologies that are planned and not started."""

from typing import Any

from cli.plan.role_configs import check_config
from cli.plan.topology import Machine, Topology

MACHINE = Machine(num_cores=4, pool_free_bytes=8 << 30, uid=1000)


def configs(topology: Topology, role: str) -> list[Any]:
    """Of the actors of a role, in their order."""
    return [check_config(role, launch.config) for launch in topology.actors if launch.role == role]
