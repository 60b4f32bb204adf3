"""Which cached pages go first when pages are needed.

The radix tree offers runs of pages that nobody holds and that have no descendants; a policy orders them. A run's
priority is computed when it becomes evictable and again after each use, so it must not depend on anything else.
"""

from collections.abc import Mapping
from typing import Final, Literal, Protocol

from typing_extensions import override


class EvictableRun(Protocol):
    """The fields that a policy may use. Times are the tree's own ticks, one per use, not seconds."""

    created: int
    last_used: int
    num_uses: int


class EvictionPolicy(Protocol):
    """Orders runs of cached pages; the lowest priority is evicted first."""

    def priority(self, run: EvictableRun) -> tuple[int, ...]:
        """Priority of `run`; all tuples of one policy have one length."""
        ...


class LeastRecentlyUsed(EvictionPolicy):
    """The default: the run not used for longest goes first."""

    @override
    def priority(self, run: EvictableRun) -> tuple[int, ...]:
        return (run.last_used,)


class LeastFrequentlyUsed(EvictionPolicy):
    """The run used least often goes first; among equals, the one not used for longest."""

    @override
    def priority(self, run: EvictableRun) -> tuple[int, ...]:
        return (run.num_uses, run.last_used)


class FirstInFirstOut(EvictionPolicy):
    """The oldest run goes first, however often it is used."""

    @override
    def priority(self, run: EvictableRun) -> tuple[int, ...]:
        return (run.created,)


EvictionName = Literal["lru", "lfu", "fifo"]
POLICIES: Final[Mapping[EvictionName, type[EvictionPolicy]]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
}
"""Policies by their names in settings."""
