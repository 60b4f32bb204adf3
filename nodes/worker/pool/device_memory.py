"""Whether a model, its activations and a KV pool fit into a device's memory, and how large a pool may be (arithmetic).

Needs no torch: `meshctl up` plans pools with it, and the worker checks its measurements with it. The bounds count the
tensors that the device network and its sampler hold at once, not what an allocator adds.
"""

import math
from fractions import Fraction
from typing import Final, NamedTuple

from kvstore.layout import ITEM_BYTES
from nodes.model_spec import ModelSpec
from nodes.models.parts import Attention, parts_of
from nodes.models.registry import model_of, parameters
from nodes.worker.errors import DeviceMemoryShort

_SAMPLER_COPIES: Final = 4
"""Float32 matrices of `[rows, vocab]` that the sampler holds at once: logits, scaled, weights, and one being made."""
SUMMED_ROWS: Final = 512
"""Rows that are summed over ranks at once if the order of the sum is fixed, which needs the rows of all ranks."""
_GIB: Final = 1 << 30


class Footprint(NamedTuple):
    """Bytes on one device. `total` is the device's whole memory, `fraction` the share that may be used."""

    total: int
    fraction: float
    weights: int
    activations: int

    @property
    def left_for_pool(self) -> int:
        """Bytes that the pool may take; negative if weights and activations alone do not fit."""
        return int(self.total * self.fraction) - self.weights - self.activations


def weight_bytes(spec: ModelSpec, dtype: str, tp_size: int = 1) -> int:
    """Bytes of the weights of `spec` in `dtype`, and of the float32 tables of rotary angles, on one rank's device.

    Raises TensorParallelUnfit.
    """
    num_tables = len({one.rope for one in parts_of((Attention,), model_of(spec).layers) if one.rope is not None})
    return parameter_bytes(spec, dtype, tp_size) + num_tables * spec.context_length * spec.head_dim * 4


def parameter_bytes(spec: ModelSpec, dtype: str, tp_size: int = 1) -> int:
    """Bytes of rank 0's weights alone; it has a few more biases than the others. Raises TensorParallelUnfit."""
    shard = spec.shard(0, tp_size)
    count = 0
    for parameter in parameters(spec).values():
        part = shard.part_of(parameter.cut)
        share = 1 if part is None else Fraction(part.end - part.begin, parameter.shape[part.dim])
        count += int(math.prod(parameter.shape) * share)
    return count * ITEM_BYTES[dtype]


def activation_bytes(spec: ModelSpec, dtype: str, max_batch_tokens: int, max_draws: int, tp_size: int = 1) -> int:
    """A bound on the memory of one step of `max_batch_tokens` rows, of which `max_draws` draw, on each rank's device.

    The widest moment of a layer is either at attention (residual, norm, joint projection, result) or at the
    feed-forward product (residual, gate and up, their product); logits and the sampler's copies come after both.
    """
    size = ITEM_BYTES[dtype]
    shard = spec.shard(0, tp_size)
    heads = shard.num_heads * spec.head_dim
    joint = heads + 2 * shard.num_kv_heads * spec.head_dim
    attention = 2 * spec.hidden_size + joint + heads
    feed_forward = 2 * spec.hidden_size + 3 * max(len(shard.inner), len(shard.dense))
    if spec.num_experts:
        # The rows of one expert, its results, and the float32 sum over all experts.
        feed_forward += 5 * spec.hidden_size
    layers = max_batch_tokens * max(attention, feed_forward) * size
    if tp_size > 1:
        # The gathered rows of all ranks: as they arrive, and again in the order of rows.
        layers += min(SUMMED_ROWS, max_batch_tokens) * 2 * tp_size * spec.hidden_size * size
    draws = min(max_draws, max_batch_tokens)
    drawing = max_batch_tokens * 2 * spec.hidden_size * size + draws * spec.vocab_size * (size + 4 * _SAMPLER_COPIES)
    return max(layers, drawing)


def check_fit(footprint: Footprint, pool_bytes: int) -> None:
    """Raise DeviceMemoryShort, with the numbers, unless a pool of `pool_bytes` leaves room for the rest."""
    if pool_bytes <= footprint.left_for_pool:
        return
    raise DeviceMemoryShort(
        f"weights ({footprint.weights / _GIB:.2f} GiB), activations ({footprint.activations / _GIB:.2f} GiB) and the"
        f" pool ({pool_bytes / _GIB:.2f} GiB) take more than {footprint.fraction:.0%} of the device's"
        f" {footprint.total / _GIB:.2f} GiB, which is {footprint.total * footprint.fraction / _GIB:.2f} GiB: give the"
        " pool fewer pages, lower the tokens per step, or raise the memory fraction"
    )
