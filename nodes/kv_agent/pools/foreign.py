"""Reaches the pools of other agents: asks their agents where they are, rank by rank, and maps them.

While an answer is on its way, the other agent may be lost, or want the pool unmapped. Both are handled as soon as they
are known, so an answer from before must not be used afterwards: nobody would unmap the pool that it describes. Used by
`actor.py`.
"""

from collections import Counter
from collections.abc import Sequence

from kvstore.errors import KVError, TransferError
from kvstore.protocol import MapPool, PoolHandle
from kvstore.transfer.base import Peer, Transport
from mesh.actor import Context
from mesh.errors import CallError
from nodes.kv_agent.events import SourceId
from nodes.kv_agent.pools.own import absence
from nodes.protocol.memory import MEMORY_RELEASED


class ForeignPools:
    """See the module. `timeout_s` is for an agent's answer, for each rank."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        # How often each agent was lost, and each of its pools let go.
        self._losses: Counter[str] = Counter()
        self._releases: Counter[SourceId] = Counter()
        # Mapped pools of sources whose ranks are not all mapped yet.
        self._begun: dict[SourceId, list[Peer]] = {}

    def agent_lost(self, agent: str) -> None:
        """Discard answers that this agent has sent so far."""
        self._losses[agent] += 1

    def let_go(self, source: SourceId) -> None:
        """Unmap what is mapped of a source so far, and map no more of it until its agent is asked again."""
        self._releases[source] += 1
        self._give_up(source)

    async def connect(self, ctx: Context, source: SourceId) -> list[Peer]:
        """Pools of all ranks, one call at a time for a source. Raises CallError or KVError; then none stays mapped."""
        peers = self._begun[source] = []
        try:
            await self._connect(ctx, source, peers)
            require_ranks(peers)
        except (CallError, KVError):
            self._give_up(source)
            raise
        finally:
            del self._begun[source]
        return peers

    async def _connect(self, ctx: Context, source: SourceId, peers: list[Peer]) -> None:
        # Counted, not flagged: the agent may be lost and back again within one answer's time.
        num_losses, num_releases = self._losses[source.agent], self._releases[source]
        num_ranks = 1
        while len(peers) < num_ranks:
            ask = MapPool(group=source.group, rank=len(peers))
            handle = (await ctx.ask(source.agent, ask, timeout_s=self._timeout_s)).message
            if self._losses[source.agent] != num_losses:
                text = f"{source.agent} was lost while it was being asked for its pool of {source.group}"
                raise TransferError("source_lost", text)
            if self._releases[source] != num_releases:
                text = f"{source.agent} began to release its pool of {source.group} while it was being asked for it"
                raise TransferError(MEMORY_RELEASED, text)
            if not isinstance(handle, PoolHandle):
                raise TransferError("bad_answer", f"{source.agent} answered MapPool with {type(handle).__name__}")
            peers.append(self._transport.connect(handle))
            info = peers[0].info
            if info.is_released:
                # The agent answered before the release was requested, or died with it in its header.
                raise TransferError(*absence(info))
            # Only the first pool's header tells how many there are.
            num_ranks = info.layout.tp_size

    def _give_up(self, source: SourceId) -> None:
        peers = self._begun.get(source, [])
        while peers:
            self._transport.disconnect(peers.pop())


def require_ranks(pools: Sequence[Peer]) -> None:
    """Raises TransferError unless these are the pools of all ranks of one incarnation of one group, in order."""
    first = pools[0].info
    for rank, peer in enumerate(pools):
        info = peer.info
        if (info.incarnation, info.num_pages) != (first.incarnation, first.num_pages):
            raise TransferError("source_changed", f"the pools of {first.group} are being recreated")
        if (info.layout.tp_rank, info.layout.tp_size) != (rank, len(pools)):
            found = f"rank {info.layout.tp_rank} of {info.layout.tp_size}"
            raise TransferError("bad_answer", f"asked for rank {rank} of {len(pools)} of {first.group}, got {found}")
