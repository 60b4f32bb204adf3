"""Asks of the scheduler's core: those repeated until answered, and those that name several items at once. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

from mesh.calls.batches import cut
from mesh.calls.retrier import Retrier
from mesh.runtime.deadlines import Deadlines
from mesh.runtime.effects import Ask
from nodes.scheduler.events import Outbox, Tag

Item = TypeVar("Item")

RETRY = "retry_ask"
ASK_TIMEOUT_S: Final = 2.0
"""The peer answers from what it knows: without an answer for so long, most likely it or the ask is lost."""
ASK_RETRY_S: Final = 0.5
"""Between a failed ask and the next: short beside the seconds that a peer takes to come back."""
NOT_NAMED: Final = "not_named"
"""The code that an item fails with if the answer to its ask does not name it."""


class PersistentAsks(Retrier[Tag, Ask]):
    """Pending asks by tag, one message each: adopt, close a grant."""

    def __init__(self, outbox: Outbox, deadlines: Deadlines) -> None:
        super().__init__(deadlines, RETRY, lambda _, asks: outbox.commands.extend(asks))

    def start(
        self, tag: Tag, actor_id: str, message: Any, *, timeout_s: float, retry_s: float, give_up_at: float
    ) -> None:
        """Ask now; again `retry_s` after each failure before `give_up_at`. Replaces an ask of the same tag."""
        self.add(tag, actor_id, Ask(actor_id, message, timeout_s, tag), retry_s=retry_s, give_up_at=give_up_at)
        self.flush()


class BatchedAsks(Generic[Item]):
    """Asks that name several items each. An ask's tag is `(kind, its number)`; its items are kept until it ends.

    Args:
        kind: of the tags.
        outbox: where asks go.
        timeout_s: of each ask.
        message: makes the ask for some items.
        size: about how many bytes an item takes, so that items that are too many for one message are split.
    """

    def __init__(
        self,
        kind: str,
        outbox: Outbox,
        timeout_s: float,
        message: Callable[[list[Item]], Any],
        size: Callable[[Item], int],
    ) -> None:
        self._kind = kind
        self._outbox = outbox
        self._timeout_s = timeout_s
        self._message = message
        self._size = size
        self._named: dict[str, list[str]] = {}
        self._count = 0

    def ask(self, actor_id: str, items: Mapping[str, Item]) -> None:
        """Ask a peer for these, by name; in several messages if one would be too large."""
        for names in cut(items, lambda name: self._size(items[name])):
            self._count += 1
            number = str(self._count)
            self._named[number] = names
            message = self._message([items[name] for name in names])
            self._outbox.ask(actor_id, message, self._timeout_s, (self._kind, number))

    def failed(self, number: str) -> list[str]:
        """The ask brought no answer. Returns the names of its items."""
        return self._named.pop(number, [])

    def answered(
        self, number: str, done: Collection[str], refused: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """Each item's name, and None if it is done, else its error code. Items that were not asked for are ignored."""
        done = frozenset(done)
        for name in self._named.pop(number, ()):
            yield name, None if name in done else refused.get(name, NOT_NAMED)
