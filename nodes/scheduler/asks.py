"""Asks that go on until they are answered: adopt, close a grant, cancel a prefill.

An ask may be lost and its answer too, so what must happen at the peer is asked again, with the same message, until an
answer comes, the time for it is over, or nobody wants it any more. Pure; shared by the core's parts.
"""

from typing import Any, NamedTuple

from nodes.scheduler.deadlines import Deadlines
from nodes.scheduler.events import Ask, Outbox, Tag

RETRY = "retry_ask"


class _Pending(NamedTuple):
    actor_id: str
    message: Any
    timeout_s: float
    retry_s: float
    give_up_at: float


class PersistentAsks:
    """Pending asks by tag. `failed` says when one was given up."""

    def __init__(self, outbox: Outbox, deadlines: Deadlines) -> None:
        self._outbox = outbox
        self._deadlines = deadlines
        self._pending: dict[Tag, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._pending

    def start(
        self, tag: Tag, actor_id: str, message: Any, *, timeout_s: float, retry_s: float, give_up_at: float
    ) -> None:
        """Ask now; again `retry_s` after each failure before `give_up_at`. Replaces an ask of the same tag."""
        self._deadlines.clear((RETRY, _name(tag)))
        self._pending[tag] = _Pending(actor_id, message, timeout_s, retry_s, give_up_at)
        self._outbox.add(Ask(actor_id, message, timeout_s, tag))

    def answered(self, tag: Tag) -> bool:
        """An answer came; False if nobody waits for it any more."""
        self._deadlines.clear((RETRY, _name(tag)))
        return self._pending.pop(tag, None) is not None

    def failed(self, tag: Tag, now: float) -> bool:
        """No answer came. True if the ask is given up with that."""
        pending = self._pending.get(tag)
        if pending is None:
            return False
        if now + pending.retry_s >= pending.give_up_at:
            del self._pending[tag]
            return True
        self._deadlines.set((RETRY, _name(tag)), now + pending.retry_s)
        return False

    def retry(self, name: str) -> None:
        """The pause after a failure is over."""
        kind, _, subject = name.partition(" ")
        pending = self._pending.get((kind, subject))
        if pending is not None:
            self._outbox.add(Ask(pending.actor_id, pending.message, pending.timeout_s, (kind, subject)))

    def hurry(self, actor_id: str) -> None:
        """The peer is back: do not wait for the pause to end."""
        for tag, pending in self._pending.items():
            if pending.actor_id == actor_id and self._deadlines.clear((RETRY, _name(tag))):
                self._outbox.add(Ask(actor_id, pending.message, pending.timeout_s, tag))

    def stop(self, tag: Tag) -> None:
        """Nobody wants the answer any more."""
        self._pending.pop(tag, None)
        self._deadlines.clear((RETRY, _name(tag)))


def _name(tag: Tag) -> str:
    return f"{tag[0]} {tag[1]}"
