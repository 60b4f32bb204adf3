"""Asks repeated until answered: by one actor that may not be there yet, or by any actor of a role."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from mesh.calls.asking import Answer
from mesh.context import Context
from mesh.errors import NOT_SERVED, CallError, RemoteError
from mesh.wire.codec import AnyMessage

_PATIENCE_S: Final = 2.0
"""An echo mesh is ready after 1.5 s (docs/benchmarks.md): with less, each ordinary start would log waiting actors."""
_MAX_LOGGED: Final = 16
"""Reasons may hold counts or addresses and differ each time: an ask that goes on for days adds 16 lines to the log."""
ROLE_RETRY_S: Final = 0.2
"""Less than a heartbeat of 0.5 s, so that it adds little to a recovery; even 1,000 waiting asks are 5,000 a second."""


class PersistentAsk:
    """Repeats an ask after a retryable failure, once `members_changed` was called or `retry_s` seconds have passed."""

    def __init__(self, retry_s: float = ROLE_RETRY_S) -> None:
        self._retry_s = retry_s
        self._changed = asyncio.Event()
        self._turn = 0

    def members_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

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
        """The reply's message. If this takes seconds, `what` is logged as being waited for, once for each reason.

        `refused` is called with every retryable failure. Raises the CallErrors that are not retryable.
        """
        began = ctx.now()
        logged: set[str] = set()

        def note(error: CallError) -> None:
            why = str(error)
            # While a mesh starts, every actor waits a moment for another: not worth a line, nor is a repeated reason.
            if ctx.now() - began >= _PATIENCE_S and why not in logged and len(logged) < _MAX_LOGGED:
                logged.add(why)
                ctx.log.info("waiting", what=what, peer=actor_id, why=why)
            if refused is not None:
                refused(error)

        while True:
            # Taken before asking: usually an ask fails because the view is not here yet or the peer has just died too.
            changed = self._changed
            try:
                return (await ctx.ask(actor_id, message, timeout_s=timeout_s)).message
            except CallError as error:
                if not error.retryable:
                    raise
                note(error)
            await _wait(changed, self._retry_s)

    async def ask_any(
        self, ctx: Context, role: str, message: AnyMessage, *, timeout_s: float, patience_s: float
    ) -> Answer:
        """The reply of the first of a role's ready actors that answers; they are asked in turn, `timeout_s` each.

        One that knows the ask but does not serve it (`not_served`, such as somebody's own actor of that role) is
        skipped, like one that fails: it is an error only if all of them say so. One that does not know the message, as
        an older release may not, refuses it with `bad_body`, which is final. `patience_s` is how long to keep trying
        while none is ready or all fail; 0: one round. Raises CallError: a final refusal, or no answer; `no_ROLE` if
        none was ready.
        """
        give_up_at = ctx.now() + patience_s
        while True:
            changed = self._changed
            ready = [member.actor_id for member in ctx.members.by_role(role)]
            self._turn += 1
            first = self._turn % len(ready) if ready else 0
            try:
                if ready:
                    return await _ask_one_of((*ready[first:], *ready[:first]), ctx, message, timeout_s)
                failure: CallError = RemoteError(f"no_{role}", f"no {role} is ready", retryable=True)
            except CallError as error:
                failure = error
            remaining_s = give_up_at - ctx.now()
            if remaining_s <= 0 or not failure.retryable:
                raise failure
            await _wait(changed, min(remaining_s, self._retry_s) if ready else remaining_s)


async def _ask_one_of(actor_ids: Iterable[str], ctx: Context, message: AnyMessage, timeout_s: float) -> Answer:
    """The first answer. Raises a final refusal at once, or the most informative failure if all fail."""
    failure: CallError | None = None
    for actor_id in actor_ids:
        try:
            return await ctx.ask(actor_id, message, timeout_s=timeout_s)
        except CallError as error:
            if not error.retryable and error.code != NOT_SERVED:
                raise
            # Of two failures, the retryable one is more informative.
            if failure is None or error.retryable:
                failure = error
    assert failure is not None, "no actor was asked"
    raise failure


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await changed.wait()
