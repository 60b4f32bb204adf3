"""Cancels that a scheduler has not acknowledged yet.

A cancel is an ask, repeated until it is acknowledged, the scheduler is gone, or its time is over. What a scheduler
holds for us is freed by our cancel, when it notices that we are gone, or by its death. Owned by the gateway's core;
pure.
"""

from collections.abc import Callable

from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
from nodes.gateway.requests.events import SendCancel
from nodes.request import AttemptRef

RETRY = "retry_cancels"
RETRY_S = 0.5
"""A heartbeat: a scheduler that has died is known to be gone after three, so few asks are made in vain."""
COMPANY_S = 0.05
"""How long a cancel that frees nothing but a note of what has ended waits for others. A scheduler keeps such a note for
10 s without one; at 64 clients some 20 of them then share one ask, of two messages and six wakes."""
MAX_PER_MESSAGE = 1024
"""About 50 KB, far below the limit of a body (16 MiB); two messages cancel all requests that a gateway may hold."""


class CancelLedger:
    """Pending cancels by scheduler: asked again `RETRY_S` after a failed ask, and given up after `give_up_s`.

    `send` is called with what is to be asked now: fresh cancels by `flush`, those whose pause is over by `retry`.
    """

    def __init__(self, deadlines: Deadlines, send: Callable[[SendCancel], None], *, give_up_s: float) -> None:
        self._give_up_s = give_up_s
        self._send = send
        self._pending = Retrier[tuple[str, str], AttemptRef](deadlines, RETRY, self._ask)
        self.flush = self._pending.flush
        self.retry = self._pending.retry
        self.lost = self._pending.lost

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, scheduler: str, request_id: str, attempt: int, now: float, *, has_ended: bool = False) -> None:
        """Have `attempt` and older ones cancelled; nothing happens if that is under way already.

        `has_ended`: the scheduler ended it itself, so that the cancel only says that all of it came.
        """
        key = (scheduler, request_id)
        known = self._pending.get(key)
        # One entry for a request: cancelling an attempt cancels those before it.
        if known is None or known.attempt < attempt:
            ref = AttemptRef(request_id, attempt)
            self._pending.add(
                key,
                scheduler,
                ref,
                retry_s=RETRY_S,
                give_up_at=now + self._give_up_s,
                patient_until=now + COMPANY_S if has_ended else None,
            )

    def acknowledged(self, scheduler: str, attempts: list[AttemptRef]) -> None:
        for ref in attempts:
            key = (scheduler, ref.request_id)
            known = self._pending.get(key)
            # An answer for an older attempt does not settle the cancel of a newer one.
            if known is not None and known.attempt <= ref.attempt:
                self._pending.answered(key)

    def failed(self, scheduler: str, now: float) -> None:
        """An ask brought no answer; all cancels pending at this scheduler are sent again after a pause."""
        self._pending.failed(self._pending.keys_of(scheduler), now)

    def _ask(self, scheduler: str, refs: list[AttemptRef]) -> None:
        for start in range(0, len(refs), MAX_PER_MESSAGE):
            self._send(SendCancel(scheduler, refs[start : start + MAX_PER_MESSAGE]))
