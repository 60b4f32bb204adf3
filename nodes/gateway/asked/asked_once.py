"""What a gateway has from a tokenizer, since the model's files may be on other hosts only: asked for when a call first
needs it, and kept.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from mesh.actor import Answer

_Known = TypeVar("_Known")


class AskedOnce(Generic[_Known]):
    """Asks once for all calls that wait; if that fails, the next call asks again. `read` raises if it is no answer."""

    def __init__(self, ask: Callable[[], Awaitable[Answer]], read: Callable[[Answer], _Known]) -> None:
        self._ask = ask
        self._read = read
        self._known: _Known | None = None
        self._asking: asyncio.Task[_Known] | None = None

    async def get(self) -> _Known:
        """Raises `ApiError` as `ask` does."""
        if self._known is not None:
            return self._known
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._fetch())
            self._asking.add_done_callback(self._asked)
        # A client that leaves takes the answer from nobody else.
        return await asyncio.shield(self._asking)

    async def _fetch(self) -> _Known:
        self._known = self._read(await self._ask())
        return self._known

    def _asked(self, task: "asyncio.Task[_Known]") -> None:
        self._asking = None
        if not task.cancelled():
            # Looked at, or asyncio would complain of it if all who waited have left.
            task.exception()
