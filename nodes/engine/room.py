"""Waits for the turn of an engine's calls, as `feeder.py` gives it to them. On the engine's loop alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from mesh.runtime.timers import Clock, DeadlineTimer
from nodes.engine.feeder import Feeder, Ticket
from nodes.gateway.errors import ApiError
from nodes.protocol.attempts import OVER_SHARE

_NO_ROOM: Final = frozenset({"overloaded", "too_many_requests", OVER_SHARE})
"""Codes of refusals because of what else is under way: at a tokenizer, the schedulers, the engine's own gateway."""

Answer = TypeVar("Answer")


class NoRoom(Exception):
    """The mesh has refused a call that is made once."""


class Room:
    """The room of one engine. A call that the mesh refuses for `patience_s` fails with that refusal."""

    def __init__(self, most: int, patience_s: float, clock: Clock) -> None:
        self.feeder = Feeder(most)
        self._patience_s = patience_s
        self._clock = clock
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._timer = DeadlineTimer(
            lambda: clock, self.feeder.next_deadline, lambda now: self._begin(self.feeder.tick(now))
        )

    async def enter(self, size: int) -> Ticket:
        """Wait for the turn of a call of `size` requests, which then has to be `run`."""
        ticket = Ticket(size)
        await self._turn(ticket, lambda: self.feeder.enter(ticket, self._clock.now()))
        return ticket

    async def run(self, ticket: Ticket, attempt: Callable[[], Awaitable[Answer]], *, once: bool = False) -> Answer:
        """What `attempt` returns. It is made again, in its turn, as long as the mesh has no room for it; with `once`
        NoRoom is raised instead.
        """
        went_well = False
        try:
            while True:
                try:
                    answer = await attempt()
                except ApiError as error:
                    if error.code not in _NO_ROOM or self._is_late(ticket):
                        raise
                    if once:
                        self._begin(self.feeder.refuse(ticket, self._clock.now()))
                        raise NoRoom from error
                    await self._turn(ticket, lambda: self.feeder.refuse(ticket, self._clock.now()))
                else:
                    went_well = True
                    return answer
        finally:
            self.leave(ticket, went_well=went_well)

    def leave(self, ticket: Ticket, *, went_well: bool = False) -> None:
        """It is over; calling this again is harmless."""
        if not ticket.is_gone:
            self._begin(self.feeder.leave(ticket, self._clock.now(), went_well=went_well))

    def _is_late(self, ticket: Ticket) -> bool:
        return ticket.refused_since is not None and self._clock.now() - ticket.refused_since >= self._patience_s

    async def _turn(self, ticket: Ticket, event: Callable[[], list[Ticket]]) -> None:
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._begin(event())
        try:
            await turn
        except asyncio.CancelledError:
            self._turns.pop(ticket, None)
            self.leave(ticket)
            raise

    def _begin(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            turn = self._turns.pop(ticket)
            if not turn.done():
                turn.set_result(None)
        self._timer.arm()

    def close(self) -> None:
        self._timer.cancel()
