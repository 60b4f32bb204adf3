"""Asking until somebody answers: what an actor does at its start, when whom it stands on may not be there yet."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from mesh.actor import Context
from mesh.errors import CallError
from mesh.wire.codec import AnyMessage

_PATIENCE_S: Final = 2.0
_MAX_TOLD: Final = 16


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
        """The reply's message; `what` says in the log what is waited for, once for each reason, if it takes seconds.
        Raises CallErrors that are not retryable.

        `refused` hears of every failure that is followed by another try.
        """
        began = ctx.now()
        told: set[str] = set()
        while True:
            self._members_changed.clear()
            try:
                return (await ctx.ask(actor_id, message, timeout_s=timeout_s)).message
            except CallError as error:
                if not error.retryable:
                    raise
                why = str(error)
                # While a mesh starts everybody waits a moment for somebody, which is no news, nor is it again.
                if ctx.now() - began >= _PATIENCE_S and why not in told and len(told) < _MAX_TOLD:
                    told.add(why)
                    ctx.log.info("waiting", what=what, peer=actor_id, why=why)
                if refused is not None:
                    refused(error)
            # The usual reason is that the view of the mesh is not here yet, or that the peer has just died too.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._members_changed.wait()
