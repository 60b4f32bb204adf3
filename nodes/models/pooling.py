"""How a model's hidden states become one vector or some scores: what is pooled, and what comes after it.

Read from the files of a model directory by `nodes/model_spec`, computed by workers; gateways normalise what they get.
"""

from typing import Final, Literal

import msgspec

Pool = Literal["last", "mean", "cls"]
"""Which hidden states, after the final norm, make the vector: the last position's, the mean of all, the first one's."""
POOLS: Final[tuple[Pool, ...]] = ("last", "mean", "cls")

DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid"]
Activation = Literal["identity", "sigmoid", "softmax"]


class Dense(msgspec.Struct, frozen=True):
    """`activation(x @ weight.T + bias)` of one vector: `num_out` numbers from `num_in`.

    `weight` and `bias` are names of tensors (`bias` empty: none), in the safetensors file `path`, or, if that is empty,
    in the model's own weights. `rows`, if any, are the rows of `weight` that are used, in this order.
    """

    num_in: int
    num_out: int
    weight: str
    bias: str = ""
    activation: DenseActivation = "identity"
    path: str = ""
    rows: tuple[int, ...] = ()


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """What a request for a vector gets of this model.

    `dense` come one after the other behind the pooling, in float32. `kind` says what the result is: an `embedding`;
    logits of classes that are named `labels` (`classify`); one score of a pair or a text, whose `activation` makes it
    what answers show (`score`); or the two logits of `no` and `yes`, whose softmax is the score (`yes_no`).
    `normalize`: embeddings are divided by their length. `prompts` are texts to put before an input, by name, and
    `default_prompt` is the name of the one that is used if a request names none. `max_length`: longest input in
    tokens, special ones included (0: the model's context).
    """

    pool: Pool
    kind: Literal["embedding", "classify", "score", "yes_no"] = "embedding"
    normalize: bool = False
    dense: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    max_length: int = 0

    def num_dimensions(self, hidden_size: int) -> int:
        """How many numbers a vector of a model of `hidden_size` has."""
        return self.dense[-1].num_out if self.dense else hidden_size
