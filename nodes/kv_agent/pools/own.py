"""The agent's own pools as its core knows them: those that can be mapped, written and read, those released. Pure."""

from collections.abc import Iterable
from typing import Any

from kvstore.layout import PADDING_PAGE
from kvstore.pool.header import PoolInfo
from kvstore.pool.page_pool import PagePool
from kvstore.protocol import OpenGrant
from kvstore.transfer.session import SourceRefused, TransferSession
from mesh.runtime.effects import Refuse
from nodes.kv_agent.events import SourceId
from nodes.kv_agent.pools.facts import Pool
from nodes.kv_agent.sources import SourceFacts
from nodes.protocol.memory import MEMORY_RELEASED


class OwnPools:
    """The pools by group and rank. One that is away keeps its facts, but nobody can use it.

    Rank 0's page table describes the pages of all ranks: grants and transfers are for groups.
    """

    def __init__(self, actor_id: str, pools: Iterable[Pool]) -> None:
        self._actor_id = actor_id
        self._pools: dict[tuple[str, int], Pool] = {}
        self._away: dict[str, tuple[str, str]] = {}
        # Shared with `Sources`, which reads it.
        self.sources: dict[SourceId, SourceFacts] = {}
        for pool in pools:
            self.put(pool)

    def get(self, group: str) -> Pool | None:
        """The pool of a group's rank 0, away or not."""
        return self._pools.get((group, 0))

    def withdraw(self, group: str, code: str, message: str) -> SourceId:
        """Let nobody begin anything with a pool any more. Returns it as a source of copies."""
        self._away[group] = code, message
        self.sources.pop(self._source(group), None)
        return self._source(group)

    def put(self, pool: Pool) -> None:
        self._pools[pool.group, pool.layout.tp_rank] = pool
        self._away.pop(pool.group, None)
        if not pool.layout.tp_rank:
            self.sources[self._source(pool.group)] = SourceFacts(pool.incarnation, pool.layout.digest)

    def find(self, call: Any, group: str, rank: int) -> Pool | Refuse:
        """The pool, or why the call for it is refused."""
        pool = self._pools.get((group, rank))
        if group in self._away:
            return Refuse(call, *self._away[group], retryable=True)
        if pool is not None:
            return pool
        if self.get(group) is not None:
            return Refuse(call, "unknown_rank", f"{self._actor_id} has no pool of rank {rank} of group {group!r}")
        known = ", ".join(sorted({name for name, _ in self._pools})) or "none"
        return Refuse(call, "unknown_group", f"{self._actor_id} has no pool of group {group!r} (it has: {known})")

    def refusal(self, source: str) -> SourceRefused:
        """Why nothing can be copied from one of these pools, or from a store that is not among `sources`."""
        if self.get(source) is not None:
            return SourceRefused(MEMORY_RELEASED, f"the memory of {source} is released")
        return SourceRefused("unknown_group", f"{self._actor_id} has neither a pool nor an open store {source!r}")

    def misfit(self, grant: OpenGrant) -> str | None:
        """The error code if a grant is not one of pages of a pool that is here."""
        if grant.group in self._away:
            return self._away[grant.group][0]
        pool = self.get(grant.group)
        if pool is None:
            return "unknown_group"
        if grant.layout_digest != pool.layout.digest:
            return "layout_mismatch"
        pages = grant.pages
        is_sound = len(set(pages)) == len(pages) == len(grant.generations) and bool(pages) and grant.timeout_s > 0
        # Page 0 pads batches: nobody reads what is written there, so a grant that names it is a mistake.
        is_sound = is_sound and PADDING_PAGE < min(pages) <= max(pages) < pool.num_pages
        return None if is_sound else "bad_grant"

    def _source(self, group: str) -> SourceId:
        return SourceId(self._actor_id, group)


def held_bytes(pool: PagePool) -> int:
    """Bytes of file and pages, wherever they are."""
    return pool.info.file_bytes if pool.info.is_freed else pool.info.pages_offset + pool.info.pages_bytes


def absence(info: PoolInfo) -> tuple[str, str]:
    """Why a pool is not offered: code and message."""
    return MEMORY_RELEASED, f"the memory of {info.group} is released; `meshctl resume {info.group}` brings it back"


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
    """Whether a copy of any transfer may still read from a pool."""
    return any(not session.is_quiesced and source_of(session) == pool for session in sessions)
