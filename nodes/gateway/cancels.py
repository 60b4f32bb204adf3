"""Cancels that a scheduler has not acknowledged yet.

A cancel is an ask, repeated until it is acknowledged or until the scheduler is gone: what it holds for us is freed by
us, by its own notice that we are gone, or by its death, never by hope. Owned by the gateway's core; pure.
"""

from nodes.gateway.events import SendCancel
from nodes.request import AttemptRef

MAX_PENDING = 65536
MAX_PER_MESSAGE = 1024


class CancelLedger:
    """Pending cancels by scheduler: asked again `retry_s` after a failed ask, and given up after `give_up_s`."""

    def __init__(self, *, retry_s: float, give_up_s: float) -> None:
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._pending: dict[str, dict[str, tuple[int, float]]] = {}
        self._fresh: dict[str, list[AttemptRef]] = {}
        self._retry_at: dict[str, float] = {}
        self._num_pending = 0

    def __len__(self) -> int:
        return self._num_pending

    def add(self, scheduler: str, request_id: str, attempt: int, now: float) -> None:
        """Have `attempt` and older ones cancelled; nothing happens if that is under way already."""
        pending = self._pending.setdefault(scheduler, {})
        known = pending.get(request_id)
        if known is not None and known[0] >= attempt:
            return
        if known is None:
            if self._num_pending >= MAX_PENDING:
                return
            self._num_pending += 1
        pending[request_id] = (attempt, now + self._give_up_s)
        self._fresh.setdefault(scheduler, []).append(AttemptRef(request_id, attempt))

    def acknowledged(self, scheduler: str, attempts: list[AttemptRef]) -> None:
        """The scheduler answered for these."""
        pending = self._pending.get(scheduler, {})
        for ref in attempts:
            known = pending.get(ref.request_id)
            if known is not None and known[0] <= ref.attempt:
                del pending[ref.request_id]
                self._num_pending -= 1

    def failed(self, scheduler: str, now: float) -> None:
        """An ask brought no answer; all that is pending there is sent again in a while."""
        self._retry_at.setdefault(scheduler, now + self._retry_s)

    def lost(self, scheduler: str) -> None:
        """The scheduler is gone, and what it held with it."""
        self._num_pending -= len(self._pending.pop(scheduler, {}))
        self._fresh.pop(scheduler, None)
        self._retry_at.pop(scheduler, None)

    def take(self, now: float) -> list[SendCancel]:
        """What is to be sent now: new cancels, and those whose retry is due."""
        due = {scheduler: refs for scheduler, refs in self._fresh.items() if refs}
        self._fresh = {}
        for scheduler, at in list(self._retry_at.items()):
            if at <= now:
                del self._retry_at[scheduler]
                due[scheduler] = self._unexpired(scheduler, now)
        return [
            SendCancel(scheduler, refs[start : start + MAX_PER_MESSAGE])
            for scheduler, refs in due.items()
            for start in range(0, len(refs), MAX_PER_MESSAGE)
        ]

    def _unexpired(self, scheduler: str, now: float) -> list[AttemptRef]:
        pending = self._pending.get(scheduler, {})
        for request_id in [request_id for request_id, (_, give_up_at) in pending.items() if give_up_at <= now]:
            del pending[request_id]
            self._num_pending -= 1
        return [AttemptRef(request_id, attempt) for request_id, (attempt, _) in pending.items()]
