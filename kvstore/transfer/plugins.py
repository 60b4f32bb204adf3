"""Transports installed by other packages: entry points of the group `kvmesh.transfers`.

`host_transport` or `device_transport` of the kv_agent names an entry point. The callable that it points to gets a
`TransferContext` when an agent is made, and returns a `Transport`. docs/architecture.md says how to write one.
"""

from typing import Final, NamedTuple

from kvstore.entry_points import installed, make_installed
from kvstore.errors import TransportUnusable
from kvstore.pool.page_pool import MemoryHost
from kvstore.transfer.base import Transport
from kvstore.transfer.paired.orders import ControlChannel

GROUP: Final = "kvmesh.transfers"


class TransferContext(NamedTuple):
    """What an agent gives its transports: its host's pools, a channel to other agents, seconds to connect to one."""

    host: MemoryHost
    channel: ControlChannel
    pair_timeout_s: float


def installed_transports() -> list[str]:
    """Names of the transports installed by other packages."""
    return installed(GROUP)


def load_transport(name: str, context: TransferContext) -> Transport:
    """Make the installed transport of this name. Raises TransportUnusable."""
    return make_installed(GROUP, name, context, Transport, "transport", TransportUnusable)
