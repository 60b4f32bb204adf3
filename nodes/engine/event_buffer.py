"""What a stream has brought and nobody has read. On the engine's loop alone; readers take all there is."""

import asyncio
from typing import Any, Final

_MOST_EVENTS: Final = 64
"""Unread ones of a stream. Each event of `/generate` has all its text so far; what comes beyond is kept as it grows,
and read as one event."""


class EventBuffer:
    """Between the calls of one stream, of which there may be many, and its reader."""

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._is_over = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def has_room(self) -> bool:
        return self._has_room.is_set()

    def put(self, event: Any) -> None:
        self._events.append(event)
        self._news.set()
        if len(self._events) >= _MOST_EVENTS:
            self._has_room.clear()

    async def room(self) -> None:
        await self._has_room.wait()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes; what is there is read before the error is raised."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._news.set()

    async def take(self) -> list[Any]:
        """All events that are there, at least one; empty at the end. Raises what the stream ended with."""
        await self._news.wait()
        events, self._events = self._events, []
        self._has_room.set()
        if not self._is_over:
            self._news.clear()
        elif not events and self._error is not None:
            raise self._error
        return events
