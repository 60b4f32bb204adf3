"""Which calls of an engine may be under way, so that batches of any length are fed as there is room. Pure.

    enter --waiting--> started --leave--> gone
               ^          `--refuse--.     waits in front of all others: its turn had come
               `---------------------'

Calls count by their requests. The room is what the gateway holds at most; where the mesh has less, because its
schedulers are full or others use it too, its refusals make the room smaller, and calls that end well make it larger
again.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_PAUSE_S = 0.05
"""Before a refused call is tried again if no other one of ours is under way, whose end would make room."""
MAX_PAUSE_S = 1.0
"""What HTTP tells clients in Retry-After."""
_GROWTH = 1 / 8
"""Of the room, for as many requests as fit into it once: few are refused where the mesh stays as full as it is, and
fifty rounds lead from room for three to room for 2,048."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One call, of `size` requests. `refused_since`: when it was refused first, of refusals in a row."""

    size: int
    is_gone: bool = False
    num_refusals: int = 0
    refused_since: float | None = None


class Feeder:
    """All calls of one engine; times are seconds on one clock. `most`: requests that may be under way.

    Every method but `next_deadline` returns the calls whose turn has come.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._room = float(most)
        self.num_requests = 0
        self._started: set[Ticket] = set()
        self._waiting: deque[Ticket] = deque()
        self._not_before = 0.0

    @property
    def room(self) -> int:
        return int(self._room)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, ticket: Ticket, now: float) -> list[Ticket]:
        self._waiting.append(ticket)
        return list(self._start(now))

    def leave(self, ticket: Ticket, now: float, *, went_well: bool) -> list[Ticket]:
        """It has ended, or nobody waits for it any more."""
        ticket.is_gone = True
        if ticket in self._started:
            self._stop(ticket)
        else:
            self._waiting.remove(ticket)
        if went_well:
            self._room = min(self._most, self._room + _GROWTH * ticket.size)
            self._not_before = 0.0
        return list(self._start(now))

    def refuse(self, ticket: Ticket, now: float) -> list[Ticket]:
        """The mesh had no room for it."""
        self._stop(ticket)
        # What is under way fits; it may also be that nothing does, because others fill the mesh.
        self._room = max(1.0, min(self._room, self.num_requests))
        ticket.num_refusals += 1
        ticket.refused_since = now if ticket.refused_since is None else ticket.refused_since
        if not self._started:
            self._not_before = now + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(ticket.num_refusals, 16))
        self._waiting.appendleft(ticket)
        return list(self._start(now))

    def tick(self, now: float) -> list[Ticket]:
        """The deadline has passed."""
        return list(self._start(now))

    def next_deadline(self) -> float | None:
        return self._not_before if self._waiting and not self._started else None

    def _start(self, now: float) -> Iterator[Ticket]:
        while self._waiting and self._fits(self._waiting[0], now):
            ticket = self._waiting.popleft()
            self._started.add(ticket)
            self.num_requests += ticket.size
            yield ticket

    def _fits(self, ticket: Ticket, now: float) -> bool:
        # Alone any call is tried, of whatever size: who refuses it says why.
        return self.num_requests + ticket.size <= self.room if self._started else now >= self._not_before

    def _stop(self, ticket: Ticket) -> None:
        self._started.remove(ticket)
        self.num_requests -= ticket.size
