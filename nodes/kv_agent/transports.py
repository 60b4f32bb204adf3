"""Makes the agent's transports, as its configuration names them.

`shm` copies in host memory, `cuda_ipc` on the devices of a host. If the configuration names another transport (`nccl`,
`tcp` or an installed one), pages of other agents come only over that one; between pools of one agent, `shm` and
`cuda_ipc` still copy. The agent announces the transports that it has. Nothing copies between host memory and devices:
such a pair of pools is refused.
"""

from collections.abc import Callable, Mapping
from typing import Final

from kvstore.errors import DeviceUnavailable, TransportUnusable
from kvstore.pool.cuda.memory import DeviceMemory
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU, CUDA, memory_kind
from kvstore.pool.page_pool import MemoryHost
from kvstore.transfer.base import Transport
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.paired.link import LinkMaker
from kvstore.transfer.paired.nccl import NcclLinks
from kvstore.transfer.paired.orders import ControlChannel
from kvstore.transfer.paired.tcp.link import TCP, TcpLinks
from kvstore.transfer.paired.transport import PairTransport
from kvstore.transfer.plugins import TransferContext, load_transport
from kvstore.transfer.selection import Selection
from nodes.kv_agent.config import CUDA_IPC, NCCL, SHM, KVAgentConfig

Links = Callable[[KVAgentConfig, MemoryHost], LinkMaker]
_LINKS: Final[Mapping[str, Links]] = {
    NCCL: lambda _config, _host: NcclLinks(),
    TCP: lambda config, host: TcpLinks(config.tcp, lambda: _memory_of(host)),
}


def make_transports(
    config: KVAgentConfig,
    host: MemoryHost,
    channel: ControlChannel,
    changed: Callable[[], None],
    links: Mapping[str, LinkMaker] | None = None,
) -> Selection:
    """All transports of one agent. `links` replace the engines of these names; `changed` is called on fallbacks.

    Raises TypeError if `host` cannot hold CUDA pools, TransportUnusable for an installed one that cannot be used.
    """
    near: dict[str, Transport] = {}
    kinds = {memory_kind(pool.device) for pool in config.pools} or {CPU}
    if CPU in kinds:
        near[CPU] = ShmTransport(host, config.quantum_bytes)
    if CUDA in kinds:
        if not isinstance(host, CudaHost):
            raise TypeError(f"pools on CUDA devices need a CudaHost, not a {type(host).__name__}")
        near[CUDA] = CudaIpcTransport(host, config.copies_per_poll, config.gather_from)
    made: dict[str, Transport] = {}

    def make(name: str, kind: str) -> Transport:
        if name not in made:
            if name in _LINKS:
                engine = links[name] if links is not None else _LINKS[name](config, host)
                made[name] = PairTransport(engine, channel, config.pair_timeout_s)
            else:
                made[name] = load_transport(name, TransferContext(host, channel, config.pair_timeout_s))
        if kind not in made[name].kinds:
            moved = " and ".join(sorted(made[name].kinds))
            raise TransportUnusable(f"the transport {name} moves {moved} pages, not {kind} pages")
        return made[name]

    far = {kind: [make(name, kind) for name in names] for kind, names in _far_names(config).items()}
    return Selection(near, far, changed)


def _far_names(config: KVAgentConfig) -> dict[str, list[str]]:
    """By kind of memory: names of the transports between agents, in the order in which they are tried."""
    chosen: dict[str, list[str]] = {}
    if config.device_transport != CUDA_IPC:
        chosen[CUDA] = [config.device_transport, *([config.device_fallback] if config.device_fallback else [])]
    if config.host_transport != SHM:
        chosen[CPU] = [config.host_transport]
    return chosen


def _memory_of(host: MemoryHost) -> DeviceMemory:
    if not isinstance(host, CudaHost):
        raise DeviceUnavailable(f"a {type(host).__name__} holds no pools on devices")
    return host.memory
