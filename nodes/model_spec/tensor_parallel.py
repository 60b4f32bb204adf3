"""Which part of a model each rank of a tensor-parallel group holds (Shoeybi et al. 2019, Megatron-LM). Pure.

Queries, keys, values, gate and up are cut by their outputs, the attention's output and down by their inputs, embedding
and head by the vocabulary; norms are held by every rank. Where ranks outnumber KV heads a head is held by several. The
vocabulary is padded to a multiple of the ranks: rows beyond its end are zeros.
"""

from typing import Final, NamedTuple, Protocol

from kvstore.errors import TransferError
from kvstore.transfer.plan import held_heads
from nodes.model_spec.errors import TensorParallelUnfit

MAX_TP_SIZE: Final = 64


class Shape(Protocol):
    """What of a model decides how it can be cut; `ModelSpec` has it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102


class Part(NamedTuple):
    """Indices `begin .. end-1` of dimension `dim` of a checkpoint's tensor; those beyond its end are zeros."""

    dim: int
    begin: int
    end: int


class Shard(NamedTuple):
    """What rank `rank` of `size` holds: query heads, KV heads, columns of the feed-forward layer, rows of the (padded)
    vocabulary, each as indices of the whole model.
    """

    rank: int
    size: int
    head_dim: int
    heads: range
    kv_heads: range
    inner: range
    vocab: range

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return len(self.kv_heads)

    def part_of(self, name: str) -> Part | None:
        """The part of the tensor `name`, as checkpoints call it, that this rank holds; None: all of it."""
        if self.size == 1:
            return None
        *_, module, kind = name.split(".")
        match module:
            case "q_proj":
                return self._of_heads(0, self.heads)
            case "k_proj" | "v_proj":
                return self._of_heads(0, self.kv_heads)
            case "gate_proj" | "up_proj":
                return Part(0, self.inner.start, self.inner.stop)
            # The bias of a layer that is cut by its inputs belongs to the sum.
            case "o_proj" if kind == "weight":
                return self._of_heads(1, self.heads)
            case "down_proj" if kind == "weight":
                return Part(1, self.inner.start, self.inner.stop)
            case "embed_tokens" | "lm_head":
                return Part(0, self.vocab.start, self.vocab.stop)
            case _:
                return None

    def _of_heads(self, dim: int, heads: range) -> Part:
        return Part(dim, heads.start * self.head_dim, heads.stop * self.head_dim)


def shard_of(shape: Shape, rank: int = 0, size: int = 1) -> Shard:
    """What a rank holds. Raises TensorParallelUnfit, naming the sizes that fit, if the model cannot be cut so."""
    problem = _problem(shape, size)
    if problem or not 0 <= rank < size:
        problem = problem or f"there is no rank {rank} in a group of {size}"
        fitting = ", ".join(map(str, fitting_tp_sizes(shape)))
        raise TensorParallelUnfit(
            f"{shape.name} cannot be cut for {size} ranks: {problem}. Use a tensor-parallel size of {fitting}."
        )
    vocab = -(-shape.vocab_size // size)
    return Shard(
        rank=rank,
        size=size,
        head_dim=shape.head_dim,
        heads=_share(shape.num_heads, rank, size),
        kv_heads=held_heads(rank, size, shape.num_kv_heads),
        inner=_share(shape.intermediate_size, rank, size),
        vocab=range(rank * vocab, (rank + 1) * vocab),
    )


def fitting_tp_sizes(shape: Shape) -> list[int]:
    """The sizes up to `MAX_TP_SIZE` that a model can be cut for."""
    return [size for size in range(1, MAX_TP_SIZE + 1) if not _problem(shape, size)]


def _problem(shape: Shape, size: int) -> str:
    if not 1 <= size <= MAX_TP_SIZE:
        return f"a group has 1 to {MAX_TP_SIZE} ranks"
    for count, what in ((shape.num_heads, "attention heads"), (shape.intermediate_size, "feed-forward columns")):
        if count % size:
            return f"its {count} {what} cannot be dealt out evenly"
    try:
        held_heads(0, size, shape.num_kv_heads)
    except TransferError:
        return f"its {shape.num_kv_heads} KV heads can be neither dealt out nor repeated evenly"
    return ""


def _share(count: int, rank: int, size: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)
