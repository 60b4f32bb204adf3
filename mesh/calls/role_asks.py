"""Asking any actor of a role: they are alike, so what one cannot answer another may."""

import asyncio
from typing import Any, Final

from mesh.actor import Context
from mesh.errors import NOT_SERVED, CallError, RemoteError
from mesh.wire.codec import AnyMessage

RETRY_PAUSE_S: Final = 0.2


class RoleAsks:
    """Spreads asks over the ready actors of one role and passes over those that fail.

    One that does not serve a question (`not_served`: an older one, or somebody's own) is passed over too: that is an
    error only when all have said so.
    """

    def __init__(self, ctx: Context, role: str) -> None:
        self._ctx = ctx
        self._role = role
        self._turn = 0
        self._changed = asyncio.Event()

    def members_changed(self) -> None:
        """Somebody came, left or changed state: whoever waits for an actor of the role looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def ask(self, message: AnyMessage, *, timeout_s: float, patience_s: float) -> Any:
        """The answer's message.

        Args:
            message: a question that actors of the role answer.
            timeout_s: what each of them is given.
            patience_s: for how long to go round again, where nobody is ready or all failed; 0 is one round.

        Raises:
            CallError: refused for good, or nobody answered; `no_ROLE` where nobody was there to ask.
        """
        give_up_at = self._ctx.now() + patience_s
        failure: CallError = RemoteError(f"no_{self._role}", f"no {self._role} is ready", retryable=True)
        failed: set[str] = set()
        while True:
            actor_id = self._choose(failed)
            if actor_id is not None:
                try:
                    return (await self._ctx.ask(actor_id, message, timeout_s=timeout_s)).message
                except CallError as error:
                    if not error.retryable and error.code != NOT_SERVED:
                        raise
                    # Of two failures the one that another try may cure says more.
                    if error.retryable or not failed:
                        failure = error
                    failed.add(actor_id)
                    continue
            remaining_s = give_up_at - self._ctx.now()
            if remaining_s <= 0 or (failed and not failure.retryable):
                raise failure
            await self._wait_for_change(min(remaining_s, RETRY_PAUSE_S) if failed else remaining_s)
            failed.clear()

    def _choose(self, failed: set[str]) -> str | None:
        ready = [m.actor_id for m in self._ctx.members.by_role(self._role) if m.actor_id not in failed]
        if not ready:
            return None
        self._turn += 1
        return ready[self._turn % len(ready)]

    async def _wait_for_change(self, timeout_s: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return
