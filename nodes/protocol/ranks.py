"""Between the workers of one group: how tensor-parallel ranks find each other."""

from mesh.wire.message import Message


class JoinGroup(Message, frozen=True):
    """Ask rank 0 to compute together; answered by `GroupFormed` when all `size` ranks have asked.

    `model` is the fingerprint of the weights, `incarnation` that of the group's pools: both must be rank 0's own.
    Repeated until answered. A group is made once: an incarnation of a rank that was not in it ends it.
    """

    group: str
    rank: int
    size: int
    model: str
    incarnation: int


class GroupFormed(Message, frozen=True):
    """`epochs[r]` is the incarnation of rank r; these and no others. `unique_id` is what connects them."""

    epochs: list[int]
    unique_id: bytes
