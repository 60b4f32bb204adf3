"""What networks are made of, each part with the tensors that it is in a checkpoint.

An architecture says its parts once. From them follow the tensors that a checkpoint must have, their bytes, what each
rank of a group holds, and random weights; an `Ops` loads them and computes with them. Needs no torch.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, cast

from nodes.models.spec import RopeParameters
from nodes.models.tensor_parallel import Cut

Activation = Literal["silu", "gelu_tanh"]
Part = TypeVar("Part")


class Parameter(NamedTuple):
    """One tensor, named as in checkpoints; without a `cut` every rank holds it whole. `mean` is of random weights."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    mean: float = 0.0


class Embedding(NamedTuple):
    """Rows of `weight`, `[vocab, hidden]`, times `scale`."""

    weight: Parameter
    scale: float = 1.0


class Norm(NamedTuple):
    """RMS norm: `x / rms(x) * (weight + offset)`. Over each head alone where it is as long as one, else over all."""

    weight: Parameter
    eps: float
    offset: float = 0.0


class Linear(NamedTuple):
    """`x @ weight.T + bias`; several weights, `[out, in]` each, are one product whose outputs lie side by side.

    There are as many `biases` as `weights`, or none.
    """

    weights: tuple[Parameter, ...]
    biases: tuple[Parameter, ...] = ()

    @property
    def name(self) -> str:
        """Of the first weight: names it among all of a model."""
        return self.weights[0].name

    @property
    def is_summed(self) -> bool:
        """Ranks hold parts of its inputs, so that their results are to be added up, and a bias is added by one."""
        cut = self.weights[0].cut
        return cut is not None and cut.dim == 1


class Gated(NamedTuple):
    """`activation(gate(x)) * up(x)`."""

    gate: Linear
    up: Linear
    activation: Activation = "silu"

    @property
    def name(self) -> str:
        """Names it among all of a model."""
        return self.gate.name


class Experts(NamedTuple):
    """Of each row the `top_k` experts that `router` gives most, by their shares of one in its softmax, added up.

    `normalized`: shares of one among those chosen.
    """

    router: Linear
    experts: tuple[tuple[Gated, Linear], ...]
    top_k: int
    normalized: bool


class Attention(NamedTuple):
    """Causal attention of layer `layer` over its pages: norms of queries and keys if it has any, rotation, attention.

    `scale` is of the scores. Which positions a layer sees is in `ModelSpec.layer_windows`.
    """

    layer: int
    rope: RopeParameters
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None


def linear(name: str, num_out: int, num_in: int, cut: Cut | None = None, *, bias: bool = False) -> Linear:
    """One product; a bias is cut where outputs are."""
    weight = Parameter(f"{name}.weight", (num_out, num_in), cut)
    return Linear((weight,), (Parameter(f"{name}.bias", (num_out,), cut if cut and not cut.dim else None),) * bias)


def joined(*linears: Linear) -> Linear:
    """Several products of one input as one."""
    weights = tuple(weight for one in linears for weight in one.weights)
    return Linear(weights, tuple(bias for one in linears for bias in one.biases))


def parts_of(kinds: tuple[type[Part], ...], part: object) -> Iterator[Part]:
    """The parts of some kinds that a part is or has, in the order in which they are named."""
    if isinstance(part, kinds):
        yield part
    elif isinstance(part, tuple | list):
        for inner in cast("Sequence[object]", part):
            yield from parts_of(kinds, inner)
