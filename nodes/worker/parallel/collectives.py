"""The operations that the ranks of a tensor-parallel group do together: the seam between network and transport.

Implemented by `shm_collectives` (processes of one host, tensors in its memory) and `cuda.nccl_collectives`. A group is
never repaired: any failure ends it, and new workers make another group under another unique id.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from nodes.worker.errors import CollectiveFailed

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(Protocol):
    """One rank of a group. All ranks call the same operations in the same order, on tensors of equal shape and dtype.

    Operations are called from the thread that runs the steps, on its current stream; on a device they are queued and
    return, and may be captured in CUDA graphs, by all ranks in the same order. An operation raises CollectiveFailed if
    it is clear at once that it cannot complete; so do all that follow.
    """

    rank: int
    """This rank, `0 .. size-1`."""
    size: int
    """Ranks of the group."""

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum over all ranks, of the same shape; the same bits at every rank. May be `x` itself, overwritten."""
        ...

    def all_gather(self, x: "Tensor") -> "Tensor":
        """`[rows, n]` of each rank side by side in the order of the ranks: `[rows, size * n]`."""
        ...

    def check(self) -> None:
        """Raise CollectiveFailed if any operation so far has failed or was aborted: its results are no good.

        To be called after waiting for the device's results, because an abort ends operations that hang there.
        """
        ...

    def abort(self) -> None:
        """End the group from any thread, without waiting: a hung operation raises, or ends on the device. Idempotent.

        On one host the other ranks notice at once.
        """
        ...

    def close(self) -> None:
        """Release everything. Nothing may run any more, and no captured operation may be replayed."""
        ...


@contextmanager
def of_all_ranks(collectives: Collectives | None, what: str) -> Generator[None]:
    """End the group if anything goes wrong in a rank's step: the other ranks may be in the middle of it, and cannot
    begin it again. Raises CollectiveFailed then; without `collectives`, the error itself.
    """
    try:
        yield
    except CollectiveFailed:
        raise
    # Whatever it was, the other ranks wait for this one, and only an abort tells them.
    except Exception as error:
        if collectives is None:
            raise
        collectives.abort()
        message = f"{what} failed at rank {collectives.rank}: {type(error).__name__}: {error}"
        raise CollectiveFailed(message) from error


class CollectivesMaker(Protocol):
    """Makes groups; one per process."""

    def unique_id(self) -> bytes:
        """The id that all ranks of one group must be given. Made in rank 0's process, by the maker that then connects.

        Raises WorkerError or DeviceError.
        """
        ...

    def connect(self, unique_id: bytes, rank: int, size: int, device: str) -> Collectives:
        """Join the group, in the thread that will run the steps; returns when all ranks have. `device` as configured.

        Raises GroupNotFormed (`group_not_formed`) after a time limit, or when another rank turned out to be gone.
        """
        ...

    def close(self) -> None:
        """Release unique ids that nobody has connected with; groups stay."""
        ...
