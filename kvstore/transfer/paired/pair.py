"""A pair of agents that move bytes, as one end sees it: a state machine in which every transfer ends.

    IDLE          nothing begun
    INITIALISING  both ends connect (a communicator of NCCL, connections of TCP); transfers wait
    READY         transfers run one after another, in the order in which both ends queue them
    ABORTING      something failed or took too long; the engine is ending what may still write
    ABORTED       nothing writes; transfers are refused, and more transfers need another pair

Sends and receives of two ranks are matched by their order alone, so nothing can be taken out of the middle: a transfer
that has begun is waited for even if it is cancelled, and one that does not end in time takes the pair with it.
Transfers that have not begun end at once. An end is reported when nothing can still write: for a running transfer of an
aborted pair, that is when the engine has reported that it has stopped.

At the receiving end a transfer has two halves, the bytes and the sender's report that they were the announced ones
before and after; at the sending end only the bytes. Pure; owned by `transport.py`.
"""

import enum
from collections import deque
from typing import Final, NamedTuple

from kvstore.errors import PairUnmade, TransferError

PAIR_ABORTED: Final = "pair_aborted"


class PairPhase(enum.Enum):
    """State of a pair."""

    IDLE = "idle"
    INITIALISING = "initialising"
    READY = "ready"
    ABORTING = "aborting"
    ABORTED = "aborted"


class Initialise(NamedTuple):
    """Connect to the other end; `initialised` or `fail` follows."""


class Run(NamedTuple):
    """Give the transfer's sends or receives to the engine; `moved` follows."""

    number: int


class Abort(NamedTuple):
    """End all that the engine does for this pair; `stopped` follows."""


class Finished(NamedTuple):
    """The transfer is over and writes nothing more; `error` None: its bytes are there and are the right ones."""

    number: int
    error: TransferError | None


Command = Initialise | Run | Abort | Finished


class _Transfer:
    __slots__ = ("deadline", "error", "is_moved", "is_source_verified", "number")

    def __init__(self, number: int, deadline: float, *, is_source_verified: bool) -> None:
        self.number = number
        self.deadline = deadline
        self.is_moved = False
        self.is_source_verified = is_source_verified
        self.error: TransferError | None = None


class Pair:
    """See the module. `is_receiver`: transfers also need the sender's report. All methods return commands."""

    def __init__(self, *, is_receiver: bool) -> None:
        self.phase = PairPhase.IDLE
        self._is_receiver = is_receiver
        self._deadline = 0.0
        self._reason = TransferError(PAIR_ABORTED, "the pair was never initialised")
        self._current: _Transfer | None = None
        self._waiting: deque[_Transfer] = deque()

    @property
    def is_over(self) -> bool:
        return self.phase in (PairPhase.ABORTING, PairPhase.ABORTED)

    @property
    def is_busy(self) -> bool:
        changing = self.phase in (PairPhase.INITIALISING, PairPhase.ABORTING)
        return changing or self._current is not None or bool(self._waiting)

    def start(self, deadline: float) -> list[Command]:
        if self.phase is not PairPhase.IDLE:
            return []
        self.phase, self._deadline = PairPhase.INITIALISING, deadline
        return [Initialise()]

    def initialised(self) -> list[Command]:
        if self.phase is not PairPhase.INITIALISING:
            return []
        self.phase = PairPhase.READY
        return self._next()

    def queue(self, number: int, deadline: float) -> list[Command]:
        if self.is_over:
            return [Finished(number, self._reason)]
        self._waiting.append(_Transfer(number, deadline, is_source_verified=not self._is_receiver))
        return self._next()

    def moved(self, number: int) -> list[Command]:
        current = self._current
        if current is None or current.number != number:
            return []
        current.is_moved = True
        return self._finish_current()

    def source_verified(self, number: int, error: TransferError | None, *, is_sent: bool) -> list[Command]:
        """The sender's report on a transfer. Bytes that it did not send would never come: the pair is aborted."""
        current = self._current
        # While aborting only `stopped` ends the running transfer: a thread may still be writing its pages.
        if current is None or current.number != number or self.is_over:
            return []
        current.is_source_verified = True
        if error is not None and current.error is None:
            current.error = error
        # Our receives were posted already, and nothing but an abort takes them back.
        if not is_sent:
            return self.fail(f"the other end sent nothing: {error.message if error else 'no reason given'}")
        return self._finish_current()

    def cancel(self, number: int, error: TransferError) -> list[Command]:
        """End a transfer early: at once if it has not begun, otherwise when it has ended."""
        # It keeps its place: sends and receives are matched by order, so the next transfer would take its bytes.
        if self._current is not None and self._current.number == number:
            if self._current.error is None:
                self._current.error = error
            return []
        if not any(transfer.number == number for transfer in self._waiting):
            return []
        self._waiting = deque(transfer for transfer in self._waiting if transfer.number != number)
        return [Finished(number, error)]

    def tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        # Waiting transfers end alone: nothing was posted for them, so the pair stays in order.
        for late in [transfer for transfer in self._waiting if now >= transfer.deadline]:
            self._waiting.remove(late)
            commands.append(
                Finished(late.number, TransferError("deadline_exceeded", "the pair was busy until the deadline"))
            )
        if self.phase is PairPhase.INITIALISING and now >= self._deadline:
            return commands + self.fail("the two ends did not connect in time", "deadline_exceeded")
        if not self.is_over and self._current is not None and now >= self._current.deadline:
            return commands + self.fail("a transfer did not end in time", "deadline_exceeded")
        return commands

    def fail(self, why: str, code: str = PAIR_ABORTED) -> list[Command]:
        """Waiting transfers end now, the running one when the engine has stopped; PairUnmade if not connected yet."""
        if self.is_over:
            return []
        was_idle = self.phase is PairPhase.IDLE
        # The class tells `selection.py` whether the next choice may be tried: only if nothing was moved.
        self._reason = (TransferError if self.phase is PairPhase.READY else PairUnmade)(code, why)
        self.phase = PairPhase.ABORTED if was_idle else PairPhase.ABORTING
        commands: list[Command] = [] if was_idle else [Abort()]
        commands += [Finished(transfer.number, self._reason) for transfer in self._waiting]
        self._waiting.clear()
        return commands

    def stopped(self) -> list[Command]:
        if self.phase is not PairPhase.ABORTING:
            return []
        self.phase = PairPhase.ABORTED
        current, self._current = self._current, None
        return [Finished(current.number, current.error or self._reason)] if current is not None else []

    def _finish_current(self) -> list[Command]:
        current = self._current
        # Both are needed: the bytes do not show whether their page was reused while it was sent.
        if current is None or self.is_over or not (current.is_moved and current.is_source_verified):
            return []
        self._current = None
        return [Finished(current.number, current.error), *self._next()]

    def _next(self) -> list[Command]:
        # One at a time: both ends see the same order, however their messages are delayed.
        if self.phase is not PairPhase.READY or self._current is not None or not self._waiting:
            return []
        self._current = self._waiting.popleft()
        return [Run(self._current.number)]
