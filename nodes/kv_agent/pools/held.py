"""The pools that an agent holds while it lives: gives them up, puts others in their place, offers them, tells the mesh.

Used by `memory/actions.py`; `HeldBy` is the part of the actor that is needed here.
"""

import itertools
from typing import Protocol

import msgspec

from kvstore.pool.header import incarnation_of
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.selection import Selection
from mesh.actor import Context
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.events import Event, GroupHeld, GroupReleased, SourceId
from nodes.kv_agent.pools.facts import Pool
from nodes.kv_agent.pools.own import absence, is_used
from nodes.kv_agent.stores.traffic import StoreTraffic
from nodes.roles import KVAgentAttributes


class HeldBy(Protocol):
    """The actor: its core takes `feed`'s events, and it has mapped its own pools like those of others."""

    ctx: Context
    stores: StoreTraffic | None
    core: AgentCore

    def feed(self, event: Event) -> None:
        """Give the core an event."""
        ...

    def unmap(self, source: SourceId) -> None:
        """Give up a mapping that copies read from."""
        ...


class HeldPools:
    """The pools of one agent. `ranks` are the actor's own, by group and rank."""

    def __init__(
        self,
        actor: HeldBy,
        ranks: dict[str, list[PagePool]],
        pulls: PagePuller,
        transports: Selection,
    ) -> None:
        self.ctx = actor.ctx
        self._actor = actor
        self._ranks = ranks
        self._pulls = pulls
        self._transports = transports
        self._numbers = itertools.count(1)
        for group, pools in list(ranks.items()):
            self.put_pools(group, pools, is_offered=not pools[0].info.is_released)

    def pools(self, group: str) -> list[PagePool]:
        """The pools of a group's ranks, or what a release left of them."""
        return self._ranks[group]

    def next_incarnation(self) -> int:
        """The number of the next incarnation of a pool."""
        return incarnation_of(self.ctx.address.epoch, next(self._numbers))

    def stop_copies(self, group: str) -> None:
        """Let nobody map the pool, nor copy from or to it."""
        self._take_away(group)
        self._announce()

    def is_copying(self, group: str) -> bool:
        """Whether a copy still uses it, including sends to other agents."""
        own = SourceId(self.ctx.address.actor_id, group)
        is_stored = self._actor.stores is not None and self._actor.stores.is_writing(group)
        return is_stored or is_used(self._actor.core.sessions, own) or self._transports.is_sending(group)

    def forget_pool(self, group: str) -> None:
        """Give up every view and mapping of it."""
        self._pulls.remove(group)
        self._actor.unmap(SourceId(self.ctx.address.actor_id, group))

    def put_pools(self, group: str, pools: list[PagePool], *, is_offered: bool) -> None:
        """Own `pools` in place of the group's; if `is_offered`, they may be mapped and copied. Tells the mesh."""
        self._ranks[group] = pools
        if not any(pool.info.is_freed for pool in pools) and (is_offered or group not in self._pulls):
            # A pool that is offered again is registered again: other agents were refused its pages meanwhile.
            self._pulls.add(group, pools)
            if self._actor.stores is not None:
                self._actor.stores.put(group, pools)
        for pool in pools:
            self._actor.feed(GroupHeld(Pool.from_info(pool.path, pool.info)))
        if not is_offered:
            self._take_away(group)
        self._announce()

    def handle(self, group: str) -> PoolHandle:
        """Where the pool of a group is, for actors that map it."""
        return self._actor.core.handle_of(group)

    def _take_away(self, group: str) -> None:
        """Begin no copy to or from a group's pools, and send none of their pages to other agents."""
        self._transports.withdraw(group)
        if self._actor.stores is not None:
            self._actor.stores.take_away(group)
        self._actor.feed(GroupReleased(group, *absence(self._ranks[group][0].info)))

    def _announce(self) -> None:
        infos = {group: pools[0].info for group, pools in self._ranks.items()}
        attributes = KVAgentAttributes(
            groups=sorted(infos),
            transports=self._transports.names,
            incarnations={group: info.incarnation for group, info in infos.items() if not info.is_freed},
            released=sorted(group for group, info in infos.items() if info.is_released),
        )
        told = msgspec.structs.asdict(attributes)
        # Announced by the actor when they change.
        del told["fallbacks"]
        self.ctx.announce(**told)
