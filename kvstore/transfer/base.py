"""The interface between an agent that wants pages and the transport that moves their bytes.

`Transport` is implemented by `mapped/` (this process reads the source's pool), by `paired/` (the source's agent sends)
and by installed packages (`plugins.py`); `selection.py` is one composed of others. Topology and configuration choose
the transport; it is reported, never silently downgraded.

An agent calls every method on one thread. It also watches deadlines itself: if an engine never reports the end of a
transfer (NIXL does not when its peer hangs), the agent cancels it, and the pages that it may still write stay
quarantined until the transport has returned it.
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
    """The pages that a transfer reads, and the generation that their page table should have for each."""

    pages: Sequence[int]
    generations: Sequence[int]


class Peer(Protocol):
    """A foreign pool that `Transport.connect` has reached; that transport can read it."""

    info: PoolInfo
    """The pool's description, from its header or from its agent."""
    transport: "Transport"
    """The transport whose `connect` made this peer."""

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """The generations of these pages in the foreign page table now. Raises ValueError for a page that it lacks.

        None if the table cannot be read from here: then the transport must have the other end compare generations.
        """
        ...


class Transfer:
    """Bytes to move from a peer into a local pool. Caller and transport share this one record of them.

    `parts` are in bytes from page 0 at both ends. `deadline` is in seconds, on the same clock as `now` of
    `Transport.poll`. `source` is for peers without `generations`: the other end compares these before and after it
    sends. Once `poll` has returned a transfer, nothing writes for it any more, `num_bytes` were moved, and `error` is
    None only if all were. `transport` is the one that it was posted to last. Of one of whole pages that failed,
    `num_good` may say how many pages are right all the same, from the first on; who does not know leaves it 0.
    """

    __slots__ = ("deadline", "error", "num_bytes", "num_good", "parts", "peer", "pool", "source", "transport")

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
        self.num_good = 0
        self.error: TransferError | None = None

    def fail(self, code: str, message: str) -> None:
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
    """Moves bytes from foreign pools into local ones. Only `drain` and `close` may block.

    `name` is its name in announcements, logs and metrics; `kinds` are the kinds of memory (`memory_kind`) it moves.
    """

    name: str
    kinds: frozenset[str]
    cuts_pages: bool = False
    """Whether very many small parts cost it little. Only such a transport is given pages that are cut by heads."""

    def open(self, wake: Callable[[], None]) -> str:
        """Called once, before any other method. Call `wake`, from any thread, when `poll` has something to do.

        Returns the address at which others reach this end, for the log; empty if it has none. Raises TransferError.
        """
        return ""

    @abstractmethod
    def register(self, pool: PagePool) -> None:
        """Take a local pool as destination, and let others read it. Raises PagesElsewhere if it is of another kind."""

    @abstractmethod
    def connect(self, handle: PoolHandle) -> Peer:
        """Reach the pool that an agent describes by `handle`, for reading only. Raises PoolError."""

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget a foreign pool. Its unfinished transfers fail, and `poll` still returns them. Idempotent."""

    @abstractmethod
    def post(self, transfer: Transfer) -> None:
        """Begin a transfer, which `poll` or `drain` returns exactly once, unless this raises TransferError."""

    @abstractmethod
    def poll(self, now: float) -> list[Transfer]:
        """Do a bounded amount of work and return the transfers that ended. `now` is on the clock of the deadlines.

        A transfer whose deadline has passed must end with an error, but only once nothing can write for it any more.
        """

    @abstractmethod
    def cancel(self, transfer: Transfer) -> None:
        """Request an early end; `poll` still returns the transfer, once nothing can write for it any more."""

    @property
    @abstractmethod
    def num_posted(self) -> int:
        """Number of transfers that have not ended; while it is above 0, the agent keeps calling `poll`."""

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next `poll` while `num_posted` is above 0; 0.0 for none."""
        return 0.0

    @property
    def device_failure(self) -> str:
        """Why no work on a device of this process can succeed any more; empty if none has failed. It ends the agent."""
        return ""

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of strangers' connections that were closed, by reason."""
        return {}

    @abstractmethod
    def drain(self) -> list[Transfer]:
        """Cancel all transfers and return them; afterwards nothing writes."""

    @abstractmethod
    def close(self) -> None:
        """Drain, disconnect all peers, forget all pools."""

    def require_kind(self, device: str, pool_name: str) -> None:
        """Raises PagesElsewhere, which names the pool, unless this transport moves memory of `device`."""
        if memory_kind(device) not in self.kinds:
            moved = " and ".join(sorted(self.kinds))
            raise PagesElsewhere(f"the pages of {pool_name} are on {device}, but {self.name} moves only {moved} pages")

    # For transports that send pages of local pools, where other agents do not read them:

    def withdraw(self, group: str) -> None:  # noqa: B027 - nothing is sent where peers read
        """Begin no more sends from this group's pools; running sends go on. `register` allows sending again."""

    def is_sending(self, group: str) -> bool:
        """Whether pages of this group's pools may still be read to be sent to another agent."""
        return False

    def agent_lost(self, agent: str) -> None:  # noqa: B027 - nothing is shared there
        """Another agent is gone: give up what is shared with it."""
