"""Asking any tokenizer: they are alike, so what one cannot answer another may."""

import asyncio
from typing import Any

from mesh.actor import Context
from mesh.errors import CallError
from mesh.message import Message
from nodes.gateway.events import Failure
from nodes.roles import TOKENIZER

RETRY_PAUSE_S = 0.2


class AskFailed(Exception):
    """No tokenizer gave an answer, or one refused; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class TokenizerAsks:
    """Spreads asks over the ready tokenizers and passes over those that fail."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._turn = 0
        self._changed = asyncio.Event()

    def members_changed(self) -> None:
        """Somebody came, left or changed state: whoever waits for a tokenizer looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def ask(self, message: Message, *, timeout_s: float, patience_s: float) -> Any:
        """The answer's message.

        Args:
            message: a question of `nodes/protocol/routing.py`.
            timeout_s: what each tokenizer is given.
            patience_s: for how long to go round again, where nobody is ready or all failed; 0 is one round.

        Raises:
            AskFailed: refused for good, or nobody answered.
        """
        give_up_at = self._ctx.now() + patience_s
        failure = Failure("no_tokenizer", "no tokenizer is ready")
        failed: set[str] = set()
        while True:
            tokenizer = self._choose(failed)
            if tokenizer is not None:
                try:
                    answer = await self._ctx.ask(tokenizer, message, timeout_s=timeout_s)
                except CallError as error:
                    failure = Failure(error.code, error.message, error.retryable, error.param)
                    if not error.retryable:
                        raise AskFailed(failure) from error
                    failed.add(tokenizer)
                    continue
                return answer.message
            remaining_s = give_up_at - self._ctx.now()
            if remaining_s <= 0:
                raise AskFailed(failure)
            await self._wait_for_change(min(remaining_s, RETRY_PAUSE_S) if failed else remaining_s)
            failed.clear()

    def _choose(self, failed: set[str]) -> str | None:
        ready = [m.actor_id for m in self._ctx.members.by_role(TOKENIZER) if m.actor_id not in failed]
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
