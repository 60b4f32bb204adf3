"""What a network asks of whatever computes it: some ten coarse operations on values that only they look into.

Implemented over torch for any device (`nodes.worker.ops.torch.network`) and for the CPU alone (`host_network`, the
oracle), and by recording a program of native kernels (`nodes.worker.ops.native.recording`).
An implementation is given a model's parts when it loads their weights, and a step before the network runs: token ids,
positions and pages, which rows are sampled. Where it is one rank of a group it also adds up what ranks hold parts of,
as the cuts of the tensors say. Nothing that a network asks depends on numbers, so a run can be captured and replayed.
"""

from typing import Protocol, TypeVar

from nodes.models.parts import Attention, Embedding, Experts, Gated, Linear, Norm

Value = TypeVar("Value")


class Ops(Protocol[Value]):
    """Operations on `[rows, n]`. What is given as `add` is added to the result, and must not be used any more."""

    def embed(self, by: Embedding) -> Value:
        """The step's tokens as hidden states."""
        ...

    def norm(self, x: Value, by: Norm, add: Value | None = None) -> Value:
        """RMS norm of each row."""
        ...

    def linear(self, x: Value, by: Linear, add: Value | None = None) -> Value:
        """A product, the sum of all ranks' where they hold parts of it."""
        ...

    def gated(self, x: Value, by: Gated) -> Value:
        """The first half of a gated feed-forward layer."""
        ...

    def moe(self, x: Value, by: Experts, add: Value) -> Value:
        """A feed-forward layer of experts, the sum of all ranks' where they hold parts of each."""
        ...

    def attend(self, qkv: Value, by: Attention) -> Value:
        """Attention of the layer over its pages, to which keys and values are written: `[rows, heads * head_dim]`.

        `qkv` is `[rows, (heads + 2 * kv_heads) * head_dim]`: queries, keys, values.
        """
        ...

    def select(self, x: Value) -> Value:
        """The rows that are sampled."""
        ...

    def head(self, x: Value, by: Linear) -> Value:
        """Logits `[rows, vocab]`, gathered from all ranks."""
        ...
