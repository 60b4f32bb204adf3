"""Foreign pools that this agent reads from: which are mapped, which are requested, and which grants wait.

Pure; part of the kv_agent's core. A mapping is used as long as announcements name its incarnation; after one that names
another, the agent asks for the pool again.
"""

from typing import NamedTuple

from nodes.kv_agent.events import SourceId


class SourceFacts(NamedTuple):
    """What the header of a mapped pool says."""

    incarnation: int
    layout_digest: bytes


class Sources:
    """Mapped and awaited source pools. `own` are the agent's own pools; the caller keeps it up to date."""

    def __init__(self, actor_id: str, own: dict[SourceId, SourceFacts]) -> None:
        self._actor_id = actor_id
        self._own = own
        self._mapped: dict[SourceId, SourceFacts] = {}
        self._waiting: dict[SourceId, list[str]] = {}

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def want(self, source: SourceId, incarnation: int, grant_id: str) -> SourceFacts | None:
        """The facts of a source, if it is mapped in this incarnation; otherwise None, and the grant waits for it.

        An own pool is used as it is; no grant waits for one that was released.
        """
        facts = self._own.get(source)
        if facts is not None:
            return facts
        facts = self._mapped.get(source)
        if facts is not None and facts.incarnation == incarnation:
            return facts
        if source.agent == self._actor_id:
            return None
        self._waiting.setdefault(source, []).append(grant_id)
        return None

    def must_ask(self, source: SourceId) -> bool:
        """Whether the waiting grant is the first, so that the agent must ask for the pool."""
        return len(self._waiting.get(source, ())) == 1

    def mapped(self, source: SourceId, facts: SourceFacts) -> list[str]:
        """A pool was mapped; returns the grants that waited."""
        self._mapped[source] = facts
        return self._waiting.pop(source, [])

    def refused(self, source: SourceId) -> list[str]:
        """A pool could not be mapped; returns the grants that waited."""
        return self._waiting.pop(source, [])

    def agent_gone(self, agent: str) -> list[SourceId]:
        """Forget an agent's pools; returns the mappings to give up. Waiting grants get the outcome of the ask."""
        gone = [source for source in self._mapped if source.agent == agent]
        for source in gone:
            del self._mapped[source]
        return gone

    def gone(self, source: SourceId) -> list[SourceId]:
        """Forget one pool; returns the mapping to give up, if there is one."""
        return [source] if self._mapped.pop(source, None) is not None else []
