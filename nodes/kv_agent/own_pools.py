"""The agent's own pools as its core knows them: those that can be mapped, written and read, and those released.

Pure; part of the kv_agent's core.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.device import CPU
from kvstore.layout import KVLayout
from kvstore.page_pool import PagePool
from kvstore.pool_header import PoolInfo
from kvstore.protocol import PoolHandle
from kvstore.transfer.session import TransferSession
from nodes.kv_agent.events import Refuse, SourceId
from nodes.kv_agent.sources import SourceFacts
from nodes.kv_agent.worker_pools import PAGES_PENDING
from nodes.protocol.memory import MEMORY_RELEASED


class Pool(NamedTuple):
    """One of the agent's own pools."""

    group: str
    path: str
    num_pages: int
    layout: KVLayout
    incarnation: int
    device: str = CPU

    @classmethod
    def of(cls, pool: PagePool) -> "Pool":
        """What the header says."""
        info = pool.info
        return cls(info.group, pool.path, info.num_pages, info.layout, info.incarnation, info.device)


class OwnPools:
    """By group. A pool that is away keeps its facts, but nobody gets at it."""

    def __init__(self, actor_id: str, pools: Iterable[Pool]) -> None:
        self._actor_id = actor_id
        self._pools = {pool.group: pool for pool in pools}
        self._digests = {group: pool.layout.digest for group, pool in self._pools.items()}
        self._away: dict[str, tuple[str, str]] = {}
        # Shared with `Sources`, which reads it.
        self.sources = {self._source(group): self._facts(group) for group in self._pools}

    def get(self, group: str) -> Pool | None:
        """The pool of a group, released or not."""
        return self._pools.get(group)

    def digest(self, group: str) -> bytes:
        """What the layout of a known group hashes to."""
        return self._digests[group]

    def withdraw(self, group: str, code: str, message: str) -> SourceId:
        """Nobody may begin anything with it any more. Returns it as a source of copies."""
        self._away[group] = code, message
        self.sources.pop(self._source(group), None)
        return self._source(group)

    def put(self, pool: Pool) -> None:
        """It is there, again or for the first time."""
        self._pools[pool.group] = pool
        self._digests[pool.group] = pool.layout.digest
        self._away.pop(pool.group, None)
        self.sources[self._source(pool.group)] = self._facts(pool.group)

    def handle(self, pool: Pool) -> PoolHandle:
        """What is told to whoever maps it."""
        return PoolHandle(
            group=pool.group,
            agent=self._actor_id,
            path=pool.path,
            num_pages=pool.num_pages,
            layout=pool.layout,
            incarnation=pool.incarnation,
            device=pool.device,
        )

    def refusal(self, call: int, group: str) -> Refuse | None:
        """Why a group's pool cannot be had now."""
        if group not in self._pools:
            known = ", ".join(sorted(self._pools)) or "none"
            return Refuse(call, "unknown_group", f"{self._actor_id} has no pool of group {group!r} (it has: {known})")
        if group in self._away:
            return Refuse(call, *self._away[group], retryable=True)
        return None

    def _source(self, group: str) -> SourceId:
        return SourceId(self._actor_id, group)

    def _facts(self, group: str) -> SourceFacts:
        return SourceFacts(self._pools[group].incarnation, self._digests[group])


def held_bytes(pool: PagePool) -> int:
    """Bytes of file and pages, wherever they lie."""
    return pool.info.file_bytes if pool.info.is_freed else pool.info.pages_offset + pool.info.pages_bytes


def absence(info: PoolInfo) -> tuple[str, str]:
    """Why a pool that is not offered is not: code and message."""
    if info.is_released:
        return MEMORY_RELEASED, f"the memory of {info.group} is released; `meshctl resume {info.group}` brings it back"
    return PAGES_PENDING, f"the worker of {info.group} has not made its pages yet"


def source_of(session: TransferSession) -> SourceId | None:
    """The pool that a transfer's pages come from, once it is known."""
    return SourceId(session.source.agent, session.source.group) if session.source is not None else None


def is_used(sessions: Iterable[TransferSession], pool: SourceId) -> bool:
    """Whether a copy of any transfer may still write to an own pool, or read from it."""
    return any(
        not session.is_quiesced and (session.grant.group == pool.group or source_of(session) == pool)
        for session in sessions
    )


def is_read(sessions: Iterable[TransferSession], pool: SourceId) -> bool:
    """Whether a copy may still read from a pool."""
    return any(not session.is_quiesced and source_of(session) == pool for session in sessions)
