"""The building blocks of networks, each with its tensors in a checkpoint.

An architecture lists its parts once. They determine the tensors that a checkpoint must have, their bytes, what each
rank of a group holds, and random weights; an `Ops` loads them and computes with them. Needs no torch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from nodes.models.pooling import Dense
from nodes.models.spec import Activation, RopeParameters
from nodes.models.tensor_parallel import Cut

Part = TypeVar("Part")


class Parameter(NamedTuple):
    """One tensor, named as in checkpoints; without a `cut` every rank holds it whole. `mean` is for random weights."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    mean: float = 0.0


class Embedding(NamedTuple):
    """Rows of `weight`, `[vocab, hidden]`, times `scale`; with `positions` and `types` also a row of each of the two.

    A token at position p takes row `first_position + p` of `positions`.
    """

    weight: Parameter
    scale: float = 1.0
    positions: Parameter | None = None
    types: Parameter | None = None
    first_position: int = 0


class Norm(NamedTuple):
    """RMS norm, `x / rms(x) * (weight + offset)`: per head if the weight has the length of one, else over the row."""

    weight: Parameter
    eps: float
    offset: float = 0.0


class LayerNorm(NamedTuple):
    """`(x - mean) / deviation * weight + bias` over the row."""

    weight: Parameter
    bias: Parameter
    eps: float


class Linear(NamedTuple):
    """`x @ weight.T + bias`; several weights, `[out, in]` each, form one product whose outputs lie side by side.

    `biases` has one entry for each weight, or is empty.
    """

    weights: tuple[Parameter, ...]
    biases: tuple[Parameter, ...] = ()

    @property
    def name(self) -> str:
        """The first weight's name, unique within a model."""
        return self.weights[0].name

    @property
    def is_summed(self) -> bool:
        """Whether ranks hold parts of its inputs: their results must then be summed, and only one adds the bias."""
        cut = self.weights[0].cut
        return cut is not None and cut.dim == 1


class Gated(NamedTuple):
    """`activation(gate(x)) * up(x)`."""

    gate: Linear
    up: Linear
    activation: Activation = "silu"

    @property
    def name(self) -> str:
        """The gate's name, unique within a model."""
        return self.gate.name


class Activated(NamedTuple):
    """`activation(linear(x))`."""

    linear: Linear
    activation: Activation


class Experts(NamedTuple):
    """The `router`'s `top_k` experts of each row, weighted by softmax (`normalized`: scaled to sum to one)."""

    router: Linear
    experts: tuple[tuple[Gated, Linear], ...]
    top_k: int
    normalized: bool


class Attention(NamedTuple):
    """Attention of layer `layer` over its pages: norms of queries and keys, and rotation, if it has any; attention.

    `scale` multiplies the scores. `ModelSpec.layer_windows` and `is_encoder` say which positions a layer sees.
    """

    layer: int
    rope: RopeParameters | None
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None


def linear(name: str, num_out: int, num_in: int, cut: Cut | None = None, *, bias: bool = False) -> Linear:
    """One product; its bias is cut only if its outputs are."""
    weight = Parameter(f"{name}.weight", (num_out, num_in), cut)
    return Linear((weight,), (Parameter(f"{name}.bias", (num_out,), cut if cut and not cut.dim else None),) * bias)


def own_parameters(dense: Dense) -> list[Parameter]:
    """Tensors of a product behind a pooling that lie in the model's own weights, as they are if all rows are used."""
    if dense.path:
        return []
    weight = Parameter(dense.weight, (dense.num_out, dense.num_in))
    return [weight, *([Parameter(dense.bias, (dense.num_out,))] * bool(dense.bias))]


def joined(*linears: Linear) -> Linear:
    """Several products of the same input, as one product."""
    weights = tuple(weight for product in linears for weight in product.weights)
    return Linear(weights, tuple(bias for product in linears for bias in product.biases))


def parts_of(kinds: tuple[type[Part], ...], part: object) -> Iterator[Part]:
    """`part` itself if it is of one of `kinds`, else the parts nested in it that are, in the order of its fields."""
    if isinstance(part, kinds):
        yield part
    elif isinstance(part, tuple | list):
        for inner in cast("Sequence[object]", part):
            yield from parts_of(kinds, inner)
