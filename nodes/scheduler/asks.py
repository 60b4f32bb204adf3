"""Asks that go on until they are answered, one message each: adopt, open a grant, close it. Pure; owned by the core."""

from typing import Any

from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
from nodes.scheduler.events import Ask, Outbox, Tag

RETRY = "retry_ask"


class PersistentAsks(Retrier[Tag, Ask]):
    """Pending asks by tag."""

    def __init__(self, outbox: Outbox, deadlines: Deadlines) -> None:
        super().__init__(deadlines, RETRY, lambda _, asks: outbox.commands.extend(asks))

    def start(
        self, tag: Tag, actor_id: str, message: Any, *, timeout_s: float, retry_s: float, give_up_at: float
    ) -> None:
        """Ask now; again `retry_s` after each failure before `give_up_at`. Replaces an ask of the same tag."""
        self.add(tag, actor_id, Ask(actor_id, message, timeout_s, tag), retry_s=retry_s, give_up_at=give_up_at)
        self.flush()
