"""The seam between a pair of agents and the engine that moves bytes: `nccl.py` on devices, `tcp/link.py` over sockets.

Used by `transport.py`. Rank 0 receives, rank 1 sends; both halves of a pair are made from one `unique_id`, which rank 0
makes and which travels over the mesh. Both ends give their halves the same transfers in the same order, one at a time.
Only `stop` blocks the caller; `news` returns what has happened.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import ClassVar, NamedTuple, Protocol

from kvstore.pool.device import DevicePages
from kvstore.transfer.paired.pair import PAIR_ABORTED

Memory = memoryview | DevicePages
"""The pages of a local pool, page 0 first: in this process's memory, or on a device."""


class Ready(NamedTuple):
    """The two halves have met and can move bytes."""


class Moved(NamedTuple):
    """The sends or receives of transfer `number` have ended; their bytes are where they belong."""

    number: int


class Broken(NamedTuple):
    """The engine failed; nothing more will come from it except `Stopped`, after an abort."""

    message: str
    code: str = PAIR_ABORTED


class Stopped(NamedTuple):
    """After an abort: this half no longer reads or writes pages."""


News = Ready | Moved | Broken | Stopped


def all_news(queue: SimpleQueue[News]) -> list[News]:
    """Take out what threads have put there so far, oldest first."""
    found: list[News] = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found


class PairLink(Protocol):
    """One half of a pair. No call except `stop` blocks."""

    def begin(self) -> None:
        """Connect to the other half; `Ready` or `Broken` follows."""
        ...

    def move(self, number: int, memory: Memory, parts: Sequence[tuple[int, int]]) -> None:
        """Send (rank 1) or receive (rank 0) `parts`, (offset, bytes), in order; `Moved` or `Broken` follows."""
        ...

    def abort(self) -> None:
        """End everything; `Stopped` follows."""
        ...

    def news(self) -> list[News]:
        """What has happened since the last call."""
        ...

    def stop(self) -> None:
        """Abort, and block until nothing runs any more."""
        ...


class LinkMaker(Protocol):
    """Makes halves. `kinds` are the kinds of memory it moves; after `eager_polls` polls without news, polls pause."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]]
    eager_polls: ClassVar[int]

    def open(self, wake: Callable[[], None]) -> str:
        """Listen if the engine does; the address, or empty. `wake` as in `Transport.open`. Raises TransferError."""
        return ""

    def unique_id(self) -> bytes:
        """The bytes that both halves of a new pair must be given. Raises KVError if this engine cannot be used here."""
        ...

    def link(self, device: str, unique_id: bytes, rank: int) -> PairLink:
        """One half, for pages on a device, or `cpu`. Raises KVError."""
        ...

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of strangers' connections that were closed, by reason; has every reason from `open` on."""
        return {}

    def close(self) -> None:
        """Let the threads end."""
        ...
