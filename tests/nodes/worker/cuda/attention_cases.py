"""Steps of random shape for backends of attention, without a model: all kinds of layers.

Also used by `tests/gpu`, on a device.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch

from kvstore.layout import KVLayout
from nodes.worker.ops.torch.batch import HostBatch, host_batch, pack, unpack
from nodes.worker.ops.torch.kinds import FULL, AttentionKind
from nodes.worker.pool.view import PoolView
from tests.nodes.worker.torch_running import Row, step

PAGE = 16
NUM_PAGES = 120
KINDS = (FULL, AttentionKind(37))


class Shape(NamedTuple):
    """Of one sequence: cached positions, new ones."""

    cached: int
    new: int


def layout_of(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, kinds: Sequence[AttentionKind]) -> KVLayout:
    assert num_heads % num_kv_heads == 0
    return KVLayout(num_layers=len(kinds), num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, page_size=PAGE)


def random_pool(num_heads: int, num_kv_heads: int, head_dim: int, dtype: str) -> PoolView:
    layout = layout_of(num_heads, num_kv_heads, head_dim, dtype, KINDS)
    view = PoolView(bytearray(NUM_PAGES * layout.page_bytes), layout)
    torch.manual_seed(99)
    view.pages.copy_(torch.randn(view.pages.shape))
    return view


def batch_of(shapes: Sequence[Shape], seed: int = 0) -> HostBatch:
    """One step, its sequences in the order of `shapes` but for single rows, which come first; pages in no order."""
    pages = Random(seed).sample(range(1, NUM_PAGES), NUM_PAGES - 1)

    def taken(length: int) -> list[int]:
        return [pages.pop() for _ in range(-(-length // PAGE))]

    shapes = sorted(shapes, key=lambda shape: shape.new > 1)
    return host_batch(step(*(Row(s.cached, [7] * s.new, taken(s.cached + s.new)) for s in shapes)), PAGE)


def attend(
    attention: object,
    batch: HostBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kinds: Sequence[AttentionKind],
) -> list[torch.Tensor]:
    """What each layer returns for the same rows."""
    packed = torch.from_numpy(pack(batch)).to(q.device)
    attention.plan(batch, unpack(packed, batch.num_rows, len(batch.sampled)))
    return [attention.attend(layer, q, k, v) for layer in range(len(kinds))]


def rows_of(
    batch: HostBatch, num_heads: int, layout: KVLayout, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all rows, side by side in one tensor, as a network has them."""
    torch.manual_seed(seed)
    joint = torch.randn(batch.num_rows, num_heads + 2 * layout.num_kv_heads, layout.head_dim).to(device, dtype)
    q, k, v = torch.split(joint, [num_heads, layout.num_kv_heads, layout.num_kv_heads], 1)
    return q, k, v


MIXED = [Shape(0, 20), Shape(70, 1), Shape(21, 30), Shape(0, 1), Shape(48, 100), Shape(33, 1), Shape(15, 2)]
"""Chunks and single rows; edges of pages and of the window inside and outside."""
