"""The agent's transports, by where pages lie and whose they are, behind the face of one `PagePuller`.

`shm` copies in host memory, `cuda_ipc` on the devices of a host. Pages of other agents come by what the configuration
names in their stead, `nccl` or `tcp`, and only by it; between pools of one agent `shm` and `cuda_ipc` copy all the
same. The agent announces the transports that it has. Nothing copies between host memory and devices: such a pair of
pools is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvstore.errors import DeviceUnavailable, PagesElsewhere
from kvstore.pool.cuda.memory import DeviceMemory
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import CPU, CUDA, memory_kind
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Peer, Transport
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.paired.link import LinkMaker
from kvstore.transfer.paired.nccl import NcclLinks
from kvstore.transfer.paired.orders import Courier, RemotePeer
from kvstore.transfer.paired.tcp.link import TCP, TcpLinks
from kvstore.transfer.paired.transport import PairTransport
from kvstore.transfer.puller import Cut, Ended, PagePuller, Target
from kvstore.transfer.selection import ChosenTransport
from kvstore.transfer.session import CopyEnded, StartCopy
from nodes.kv_agent.config import NCCL, KVAgentConfig

MIXED_MEMORY: Final = "mixed_memory"


def make_transports(config: KVAgentConfig, host: MemoryHost) -> dict[str, Transport]:
    """A transport for each kind of memory in the configuration. Raises TypeError: `host` cannot hold CUDA pools."""
    kinds = {memory_kind(pool.device) for pool in config.pools} or {CPU}
    transports: dict[str, Transport] = {}
    if CPU in kinds:
        transports[CPU] = ShmTransport(host, config.quantum_bytes)
    if CUDA in kinds:
        if not isinstance(host, CudaHost):
            raise TypeError(f"pools on CUDA devices need a CudaHost, not a {type(host).__name__}")
        transports[CUDA] = CudaIpcTransport(host, config.copies_per_poll, config.gather_from)
    return transports


def chosen_names(config: KVAgentConfig) -> dict[str, list[str]]:
    """By kind of memory: names of the transports between agents, in the order in which they are tried."""
    chosen: dict[str, list[str]] = {}
    if config.device_transport in (NCCL, TCP):
        chosen[CUDA] = [config.device_transport, *([config.device_fallback] if config.device_fallback else [])]
    if config.host_transport == TCP:
        chosen[CPU] = [TCP]
    return chosen


def make_links(config: KVAgentConfig, host: MemoryHost) -> dict[str, LinkMaker]:
    """The engines that the configuration names."""
    makers: dict[str, Callable[[], LinkMaker]] = {
        NCCL: NcclLinks,
        TCP: lambda: TcpLinks(config.tcp, lambda: _memory_of(host)),
    }
    return {name: makers[name]() for names in chosen_names(config).values() for name in names}


def make_remote(
    config: KVAgentConfig, links: Mapping[str, LinkMaker], courier: Courier, changed: Callable[[], None]
) -> ChosenTransport | None:
    """The transports between agents; None: the configuration names none."""
    chosen = chosen_names(config)
    made = {name: PairTransport(maker, courier, config.pair_timeout_s) for name, maker in links.items()}
    choices = {kind: [made[name] for name in names] for kind, names in chosen.items()}
    return ChosenTransport(choices, changed) if choices else None


def _memory_of(host: MemoryHost) -> DeviceMemory:
    if not isinstance(host, CudaHost):
        raise DeviceUnavailable(f"a {type(host).__name__} holds no pools on devices")
    return host.memory


class Pullers:
    """See the module. `transports` by kind of memory; `remote` for pages of other agents."""

    def __init__(self, transports: dict[str, Transport], remote: ChosenTransport | None = None) -> None:
        self._pullers = {kind: PagePuller(transport) for kind, transport in transports.items()}
        self._remote = remote
        self._remote_puller = PagePuller(remote) if remote is not None else None
        # The same pool as the remote transport knows it, by its path.
        self._remote_targets: dict[str, Target] = {}

    @property
    def transports(self) -> list[Transport]:
        """What copies."""
        remote = self._remote.transports if self._remote is not None else []
        return [*(puller.transport for puller in self._pullers.values()), *remote]

    @property
    def names(self) -> list[str]:
        """Names of the transports, as announced."""
        return sorted(transport.name for transport in self.transports)

    @property
    def is_busy(self) -> bool:
        """Whether `pump` has more to do."""
        return any(puller.is_busy for puller in self._all())

    @property
    def pause_s(self) -> float:
        """Seconds that may pass until the next `pump`, while there is more to do."""
        return min((puller.transport.pause_s for puller in self._all() if puller.is_busy), default=0.0)

    def target(self, pool: PagePool) -> Target:
        """Register one of the agent's own pools."""
        if self._remote_puller is not None and self._is_remote(pool.info.device):
            self._remote_targets[pool.path] = self._remote_puller.target(pool)
        return self._of(pool.info.device).target(pool)

    def connect_own(self, pool: PagePool) -> Peer:
        """Read from one of the agent's own pools, mapped like any other. Raises PoolError."""
        return self._of(pool.info.device).transport.connect(pool.path)

    def connect(self, handle: PoolHandle) -> Peer:
        """Reach another agent's pool for reading. Raises PoolError, among them PagesElsewhere: no pool of its kind."""
        if self._remote is not None and self._is_remote(handle.device):
            return self._remote.reach(handle)
        return self._of(handle.device).transport.connect(handle.path)

    @property
    def device_failure(self) -> str:
        """Why a device failed under what is sent to others; empty: none did. What is pulled says so when it ends."""
        return self._remote.device_failure if self._remote is not None else ""

    def withdraw(self, group: str) -> None:
        """Send nothing more of a group's pool to other agents; what is being sent goes on, see `is_sending`.

        `target` with a pool of that group offers it again.
        """
        if self._remote is not None:
            self._remote.withdraw(group)

    def is_sending(self, group: str) -> bool:
        """Whether pages of a group's pool are being read for another agent, which the agent's core does not know."""
        return self._remote is not None and self._remote.is_sending(group)

    def disconnect(self, peer: Peer) -> None:
        """Give a pool up; copies from it fail first."""
        self._puller_of(peer).transport.disconnect(peer)

    def start(self, grant_id: str, copy: StartCopy, target: Target, peer: Peer, cut: Cut | None = None) -> Ended | None:
        """See `PagePuller.start`; a copy between two kinds of memory ends at once, with `mixed_memory`."""
        source, destination = peer.info.device, target.pool.info.device
        if memory_kind(source) != memory_kind(destination):
            message = f"pages on {source} cannot be copied to {destination}: give both groups devices, or neither"
            return Ended(grant_id, CopyEnded(copy.copy_id, MIXED_MEMORY, message), 0)
        if isinstance(peer, RemotePeer):
            target = self._remote_targets[target.pool.path]._replace(table=target.table)
        return self._puller_of(peer).start(grant_id, copy, target, peer, cut)

    def cancel(self, grant_id: str, copy_id: int) -> None:
        """See `PagePuller.cancel`."""
        for puller in self._all():
            puller.cancel(grant_id, copy_id)

    def pump(self, now: float) -> Iterable[Ended]:
        """See `PagePuller.pump`; the ends of all transports."""
        for puller in self._all():
            if puller.is_busy:
                yield from puller.pump(now)

    def close(self) -> None:
        """Close all transports."""
        for puller in self._all():
            puller.transport.close()

    def _is_remote(self, device: str) -> bool:
        return self._remote is not None and self._remote.moves(device)

    def _all(self) -> list[PagePuller]:
        remote = [self._remote_puller] if self._remote_puller is not None else []
        return [*self._pullers.values(), *remote]

    def _puller_of(self, peer: Peer) -> PagePuller:
        if isinstance(peer, RemotePeer) and self._remote_puller is not None:
            return self._remote_puller
        return self._of(peer.info.device)

    def _of(self, device: str) -> PagePuller:
        puller = self._pullers.get(memory_kind(device))
        if puller is None:
            raise PagesElsewhere(
                f"pages on {device} cannot be copied by this agent, which has {', '.join(self.names)} only: "
                "the pools of groups that exchange pages must all lie on devices, or all in host memory"
            )
        return puller
