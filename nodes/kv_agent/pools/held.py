"""The pools that an agent holds while it lives: gives them up, makes them again, offers them, and tells the mesh.

Used by `memory/actions.py`; `HeldBy` is the part of the actor that is needed here.
"""

import itertools
from collections.abc import Iterable
from typing import Protocol

import msgspec
from typing_extensions import override

from kvstore.pool.header import incarnation_of
from kvstore.pool.page_pool import MemoryHost, PagePool
from kvstore.protocol import PoolHandle
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.selection import Selection
from mesh.actor import Call, Context
from mesh.address import Address
from mesh.membership.view import Member
from nodes.kv_agent.config import KVAgentConfig
from nodes.kv_agent.core import AgentCore
from nodes.kv_agent.disk import DiskStores
from nodes.kv_agent.events import Event, GroupHeld, GroupReleased, SourceId
from nodes.kv_agent.memory.actions import MemoryActions, PoolOwner
from nodes.kv_agent.pools.facts import Pool
from nodes.kv_agent.pools.own import absence, is_read, is_used
from nodes.protocol.memory import HasLetGo, LetGo, ListMemory, ReleaseMemory, ResumeMemory
from nodes.roles import KVAgentAttributes


class HeldBy(Protocol):
    """The actor: its core takes `feed`'s events, and it has mapped its own pools like those of others."""

    ctx: Context
    disk: DiskStores | None

    @property
    def core(self) -> AgentCore: ...

    def feed(self, event: Event) -> None:
        """Give the core an event."""
        ...

    def unmap(self, source: SourceId) -> None:
        """Give up a mapping that copies read from."""
        ...

    def let_go(self, source: SourceId) -> None:
        """Unmap another agent's pool until a transfer asks for it again; copies from it end."""
        ...


class HeldPools(PoolOwner):
    """The pools of one agent. `ranks` are the actor's own, by group and rank; `config` gives their names."""

    def __init__(
        self,
        actor: HeldBy,
        ranks: dict[str, list[PagePool]],
        pulls: PagePuller,
        transports: Selection,
        host: MemoryHost,
        config: KVAgentConfig,
    ) -> None:
        self.ctx = actor.ctx
        self._actor = actor
        self._ranks = ranks
        self._pulls = pulls
        self._transports = transports
        self._numbers = itertools.count(1)
        self._memory = MemoryActions(self, host, ranks.values(), config.prefix, config.device_wait_s)
        for group, pools in list(ranks.items()):
            self.put_pools(group, pools, is_offered=not pools[0].info.is_released)
        self.on_members(())

    # what the actor tells

    def on_ask(self, call: Call) -> bool:
        """Handle an ask about memory. False if it is about something else."""
        match call.message:
            case ReleaseMemory() | ResumeMemory() | ListMemory():
                self._memory.on_ask(call)
            case LetGo():
                self._let_go(call, call.message)
            case _:
                return False
        return True

    def _let_go(self, call: Call, order: LetGo) -> None:
        """Another agent wants its pool unmapped: no copy from it begins, and running ones end."""
        source = SourceId(call.sender.actor_id, order.group)
        self._actor.let_go(source)
        if is_read(self._actor.core.sessions, source):
            call.fail("not_ready", f"pages of {order.group} are still being copied", retryable=True)
        else:
            call.reply(HasLetGo(group=order.group, number=order.number))

    def on_members(self, left: Iterable[Member]) -> None:
        self._memory.on_members(left)

    def on_peer_lost(self, peer: Address) -> None:
        self._memory.on_peer_lost(peer)

    def mapped(self, group: str, holder: Address) -> None:
        self._memory.on_mapped(group, holder)

    def copies_changed(self) -> None:
        self._memory.copies_changed()

    def stop(self) -> None:
        self._memory.stop()

    # as `PoolOwner`

    @override
    def pools(self, group: str) -> list[PagePool]:
        return self._ranks[group]

    @override
    def next_incarnation(self) -> int:
        return incarnation_of(self.ctx.address.epoch, next(self._numbers))

    @override
    def stop_copies(self, group: str) -> None:
        self._take_away(group)
        self._announce()

    @override
    def is_copying(self, group: str) -> bool:
        own = SourceId(self.ctx.address.actor_id, group)
        is_stored = self._actor.disk is not None and self._actor.disk.is_writing(group)
        return is_stored or is_used(self._actor.core.sessions, own) or self._transports.is_sending(group)

    @override
    def forget_pool(self, group: str) -> None:
        self._pulls.remove(group)
        self._actor.unmap(SourceId(self.ctx.address.actor_id, group))

    @override
    def put_pools(self, group: str, pools: list[PagePool], *, is_offered: bool) -> None:
        self._ranks[group] = pools
        if not any(pool.info.is_freed for pool in pools) and (is_offered or group not in self._pulls):
            # A pool that is offered again is registered again: other agents were refused its pages meanwhile.
            self._pulls.add(group, pools)
            if self._actor.disk is not None:
                self._actor.disk.put(group, pools)
        for pool in pools:
            self._actor.feed(GroupHeld(Pool.from_info(pool.path, pool.info)))
        if not is_offered:
            self._take_away(group)
        self._announce()

    @override
    def handle(self, group: str) -> PoolHandle:
        return self._actor.core.handle_of(group)

    def _take_away(self, group: str) -> None:
        """Begin no copy to or from a group's pools, and send none of their pages to other agents."""
        self._transports.withdraw(group)
        if self._actor.disk is not None:
            self._actor.disk.take_away(group)
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
