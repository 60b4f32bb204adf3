"""A worker that an operator has drained: it comes back on the operator's order, not by an automatic restart.

So the scheduler does not wait for it as for one that died. New work is refused (`draining`: submit elsewhere), prefills
ordered by other schedulers fail at once, so that those prefill themselves, and attempts that run here fail back to
their gateways: at once if the worker's supervisor says that it stays down, else after `drained_wait_s`, by when a
worker that is only being restarted is back. Pure; owned by the core.
"""

from typing import Final

from nodes.scheduler.books import Books
from nodes.scheduler.events import MembersChanged
from nodes.scheduler.finish.endings import Endings
from nodes.scheduler.handoff.prefill import PrefillHandoffQueue

DRAINED: Final = "worker_drained"
DRAINING: Final = "draining"


class WorkerDrain:
    """Which of the group's workers were drained and are not back."""

    def __init__(self, books: Books, orders: PrefillHandoffQueue, endings: Endings) -> None:
        self._books = books
        self._orders = orders
        self._endings = endings
        self._drained: set[str] = set()
        self._stays_away = False

    @property
    def is_drained(self) -> bool:
        """Nothing can be computed here until an operator starts the worker again."""
        return bool(self._drained)

    def on_members(self, event: MembersChanged, now: float) -> None:
        was_drained, stayed_away = self.is_drained, self._stays_away
        self._stays_away = False
        for worker in self._books.config.ranks:
            peer = event.ready.get(worker)
            # A later incarnation may be known before its supervisor announces that it was started.
            if worker in event.drained and (peer is None or peer.epoch <= event.drained[worker]):
                self._drained.add(worker)
                self._stays_away = True
            elif worker in event.draining:
                self._drained.add(worker)
            elif peer is not None:
                self._drained.discard(worker)
        # A supervisor says that it stays down: waiting out `drained_wait_s` gains nothing.
        if self._stays_away and not stayed_away:
            self._books.deadlines.clear((DRAINED, ""))
            self.on_due(now)
        elif self.is_drained and not was_drained:
            self._books.deadlines.set((DRAINED, ""), now + self._books.config.drained_wait_s)
            # At once even if the worker is only being restarted: the scheduler that ordered is waiting for this, and
            # has the prompt to compute it itself.
            for grant_id in self._orders.running():
                self._orders.fail(grant_id, DRAINING, self._message(), now)
        elif was_drained and not self.is_drained:
            self._books.deadlines.clear((DRAINED, ""))

    def on_due(self, now: float) -> None:
        """The worker stays down, or was not back in time."""
        self._endings.abort_all(DRAINING, self._message(), now)

    def _message(self) -> str:
        return f"{', '.join(sorted(self._drained))} was drained; `meshctl restart` brings it back"
