"""The operations that a network is computed with: eleven coarse ones, on values that the network never looks into.

Implemented over torch for any device (`nodes.worker.ops.torch.network`, the oracle), and by recording a program of
native kernels (`nodes.worker.ops.native.recording`).
An implementation gets a model's parts when it loads their weights, and a step before each run: token ids, positions and
pages, and which rows are sampled or pooled. As one rank of a group it also sums the results that the ranks hold parts
of, according to the cuts of the tensors. Which operations a network calls never depends on computed numbers, so a run
can be captured and replayed.
"""

from typing import Protocol, TypeVar

from nodes.models.parts import Activated, Attention, Embedding, Experts, Gated, LayerNorm, Linear, Norm

Value = TypeVar("Value")


class Ops(Protocol[Value]):
    """Operations on `[rows, n]`. `add` is added to the result; the caller must not use it afterwards."""

    def embed(self, by: Embedding) -> Value:
        """The step's tokens as hidden states."""
        ...

    def norm(self, x: Value, by: Norm, add: Value | None = None) -> Value:
        """RMS norm of each row."""
        ...

    def layer_norm(self, x: Value, by: LayerNorm) -> Value:
        """Hidden states with each row normed, in place of `x`, which the caller must not use afterwards."""
        ...

    def linear(self, x: Value, by: Linear, add: Value | None = None) -> Value:
        """A product, summed over all ranks if they hold parts of it."""
        ...

    def gated(self, x: Value, by: Gated) -> Value:
        """The first half of a gated feed-forward layer."""
        ...

    def activated(self, x: Value, by: Activated) -> Value:
        """The first half of a feed-forward layer without a gate."""
        ...

    def moe(self, x: Value, by: Experts, add: Value) -> Value:
        """A feed-forward layer of experts, summed over all ranks if they hold parts of each expert."""
        ...

    def attend(self, qkv: Value, by: Attention) -> Value:
        """Write keys and values to the layer's pages, then attend over them: `[rows, heads * head_dim]`.

        `qkv` is `[rows, (heads + 2 * kv_heads) * head_dim]`: queries, keys, values.
        """
        ...

    def pool(self, x: Value, by: Norm | None = None) -> None:
        """Keep the rows that vectors are made of, normed by `by`, in float32: `[pooled rows, n]`."""
        ...

    def select(self, x: Value) -> Value:
        """The rows that are sampled."""
        ...

    def head(self, x: Value, by: Linear) -> Value:
        """Logits `[rows, vocab]`, gathered from all ranks."""
        ...
