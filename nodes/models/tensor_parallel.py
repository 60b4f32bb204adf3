"""Which part of a model each rank of a tensor-parallel group holds (Shoeybi et al. 2019, Megatron-LM). Pure.

The architecture says how each tensor is cut (`parts.Parameter`). Usually queries, keys, values, gate and up are cut by
their outputs, the attention's output and down by their inputs, embedding and head by the vocabulary; every rank holds
the norms. If ranks outnumber KV heads, several ranks hold the same head. The vocabulary is padded to a multiple of the
number of ranks: rows beyond its end are zeros.
"""

from typing import Final, Literal, NamedTuple, Protocol

from kvstore.errors import TransferError
from kvstore.transfer.plan import held_heads
from nodes.models.errors import TensorParallelUnfit

MAX_TP_SIZE: Final = 64
"""Ranks beyond the KV heads (8 in most models) only repeat them; 64 ranks have 2,016 sockets between each other."""


class Shape(Protocol):
    """The fields of a model that decide how it can be cut; `ModelSpec` has them."""

    @property
    def name(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def dense_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def qk_norm(self) -> str: ...
    @property
    def is_encoder(self) -> bool: ...


class Cut(NamedTuple):
    """Dimension `dim` of a tensor is divided among the ranks, each holding the range `by` of its `Shard`."""

    dim: int
    by: Literal["heads", "kv_heads", "inner", "dense", "vocab"]


class Part(NamedTuple):
    """Indices `begin .. end-1` of dimension `dim` of a checkpoint's tensor; those beyond its end are zeros."""

    dim: int
    begin: int
    end: int


class Shard(NamedTuple):
    """What rank `rank` of `size` holds: query heads, KV heads, columns of the feed-forward layer (`dense`: of one
    without experts, if others have some), rows of the (padded) vocabulary, each as indices of the whole model.
    """

    rank: int
    size: int
    head_dim: int
    heads: range
    kv_heads: range
    inner: range
    dense: range
    vocab: range

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv_heads)

    def part_of(self, cut: Cut | None) -> Part | None:
        """The part of a tensor that this rank holds; None: all of it."""
        if self.size == 1 or cut is None:
            return None
        found: range = getattr(self, cut.by)
        unit = self.head_dim if cut.by in ("heads", "kv_heads") else 1
        return Part(cut.dim, found.start * unit, found.stop * unit)


def shard_of(shape: Shape, rank: int = 0, size: int = 1) -> Shard:
    """What a rank holds. Raises TensorParallelUnfit, naming the sizes that fit, if the model cannot be cut that way."""
    problem = _problem(shape, size)
    if problem or not 0 <= rank < size:
        problem = problem or f"there is no rank {rank} in a group of {size}"
        fitting = ", ".join(map(str, fitting_tp_sizes(shape)))
        raise TensorParallelUnfit(
            f"{shape.name} cannot be split into {size} ranks: {problem}. Use a tensor-parallel size of {fitting}."
        )
    vocab = -(-shape.vocab_size // size)
    return Shard(
        rank=rank,
        size=size,
        head_dim=shape.head_dim,
        heads=_share(shape.num_heads, rank, size),
        kv_heads=held_heads(rank, size, shape.num_kv_heads),
        inner=_share(shape.intermediate_size, rank, size),
        dense=_share(shape.dense_size, rank, size),
        vocab=range(rank * vocab, (rank + 1) * vocab),
    )


def fitting_tp_sizes(shape: Shape) -> list[int]:
    """The sizes up to `MAX_TP_SIZE` that a model can be cut for."""
    return [size for size in range(1, MAX_TP_SIZE + 1) if not _problem(shape, size)]


def _problem(shape: Shape, size: int) -> str:
    if not 1 <= size <= MAX_TP_SIZE:
        return f"a group has 1 to {MAX_TP_SIZE} ranks"
    if size > 1 and shape.is_encoder:
        return "it is an encoder, which one worker computes"
    if size > 1 and shape.qk_norm == "all":
        return "its query and key norms go over all heads"
    columns = "feed-forward columns"
    for count, what in (
        (shape.num_heads, "attention heads"),
        (shape.intermediate_size, columns),
        (shape.dense_size, columns),
    ):
        if count % size:
            return f"its {count} {what} cannot be divided evenly"
    try:
        held_heads(0, size, shape.num_kv_heads)
    except TransferError:
        return f"its {shape.num_kv_heads} KV heads can be neither divided nor repeated evenly"
    return ""


def _share(count: int, rank: int, size: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)
