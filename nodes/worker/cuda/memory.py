"""Whether a model, its activations and a KV pool fit into a device's memory, and how large a pool may be (arithmetic).

The bounds are of what this folder's network and sampler hold at once, tensor by tensor, not of what an allocator makes
of it; `measured_activation_bytes` asks the device, with a step of the largest size.
"""

from array import array
from typing import Final, NamedTuple

import torch

from kvstore.layout import ITEM_BYTES, PADDING_PAGE
from nodes.model_spec import ModelSpec
from nodes.worker.cuda.attention import DeviceAttention
from nodes.worker.cuda.batch import host_batch, pack, pinned, unpack
from nodes.worker.cuda.network import DeviceNetwork
from nodes.worker.errors import DeviceMemoryShort
from nodes.worker.step import RunnableRow, RunnableStep

_SAMPLER_COPIES: Final = 4
"""Float32 matrices of `[rows, vocab]` that the sampler has at once: logits, scaled, weights, and one being made."""
_GIB: Final = 1 << 30


class Footprint(NamedTuple):
    """Bytes on one device. `total` is the device's whole memory, `fraction` the share that may be used."""

    total: int
    fraction: float
    weights: int
    activations: int

    @property
    def left_for_pool(self) -> int:
        """Bytes that the pool may take; negative if weights and activations do not fit themselves."""
        return int(self.total * self.fraction) - self.weights - self.activations


def activation_bytes(spec: ModelSpec, dtype: str, max_batch_tokens: int, max_draws: int) -> int:
    """A bound on the memory of one step of `max_batch_tokens` rows, of which `max_draws` draw.

    The widest moment of a layer is either at attention (residual, norm, joint projection, result) or at the
    feed-forward product (residual, gate and up, their product); logits and the sampler's copies come after both.
    """
    size = ITEM_BYTES[dtype]
    heads = spec.num_heads * spec.head_dim
    joint = heads + 2 * spec.num_kv_heads * spec.head_dim
    attention = 2 * spec.hidden_size + joint + heads
    feed_forward = 2 * spec.hidden_size + 3 * spec.intermediate_size
    layers = max_batch_tokens * max(attention, feed_forward) * size
    draws = min(max_draws, max_batch_tokens)
    drawing = max_batch_tokens * 2 * spec.hidden_size * size + draws * spec.vocab_size * (size + 4 * _SAMPLER_COPIES)
    return max(layers, drawing)


def num_pages_that_fit(footprint: Footprint, page_bytes: int) -> int:
    """Pages of the largest pool, the padding page included. Raises DeviceMemoryShort if there is no room for two."""
    num_pages = footprint.left_for_pool // page_bytes
    if num_pages < 2:
        raise DeviceMemoryShort(_shortage(footprint, 2 * page_bytes, "the smallest pool"))
    return num_pages


def check_fit(footprint: Footprint, pool_bytes: int) -> None:
    """Raise DeviceMemoryShort unless a pool of `pool_bytes` leaves room for the rest."""
    if pool_bytes > footprint.left_for_pool:
        raise DeviceMemoryShort(_shortage(footprint, pool_bytes, "the pool"))


def largest_step(num_rows: int, page_size: int, context_length: int) -> RunnableStep:
    """A step of `num_rows` rows, or as many as one context has and one more: a decoding sequence and a chunk.

    Both are on the padding page, where nothing is lost, and go through every kernel that a step can need.
    """
    chunk = min(num_rows - 1, context_length)
    num_pages = -(-max(chunk, 1) // page_size)
    rows = [RunnableRow(0, 0, 1, 1, 0, 0, 1, None)]
    if chunk > 0:
        rows.append(RunnableRow(1, 0, chunk, chunk, 1, 0, num_pages, None))
    return RunnableStep(0, rows, array("i", [0] * (1 + chunk)), array("i", [PADDING_PAGE] * num_pages))


def measured_activation_bytes(network: DeviceNetwork, attention: DeviceAttention, num_rows: int, page_size: int) -> int:
    """Peak bytes that the largest step takes on the network's CUDA device, its kernels compiled and warm after it.

    Not yet run on a GPU.
    """
    device = network.device
    batch = host_batch(largest_step(num_rows, page_size, network.spec.context_length), page_size)
    arrays = unpack(pinned(pack(batch), device).to(device), batch.num_rows, 0)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attention.plan(batch, arrays)
    network.forward(arrays.token_ids, arrays.positions, attention, arrays.sampled)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _shortage(footprint: Footprint, pool_bytes: int, pool: str) -> str:
    budget = footprint.total * footprint.fraction
    return (
        f"weights ({footprint.weights / _GIB:.2f} GiB), activations ({footprint.activations / _GIB:.2f} GiB) and {pool}"
        f" ({pool_bytes / _GIB:.2f} GiB) take more than {footprint.fraction:.0%} of the device's"
        f" {footprint.total / _GIB:.2f} GiB, which is {budget / _GIB:.2f} GiB: give the pool fewer pages, lower the"
        " tokens of a step, or raise the memory fraction"
    )
