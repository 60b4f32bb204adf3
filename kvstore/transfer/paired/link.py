"""The seam between a pair of agents and what carries its bytes: `nccl.py` on devices, `tcp/link.py` over sockets.

Used by `transport.py`. Rank 0 receives, rank 1 sends; the two halves of a pair are made of one `unique_id`, which
rank 0 makes and which travels over the mesh. Both put the same transfers to their halves in the same order, one at a
time. Nothing here blocks the caller but `stop`: what happened is fetched by `news`.
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
    """The sends or receives of this number have ended; their bytes are where they belong."""

    number: int


class Broken(NamedTuple):
    """The engine failed; nothing more will come of it but `Stopped`, after an abort."""

    message: str
    code: str = PAIR_ABORTED


class Stopped(NamedTuple):
    """After an abort: nothing of this half reads or writes pages any more."""


News = Ready | Moved | Broken | Stopped


def all_news(queue: SimpleQueue[News]) -> list[News]:
    """What threads have put there until now, oldest first; it is taken out."""
    found: list[News] = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found


class PairLink(Protocol):
    """One half. None of the calls blocks but `stop`."""

    def begin(self) -> None:
        """Meet the other half; `Ready` or `Broken` comes of it."""
        ...

    def move(self, number: int, memory: Memory, parts: Sequence[tuple[int, int]]) -> None:
        """Send (rank 1) or receive (rank 0) so many bytes at each offset in `memory`, in this order."""
        ...

    def abort(self) -> None:
        """End everything; `Stopped` comes of it."""
        ...

    def news(self) -> list[News]:
        """What has happened since the last call."""
        ...

    def stop(self) -> None:
        """Abort and wait until nothing runs any more."""
        ...


class LinkMaker(Protocol):
    """Makes halves. `kinds` are the kinds of memory that it moves, `eager_polls` how often looking at once pays."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]]
    eager_polls: ClassVar[int]

    def open(self, wake: Callable[[], None]) -> str:
        """The address at which others are waited for; empty: nobody is. `wake` as in `Transport.open`.

        Raises TransferError.
        """
        return ""

    def unique_id(self) -> bytes:
        """What both halves of one pair must be given. Raises KVError: this engine cannot be had here."""
        ...

    def link(self, device: str, unique_id: bytes, rank: int) -> PairLink:
        """One half, for pages on a device, or `cpu`. Raises KVError."""
        ...

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections of strangers that were closed, by reason; every reason is there from `open` on."""
        return {}

    def close(self) -> None:
        """Let the threads go."""
        ...
