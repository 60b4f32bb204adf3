"""While the worker is dead: gateways are told for how long, so that what is here may go on elsewhere sooner.

    PeerDown of the adopted worker   told to every gateway: back in as long as its start took, and who is suspected
    not back by then                 told again, with the time that it has been away: 1, 2, 4, 8 … times the first
    adopted again                    over

Every gateway, not only those with attempts here: one that was given a route to this group a moment ago submits next.
Nothing is given up here meanwhile: attempts that nobody moves go on when the worker is back, as ever.

A gateway has an attempt cancelled before it moves it. If the worker is back by then and computes it, that is not
acknowledged until the step is answered, or the worker is dead and its death was told: who takes the request next knows
of every worker that died of it. Pure; owned by the core.
"""

import math
from collections.abc import Mapping
from typing import Final

from nodes.protocol import Suspected, WorkerAway
from nodes.request import AttemptRef
from nodes.roles import GATEWAY
from nodes.scheduler.books import Books
from nodes.scheduler.events import ReadyPeer
from nodes.scheduler.worker_link.pipeline import Pipeline

AWAY: Final = "worker_away"
LATE_CANCELS_S: Final = 5.0
"""How long after the time that gateways were told, in which they move requests, a cancel for that may still come: it
may be lost, and is asked for again after at most 2.5 s."""


class WorkerAbsence:
    """Tells gateways that the worker is away."""

    def __init__(self, books: Books, pipeline: Pipeline) -> None:
        self._books = books
        self._pipeline = pipeline
        self._gateways: set[str] = set()
        self._since: float | None = None
        self._moves_until = 0.0

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

    def may_die_of(self, cancelled: list[AttemptRef], now: float) -> set[AttemptRef]:
        """Those of these attempts that the worker computes, while a gateway may be about to move them."""
        # Of a dead worker's steps those with a cancelled row are not sent again.
        if now > self._moves_until or self._since is not None:
            return set()
        return {AttemptRef(one.request_id, one.attempt) for one in self._pipeline.unanswered()} & set(cancelled)

    def _tell(self, returns_in_s: float, now: float) -> None:
        suspects: dict[str, list[Suspected]] = {}
        for sequence in self._pipeline.unanswered():
            # Prefills for other schedulers have no attempt here; theirs are tried again by those.
            # One that has ended may have been cancelled to move.
            if not sequence.order_id:
                suspects.setdefault(sequence.gateway.actor_id, []).append(sequence.suspected())
        # It is a number off the wire, and 0 if the worker has none: then attempts wait here, which is right anyway. Who
        # was computed is said all the same, for one of them may be about to move since an earlier death.
        is_known = math.isfinite(returns_in_s) and returns_in_s > 0
        returns_in_s = returns_in_s if is_known else 0.0
        told = self._gateways | {one.gateway.actor_id for one in self._books.attempts} if is_known else set[str]()
        for gateway in sorted(told | suspects.keys()):
            away = WorkerAway(returns_in_s=returns_in_s, suspects=suspects.get(gateway, []))
            self._books.outbox.tell(gateway, away)
        if is_known:
            self._books.deadlines.set((AWAY, ""), now + returns_in_s)
            self._moves_until = now + returns_in_s + LATE_CANCELS_S
