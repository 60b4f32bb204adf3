"""Between the workers of one group: how tensor-parallel ranks find each other."""

from mesh.wire.message import Message


class JoinGroup(Message, frozen=True):
    """Ask rank 0 to compute together; answered by `GroupFormed` when all `size` ranks have asked.

    `model` is the fingerprint of the weights, `incarnation` that of the group's pools: both must equal rank 0's.
    Repeated until answered. A group is formed once: another incarnation of one of its ranks ends it.
    """

    group: str
    rank: int
    size: int
    model: str
    incarnation: int


class GroupFormed(Message, frozen=True):
    """The group consists of exactly the incarnations `epochs[r]` of its ranks r. `unique_id` lets them connect."""

    epochs: list[int]
    unique_id: bytes
