"""Asking until somebody answers: what an actor does at its start, when whom it stands on may not be there yet."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from mesh.actor import AnyMessage, Context
from mesh.errors import CallError


class PersistentAsk:
    """Asks again after each failure that another try can cure, as soon as the members change or `retry_s` have passed.

    The actor owns it, and calls `members_changed` from its `on_members`.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._members_changed = asyncio.Event()

    def members_changed(self) -> None:
        """Somebody came, left or changed state."""
        self._members_changed.set()

    async def ask(
        self,
        ctx: Context,
        actor_id: str,
        message: AnyMessage,
        *,
        timeout_s: float,
        what: str,
        refused: Callable[[CallError], None] | None = None,
    ) -> Any:
        """The reply's message; `what` says in the log what is waited for. Raises CallErrors that are not retryable.

        `refused` hears of every failure that is followed by another try.
        """
        while True:
            self._members_changed.clear()
            try:
                return (await ctx.ask(actor_id, message, timeout_s=timeout_s)).message
            except CallError as error:
                if not error.retryable:
                    raise
                ctx.log.info("waiting", what=what, peer=actor_id, why=str(error))
                if refused is not None:
                    refused(error)
            # The usual reason is that the view of the mesh is not here yet, or that the peer has just died too.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._members_changed.wait()
