"""Performs what `core.py` decides: asks holders, writes desired states into headers, frees pools and makes them again.

Part of the kv_agent's actor, whose pools `pools/held.py` holds.
"""

import asyncio
from collections.abc import Iterable, Sequence

from kvstore.errors import DeviceExhaustedMemory, KVError
from kvstore.pool.header import PoolInfo
from kvstore.pool.page_pool import MemoryHost, PagePool
from mesh.actor import Call
from mesh.address import Address
from mesh.membership.view import Member
from mesh.runtime.driver import CoreDriver, perform
from mesh.runtime.effects import Asked
from mesh.runtime.timers import DeadlineTimer
from nodes.kv_agent.memory.core import MemoryCore
from nodes.kv_agent.memory.events import (
    CopiesEnded,
    DesiredState,
    FreePool,
    HolderLost,
    HolderSeen,
    MakePool,
    Mapped,
    Mark,
    MembersSeen,
    MemoryCommand,
    MemoryEvent,
    Offer,
    PoolFacts,
    PoolFreed,
    PoolMade,
    PoolRefused,
    StopCopies,
    Tick,
)
from nodes.kv_agent.pools.held import HeldPools
from nodes.kv_agent.pools.taking import MEMORY_RETRY_S, free_pools, make_pools, mark_pools
from nodes.roles import SCHEDULER, WORKER


class MemoryActions:
    """See the module. Pools' names begin with `prefix`; `wait_s` limits waiting for device memory that others have."""

    def __init__(
        self, owner: HeldPools, host: MemoryHost, pools: Iterable[Sequence[PagePool]], prefix: str, wait_s: float
    ) -> None:
        self._owner = owner
        self._host = host
        self._prefix = prefix
        self._wait_s = wait_s
        self._core = MemoryCore((_facts([pool.info for pool in ranks]) for ranks in pools), owner.handle)
        self._stopping: set[str] = set()
        self._driver = CoreDriver[MemoryEvent, MemoryCommand](owner, "memory", self._core.handle, self._perform)
        self._timer = DeadlineTimer(lambda: owner.ctx, lambda: self._core.next_deadline, lambda _: self._handle(Tick()))

    def on_ask(self, call: Call) -> None:
        """An operator's `ReleaseMemory`, `ResumeMemory` or `ListMemory`."""
        self._handle(Asked(call.sender, call.message, call))

    def on_mapped(self, group: str, holder: Address) -> None:
        self._handle(Mapped(group, holder))

    def on_members(self, left: Iterable[Member]) -> None:
        members = self._owner.ctx.members
        if not members.all():
            # It has not joined yet: then it is among them itself.
            return
        for member in left:
            now = members.get(member.actor_id)
            # A link can break between two living actors; only one that is no longer a member has let go of all.
            if now is None or now.epoch > member.epoch:
                self._handle(HolderLost(member.address))
        holders = [_seen(member) for member in members.all() if member.role in (SCHEDULER, WORKER)]
        self._handle(MembersSeen(holders, frozenset(member.address for member in members.all())))

    def on_peer_lost(self, peer: Address) -> None:
        """A link ended. The peer is dead only if it is no longer a member, or a later incarnation is there."""
        member = self._owner.ctx.members.get(peer.actor_id)
        if member is None or member.epoch > peer.epoch:
            self._handle(HolderLost(peer))

    def copies_changed(self) -> None:
        for group in [group for group in self._stopping if not self._owner.is_copying(group)]:
            self._stopping.discard(group)
            self._handle(CopiesEnded(group))

    def stop(self) -> None:
        self._timer.cancel()

    def _handle(self, event: MemoryEvent) -> None:
        if self._driver.feed(event):
            self._timer.arm()

    def _perform(self, command: MemoryCommand) -> None:
        match command:
            case Mark(group, desired):
                self._mark(group, desired)
            case StopCopies(group):
                self._stopping.add(group)
                self._owner.stop_copies(group)
                self.copies_changed()
            case Offer(group):
                self._stopping.discard(group)
                self._owner.put_pools(group, self._owner.pools(group), is_offered=True)
            case FreePool(group):
                self._free(group)
            case MakePool(group):
                # In a task: a device's memory may take seconds to become free, and other asks go on meanwhile.
                self._owner.ctx.spawn(self._make(group), name=f"make {group}")
            case _:
                perform(command, self._owner.ctx, self._handle)

    def _mark(self, group: str, desired: DesiredState | None) -> None:
        weights, unwanted = (desired.weights, desired.is_kv) if desired is not None else ("", False)
        mark_pools(self._host, self._owner.pools(group), weights, is_unwanted=unwanted)
        self._owner.ctx.log.info("memory wanted back" if desired is not None else "memory given again", group=group)

    def _free(self, group: str) -> None:
        owner, pools = self._owner, self._owner.pools(group)
        owner.forget_pool(group)
        try:
            left = free_pools(self._host, self._prefix, pools)
        except (KVError, OSError) as error:
            # The desired state is in the header: the next agent continues with it.
            owner.ctx.fail(f"the pool of {group} cannot be freed: {error}")
            return
        owner.put_pools(group, left, is_offered=False)
        owner.ctx.log.info("pool freed", group=group, bytes=sum(pool.info.pages_bytes for pool in pools))
        self._handle(PoolFreed(group))

    async def _make(self, group: str) -> None:
        try:
            await self._make_when_free(group)
        except Exception as error:
            # What is left of the pool is unknown: the next agent finds out, and its header has the desired state.
            self._owner.ctx.log.exception("pool not made", group=group)
            self._owner.ctx.fail(f"the pool of {group} cannot be recreated: {error!r}")

    async def _make_when_free(self, group: str) -> None:
        owner = self._owner
        deadline = owner.ctx.now() + self._wait_s
        incarnation = owner.next_incarnation()
        while True:
            # Read at each try: one that failed leaves other pools behind than it began with.
            left = owner.pools(group)
            owner.forget_pool(group)
            pools, problem = make_pools(self._host, self._prefix, left, incarnation)
            owner.put_pools(group, pools, is_offered=problem is None)
            if not isinstance(problem, DeviceExhaustedMemory) or owner.ctx.now() >= deadline:
                break
            await asyncio.sleep(MEMORY_RETRY_S)
        owner.ctx.log.info("pool", group=group, found="made again" if problem is None else problem.message)
        self._handle(PoolMade(group) if problem is None else PoolRefused(group, problem.message))


def _facts(ranks: Sequence[PoolInfo]) -> PoolFacts:
    first = ranks[0]
    desired = DesiredState(first.is_unwanted, first.weights) if first.is_released else None
    is_there = not all(info.is_freed for info in ranks)
    num_bytes = sum(info.pages_bytes for info in ranks)
    return PoolFacts(first.group, first.device, num_bytes, desired, is_there, first.layout.tp_size)


def _seen(member: Member) -> HolderSeen:
    group, saver = member.attributes.get("group"), member.attributes.get("memory_saver")
    # A worker says either way once its model is loaded.
    has_loaded, name = isinstance(saver, bool), group if isinstance(group, str) else ""
    return HolderSeen(member.address, member.role, member.state, name, saver is True, has_loaded)
