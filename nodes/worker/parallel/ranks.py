"""How the tensor-parallel ranks of a group find each other, and when a group is over: the decisions, without the mesh.

    rank 0         gathers one incarnation of each other rank (`RankRendezvous`), then answers all of them
    other ranks    ask rank 0 until it answers with a group that they are in
    afterwards     a group is these incarnations and no others: when one is gone, or a later incarnation of it is seen,
                   the others end, because a collective operation with a dead rank never ends; then all meet again

So whichever ranks die, in any order, all end up in one group of later incarnations, named by the epoch of rank 0.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from typing_extensions import override

from mesh.address import Address
from mesh.membership.view import Member
from mesh.runtime.effects import Refuse, Reply
from nodes.protocol import GroupFormed, JoinGroup
from nodes.worker.core import AdoptArrived, Command, Event, WorkerCore

STALE: Final = "stale_epoch"
MISMATCH: Final = "group_mismatch"
POOL_CHANGED: Final = "pool_changed"
GROUP_OVER: Final = "group_over"


class Over(NamedTuple):
    """The group is over: this rank ends."""

    reason: str


class RankRendezvous:
    """Rank 0's part: the ranks that have asked to join. `own` is the request that rank 0 would send to itself."""

    def __init__(self, own: JoinGroup, epoch: int, unique_id: bytes) -> None:
        self._own = own
        self._epoch = epoch
        self._unique_id = unique_id
        self._joined: dict[int, tuple[int, Any]] = {}
        self.formed: GroupFormed | None = None

    def join(self, join: JoinGroup, epoch: int, call: Any) -> list[Reply | Refuse | Over]:
        """An incarnation of a rank asks to join. The last missing one completes the group."""
        if (refusal := self._refusal(join, call)) is not None:
            return [refusal]
        if self.formed is not None:
            known = self.formed.epochs[join.rank]
            # Its answer was lost: it is in the group already, and asks again.
            if epoch == known:
                return [Reply(call, self.formed)]
            # It has started anew, so its predecessor is dead, and an operation with a dead rank never ends.
            over = f"rank {join.rank} joined in epoch {known} and now asks in epoch {epoch}"
            return [Refuse(call, GROUP_OVER, over, retryable=True), Over(over)]
        last, _ = self._joined.get(join.rank, (0, None))
        if epoch < last:
            return [Refuse(call, STALE, f"rank {join.rank} has already asked in epoch {last}")]
        self._joined[join.rank] = (epoch, call)
        if len(self._joined) < self._own.size - 1:
            return []
        epochs = [self._epoch, *(self._joined[rank][0] for rank in range(1, self._own.size))]
        self.formed = GroupFormed(epochs=epochs, unique_id=self._unique_id)
        return [Reply(one, self.formed) for _, one in self._joined.values()]

    def lost(self, rank: int, epoch: int) -> None:
        """An incarnation that had asked is gone, before there was a group."""
        if self._joined.get(rank, (0, None))[0] == epoch:
            del self._joined[rank]

    def _refusal(self, join: JoinGroup, call: Any) -> Refuse | None:
        own = self._own
        if (join.group, join.size, join.model) != (own.group, own.size, own.model) or not 0 < join.rank < own.size:
            wrong = f"rank 0 of {own.group} is in a group of {own.size} ranks with model {own.model!r}"
            asked = f"rank {join.rank} of {join.size} of {join.group} with model {join.model!r} cannot join"
            return Refuse(call, MISMATCH, f"{wrong}: {asked}")
        if join.incarnation != own.incarnation:
            pools = f"{own.incarnation} at rank 0, {join.incarnation} at rank {join.rank}"
            different = f"the pools of {own.group} have different incarnations: {pools}"
            return Refuse(call, POOL_CHANGED, different, retryable=True)
        return None


def who_is_missing(ids: Sequence[str], epochs: Sequence[int], left: Sequence[Address], known: Sequence[Member]) -> str:
    """Why the group of these incarnations is over, in words; empty if nothing is known that ends it.

    `left` are incarnations that have just gone, `known` are those in the mesh.
    """
    pinned = dict(zip(ids, epochs, strict=True))
    for gone in left:
        if pinned.get(gone.actor_id) == gone.epoch:
            return f"{gone} is gone, and with it the group"
    # A successor is as good a proof as a departure, and may be heard of first.
    for member in known:
        if member.epoch > pinned.get(member.actor_id, member.epoch):
            return f"{member.address} has replaced epoch {pinned[member.actor_id]}, which ends the group"
    return ""


class RankCore(WorkerCore):
    """A worker whose steps other ranks take part in: while steps of one scheduler run, no other scheduler takes over.

    Another scheduler's adoption waits until nothing runs any more, queued steps included: dropping those would leave
    the ranks that have begun them waiting for this one. If a step cannot end because another rank never got it, only
    the end of the group helps: the actor watches `num_deferred` for that.

    The same scheduler's adoption is answered at once: it holds the pages of the running steps, and such a step may be
    waiting for this scheduler to send it to another rank again.
    """

    _deferred: tuple[AdoptArrived, ...] = ()

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    @override
    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, AdoptArrived) and self.is_running:
            if event.adopt.scheduler_epoch > self.scheduler_epoch:
                self._deferred = (*self._deferred[-MAX_DEFERRED + 1 :], event)
                return []
            if event.adopt.scheduler_epoch == self.scheduler_epoch:
                return [Reply(event.call, self.adopted)]
        commands = super().handle(event)
        if self._deferred and not self.is_running:
            deferred, self._deferred = self._deferred, ()
            for one in deferred:
                commands += super().handle(one)
        return commands


MAX_DEFERRED: Final = 8
"""At most so many adoptions wait; of more, the last ones are kept, because callers repeat an ask."""
