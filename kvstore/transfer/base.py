"""The one interface between whoever wants pages and whatever moves their bytes.

`Transport` is implemented by `mapped/` (this process reads the source's pool), by `paired/` (the source's agent sends)
and by what is installed besides (`plugins.py`); `selection.py` is one made of others. Chosen by topology and reported,
never silently downgraded. All calls are made on one thread. The caller owns deadlines: an engine that says nothing for
ever (NIXL does when its peer hangs) is cancelled, and what it may still write stays quarantined until it has ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.errors import PagesElsewhere, TransferError
from kvstore.pool.device import memory_kind
from kvstore.pool.page_pool import PagePool, PoolInfo
from kvstore.protocol import PoolHandle
from kvstore.transfer.plan import Descriptor


class SourcePages(NamedTuple):
    """The pages that a transfer reads, and what their page table should say of each."""

    pages: Sequence[int]
    generations: Sequence[int]


class Peer(Protocol):
    """A foreign pool that can be read by the transport that reached it."""

    info: PoolInfo
    """What its header, or its agent, says of it."""
    transport: "Transport"
    """Whose `connect` made it."""

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """What the foreign page table says of these pages now. Raises ValueError for a page that it does not have.

        None: it cannot be read from here, and the transport has the other end compare.
        """
        ...


class Transfer:
    """Bytes on their way from a peer into a local pool: the one record of them, from who posts it to who moves them.

    `parts` are bytes from page 0 at both ends, `deadline` is in seconds on the scale of `Transport.poll`'s `now`.
    `source` is for peers that have no `generations`: what the other end compares before and after it sends. When a
    transport's `poll` has returned it, it writes nothing any more, `num_bytes` were moved, and `error` is None if those
    are all. `transport` is what it was posted to last.
    """

    __slots__ = ("deadline", "error", "num_bytes", "parts", "peer", "pool", "source", "transport")

    def __init__(
        self,
        pool: PagePool,
        peer: Peer,
        parts: Sequence[Descriptor],
        deadline: float,
        source: SourcePages | None = None,
    ) -> None:
        self.pool = pool
        self.peer = peer
        self.parts = parts
        self.deadline = deadline
        self.source = source
        self.transport: Transport = peer.transport
        self.num_bytes = 0
        self.error: TransferError | None = None

    def fail(self, code: str, message: str) -> None:
        """The first reason stays."""
        if self.error is None:
            self.error = TransferError(code, message)

    def require_inside(self) -> None:
        """Raises TransferError `bad_descriptor` unless all bytes lie inside the pages of both pools."""
        local, remote = self.pool.info.pages_bytes, self.peer.info.pages_bytes
        for part in self.parts:
            fits = (
                part.num_bytes > 0
                and 0 <= part.local_offset <= local - part.num_bytes
                and 0 <= part.remote_offset <= remote - part.num_bytes
            )
            if not fits:
                raise TransferError("bad_descriptor", f"{part} lies outside the pools")


class Transport(ABC):
    """Moves bytes from foreign pools into local ones. `kinds` are the kinds of memory (`memory_kind`) that it moves."""

    name: str
    kinds: frozenset[str]
    cuts_pages: bool = False
    """Whether a transfer of very many small parts costs little: pages are cut by heads for it."""

    def open(self, wake: Callable[[], None]) -> str:
        """Called once, before all else; `wake` may be called in any thread when `poll` has something to find.

        Returns where others reach this end, for the log; empty: nowhere of its own. Raises TransferError.
        """
        return ""

    @abstractmethod
    def register(self, pool: PagePool) -> None:
        """Make a local pool a target, and let others read it. Raises PagesElsewhere: not memory of this kind."""

    @abstractmethod
    def connect(self, handle: PoolHandle) -> Peer:
        """Reach the pool that an agent describes, for reading only. Raises PoolError."""

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget a foreign pool; its transfers fail first. Again is harmless."""

    @abstractmethod
    def post(self, transfer: Transfer) -> None:
        """Begin a transfer; `poll` returns it exactly once. Raises TransferError: nothing is moved then."""

    @abstractmethod
    def poll(self, now: float) -> list[Transfer]:
        """Do a bounded amount of work and say what ended. `now` is on the scale of the deadlines."""

    @abstractmethod
    def cancel(self, transfer: Transfer) -> None:
        """Ask for an early end; it still comes from `poll`, when nothing can write any more."""

    @property
    @abstractmethod
    def num_posted(self) -> int:
        """Transfers that have not ended; while there are any, call `poll` again soon."""

    @property
    def pause_s(self) -> float:
        """Seconds that may pass until the next `poll` while there are any, 0.0 for none."""
        return 0.0

    @property
    def device_failure(self) -> str:
        """Why no work on a device of this process succeeds any more; empty: nobody has seen it fail."""
        return ""

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections of strangers that were closed, by reason."""
        return {}

    @abstractmethod
    def drain(self) -> list[Transfer]:
        """Cancel everything and return it; afterwards nothing writes."""

    @abstractmethod
    def close(self) -> None:
        """Drain, disconnect everything, forget all pools."""

    def require_kind(self, device: str, whose: str) -> None:
        """Raises PagesElsewhere, which names the pool by `whose`, unless `device` is memory that this one moves."""
        if memory_kind(device) not in self.kinds:
            moved = " and ".join(sorted(self.kinds))
            raise PagesElsewhere(f"the pages of {whose} lie on {device}, and {self.name} moves {moved} pages only")

    # Where pages of local pools are sent to others, and not read by them:

    def withdraw(self, group: str) -> None:  # noqa: B027 - nothing is sent where peers read
        """Send nothing more out of this group's pools; what is being sent goes on. `register` offers them again."""

    def is_sending(self, group: str) -> bool:
        """Whether pages of this group's pools are being read for another agent."""
        return False

    def agent_lost(self, agent: str) -> None:  # noqa: B027 - nothing is shared there
        """Another agent is gone, and what is shared with it is of no use."""
