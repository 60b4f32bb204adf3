"""Asks that go on until they are answered, one message each: adopt, open a grant, close it. Pure; owned by the core."""

from typing import Any

from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
from nodes.scheduler.events import Ask, Outbox, Tag

RETRY = "retry_ask"


class PersistentAsks:
    """Pending asks by tag. `failed` says when one was given up."""

    def __init__(self, outbox: Outbox, deadlines: Deadlines) -> None:
        self._outbox = outbox
        self._asks = Retrier[Tag, Ask](deadlines, RETRY, self._send)

    def __len__(self) -> int:
        return len(self._asks)

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._asks

    def start(
        self, tag: Tag, actor_id: str, message: Any, *, timeout_s: float, retry_s: float, give_up_at: float
    ) -> None:
        """Ask now; again `retry_s` after each failure before `give_up_at`. Replaces an ask of the same tag."""
        ask = Ask(actor_id, message, timeout_s, tag)
        self._asks.add(tag, actor_id, ask, retry_s=retry_s, give_up_at=give_up_at)
        self._asks.flush()

    def answered(self, tag: Tag) -> bool:
        """An answer came; False if nobody waits for it any more."""
        return self._asks.answered(tag)

    def failed(self, tag: Tag, now: float) -> bool:
        """No answer came. True if the ask is given up with that."""
        return bool(self._asks.failed((tag,), now))

    def retry(self, actor_id: str) -> None:
        """The pause after a failure is over."""
        self._asks.retry(actor_id)

    def hurry(self, actor_id: str) -> None:
        """The peer is back: do not wait for the pause to end."""
        self._asks.hurry(actor_id)

    def stop(self, tag: Tag) -> None:
        """Nobody wants the answer any more."""
        self._asks.stop(tag)

    def _send(self, _: str, asks: list[Ask]) -> None:
        for ask in asks:
            self._outbox.add(ask)
