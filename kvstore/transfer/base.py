"""The seam between a transfer and whatever moves its bytes.

Implemented by `shm`, `cuda_ipc` and `nccl`; used by `puller`. Chosen by topology and reported, never silently
downgraded. All calls are made on one thread. The caller owns deadlines: an engine that says nothing for ever (NIXL does
when its peer hangs) is cancelled, and what it may still write stays quarantined until it completes.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstore.errors import TransferError
from kvstore.pool.page_pool import PagePool, PoolInfo
from kvstore.transfer.plan import Descriptor


class Direction(enum.Enum):
    """READ pulls from the peer into local memory, WRITE pushes the other way."""

    READ = "read"
    WRITE = "write"


class SourcePages(NamedTuple):
    """The pages that a transfer reads, and what their page table should say of each."""

    pages: Sequence[int]
    generations: Sequence[int]


def require_inside(descriptors: Sequence[Descriptor], local: PoolInfo, remote: PoolInfo) -> None:
    """Raises TransferError `bad_descriptor` unless all bytes lie inside the pages of both pools."""
    for part in descriptors:
        fits = (
            part.num_bytes > 0
            and 0 <= part.local_offset <= local.pages_bytes - part.num_bytes
            and 0 <= part.remote_offset <= remote.pages_bytes - part.num_bytes
        )
        if not fits:
            raise TransferError("bad_descriptor", f"{part} lies outside the pools")


class Completion(NamedTuple):
    """The end of a posted transfer: from now on it writes nothing. `error` None: all its bytes are there."""

    handle: int
    num_bytes: int
    error: TransferError | None


class Peer(Protocol):
    """A foreign pool that can be read."""

    info: PoolInfo

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """What the foreign page table says of these pages now. Raises ValueError for a page that it does not have.

        None: it cannot be read from here, and the transport has the other end compare.
        """
        ...


class Transport(Protocol):
    """Moves bytes between a local pool and foreign ones."""

    name: str

    def register(self, pool: PagePool) -> int:
        """Make a local pool a target; returns its region number. Raises PagesElsewhere: not memory of this kind."""
        ...

    def export(self, region: int) -> str:
        """What a peer's `connect` needs; `PoolHandle.path` carries it."""
        ...

    def connect(self, address: str) -> Peer:
        """Reach a foreign pool, for reading only. Raises PoolError."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forget a foreign pool; its transfers fail first."""
        ...

    def post(
        self,
        direction: Direction,
        region: int,
        peer: Peer,
        descriptors: Sequence[Descriptor],
        deadline: float,
        source: SourcePages | None = None,
    ) -> int:
        """Begin a transfer and return its handle; its `Completion` comes from `poll`, exactly once.

        `source` is for peers that have no `generations`: what the other end compares before and after it sends.
        Raises TransferError `unsupported` or `bad_descriptor`; nothing is moved then.
        """
        ...

    def poll(self, now: float) -> list[Completion]:
        """Do a bounded amount of work and say what ended. `now` is on the scale of the deadlines."""
        ...

    def cancel(self, handle: int) -> None:
        """Ask for an early end; the completion still comes, when nothing can write any more."""
        ...

    @property
    def num_posted(self) -> int:
        """Transfers without a completion yet; while there are any, call `poll` again soon."""
        ...

    @property
    def pause_s(self) -> float:
        """Seconds that may pass until the next `poll` while there are any, 0.0 for none."""
        ...

    def drain(self) -> list[Completion]:
        """Cancel everything and return the completions; afterwards nothing writes."""
        ...

    def close(self) -> None:
        """Drain, disconnect everything, forget all regions."""
        ...
