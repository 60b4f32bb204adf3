"""While the worker is dead: gateways are told for how long, so that what is here may go on elsewhere sooner.

    PeerDown of the adopted worker   told to every gateway: back in as long as its start took, and who is suspected
    not back by then                 told again, with the time that it has been away: 1, 2, 4, 8 … times the first
    adopted again                    over

Every gateway, not only those with attempts here: one that was given a route to this group a moment ago submits next.
Nothing is given up here meanwhile: attempts that nobody moves go on when the worker is back, as ever. Pure; owned by
the core.
"""

import math
from collections.abc import Mapping
from typing import Final

from nodes.protocol import Suspected, WorkerAway
from nodes.roles import GATEWAY
from nodes.scheduler.books import Books
from nodes.scheduler.events import ReadyPeer
from nodes.scheduler.sequence import Stage
from nodes.scheduler.worker_link.pipeline import Pipeline

AWAY: Final = "worker_away"


class WorkerAbsence:
    """Tells gateways that the worker is away."""

    def __init__(self, books: Books, pipeline: Pipeline) -> None:
        self._books = books
        self._pipeline = pipeline
        self._gateways: set[str] = set()
        self._since: float | None = None

    def on_members(self, ready: Mapping[str, ReadyPeer]) -> None:
        self._gateways = {actor_id for actor_id, peer in ready.items() if peer.role == GATEWAY}

    def on_died(self, now: float) -> None:
        """The adopted worker is dead."""
        # Of a group of ranks all die when one does; what is told is the same for all.
        if self._since is None:
            self._since = now
            worker = self._books.worker
            self._tell(0.0 if worker is None else worker.start_s, now)

    def on_due(self, now: float) -> None:
        """It should be back. Perhaps it dies whenever it starts: then its supervisor pauses longer and longer."""
        assert self._since is not None, "what is due was cleared when it came back"
        self._tell(now - self._since, now)

    def over(self) -> None:
        """A worker is adopted."""
        self._since = None
        self._books.deadlines.clear((AWAY, ""))

    def _tell(self, returns_in_s: float, now: float) -> None:
        # It is a number off the wire, and 0 if the worker has none: then attempts wait here, which is right anyway.
        if not (math.isfinite(returns_in_s) and returns_in_s > 0):
            return
        suspects: dict[str, list[Suspected]] = {}
        for sequence in self._pipeline.unanswered():
            # Prefills for other schedulers have no attempt here; theirs are tried again by those.
            if sequence.stage is not Stage.ENDED and not sequence.order_id:
                suspects.setdefault(sequence.gateway.actor_id, []).append(sequence.suspected())
        for gateway in sorted(self._gateways | {one.gateway.actor_id for one in self._books.attempts}):
            away = WorkerAway(returns_in_s=returns_in_s, suspects=suspects.get(gateway, []))
            self._books.outbox.tell(gateway, away)
        self._books.deadlines.set((AWAY, ""), now + returns_in_s)
