"""Transports installed by other packages: entry points of the group `kvmesh.transfers`.

`host_transport` or `device_transport` of the kv_agent names an entry point. The callable that it points to gets a
`TransferContext` when an agent is made, and returns a `Transport`. docs/architecture.md says how to write one.
"""

from importlib.metadata import entry_points
from typing import Final, NamedTuple

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
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_transport(name: str, context: TransferContext) -> Transport:
    """Make the installed transport of this name. Raises TransportUnusable."""
    for point in entry_points(group=GROUP, name=name):
        try:
            transport = point.load()(context)
        # A stranger's package may raise anything, and its name in the message helps more than a traceback.
        except Exception as error:
            why = f"{point.value} raised {type(error).__name__}: {error}"
            raise TransportUnusable(f"the transport {name} cannot be made: {why}") from error
        if isinstance(transport, Transport):
            return transport
        why = f"{point.value} returned {type(transport).__name__}, which is not a Transport"
        raise TransportUnusable(f"the transport {name} cannot be used: {why}")
    have = ", ".join(installed_transports()) or "none"
    raise TransportUnusable(f"no transport {name} is installed (entry points of {GROUP}: {have})")
