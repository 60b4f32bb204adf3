"""Attempts held here: the newest of each request, and finished ones as long as their tokens may still be requested.

A finished attempt keeps its token ids until the gateway cancels it (it has everything), the gateway is lost, or a lease
passes without a `Resend`. What was cancelled, superseded or forgotten is remembered by number, so that a repeated or
late `Submit` cannot start it again. Both are bounded: the oldest goes first. Pure; owned by the core.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterator

from mesh.address import Address
from mesh.runtime.deadlines import Deadlines
from nodes.protocol import Submit
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.sequence import Sequence

FINISHED = "finished"
MAX_REMEMBERED = 16384
"""About 2 MB. Eight times `max_waiting`: a repeat is under way for seconds, and 16,384 requests do not end in these."""


class Standing(enum.IntEnum):
    """How a submitted attempt relates to what is known of its request."""

    NEW = 0
    KNOWN = 1
    OVER = 2


class Attempts:
    """Attempts by request id."""

    def __init__(self, config: SchedulerConfig, deadlines: Deadlines) -> None:
        self._config = config
        self._deadlines = deadlines
        self._sequences: dict[str, Sequence] = {}
        self._by_row: dict[int, Sequence] = {}
        self._finished: OrderedDict[str, Sequence] = OrderedDict()
        self._over: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences.values()))

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def standing(self, submit: Submit) -> Standing:
        held = self._sequences.get(submit.request_id)
        if held is not None and held.attempt == submit.attempt:
            return Standing.KNOWN
        if held is not None and held.attempt > submit.attempt:
            return Standing.OVER
        return Standing.OVER if self._over.get(submit.request_id, -1) >= submit.attempt else Standing.NEW

    def add(self, sequence: Sequence) -> None:
        """Hold a new attempt; an older one must be forgotten before."""
        self._sequences[sequence.request_id] = sequence
        self._by_row[sequence.row_id] = sequence

    def find(self, request_id: str, attempt: int) -> Sequence | None:
        sequence = self._sequences.get(request_id)
        return sequence if sequence is not None and sequence.attempt == attempt else None

    def up_to(self, request_id: str, attempt: int) -> Sequence | None:
        """This attempt or an older one."""
        sequence = self._sequences.get(request_id)
        return sequence if sequence is not None and sequence.attempt <= attempt else None

    def by_stream(self, stream: int) -> Sequence | None:
        return self._by_row.get(stream)

    def of_gateway(self, gateway: Address) -> list[Sequence]:
        """Everything that this incarnation of a gateway, or one before it, submitted."""
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.gateway.actor_id == gateway.actor_id and sequence.gateway.epoch <= gateway.epoch
        ]

    def finish(self, sequence: Sequence, now: float) -> list[Sequence]:
        """Keep an ended attempt. Returns those to forget because too many are kept."""
        self._finished[sequence.request_id] = sequence
        self._deadlines.set((FINISHED, sequence.request_id), now + self._config.lease_s)
        excess = len(self._finished) - self._config.max_finished
        return [kept for kept, _ in zip(self._finished.values(), range(excess), strict=False)] if excess > 0 else []

    def renew(self, sequence: Sequence, now: float) -> None:
        if sequence.request_id in self._finished:
            self._deadlines.set((FINISHED, sequence.request_id), now + self._config.lease_s)

    def on_finished_due(self, request_id: str) -> Sequence:
        """A lease has passed without a `Resend`: nobody wants it any more."""
        return self._finished[request_id]

    def forget(self, sequence: Sequence) -> None:
        self._sequences.pop(sequence.request_id, None)
        self._by_row.pop(sequence.row_id, None)
        self._finished.pop(sequence.request_id, None)
        self._deadlines.clear((FINISHED, sequence.request_id))
        self.remember(sequence.request_id, sequence.attempt)

    def remember(self, request_id: str, attempt: int) -> None:
        """This attempt and older ones must not start (again)."""
        self._over[request_id] = max(attempt, self._over.get(request_id, -1))
        # The least recently ended one is forgotten first: a repeat of it is the least likely to be still under way.
        self._over.move_to_end(request_id)
        if len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
