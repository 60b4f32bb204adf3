"""Attention over pages is dense attention under a mask, whatever the window, the chunks and the batch."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.layout import KVLayout
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.kinds import FULL, AttentionKind
from nodes.worker.pool.view import PoolView
from tests.nodes.worker.spans import Span, planned

NUM_PAGES = 13
DIM = 16


def paged(num_heads: int, num_kv_heads: int, kinds: Sequence[AttentionKind]) -> TorchAttention:
    layout = KVLayout(num_layers=len(kinds), num_kv_heads=num_kv_heads, head_dim=DIM, dtype="float32", page_size=16)
    pool = PoolView(bytearray((1 + 2 * NUM_PAGES) * layout.page_bytes), layout)
    return TorchAttention(pool, num_heads, kinds)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """`[rows, heads, dim]` each, all positions: transformers' mask, `kv <= q` and `kv > q - window`."""
    positions = torch.arange(len(q))
    seen = positions <= positions.unsqueeze(1)
    if window:
        seen &= positions > positions.unsqueeze(1) - window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    window=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 66, 127, 128, 129]), st.integers(1, 250)),
    edges=st.sets(st.integers(1, 189), max_size=6),
    seed=st.integers(0, 99),
)
def test_chunks_under_a_window(heads: tuple[int, int], window: int, edges: set[int], seed: int) -> None:
    """The last ten rows one by one, beside a longer sequence; full and sliding layers of one model in turn."""
    kinds = [FULL, AttentionKind(window)]
    attention = paged(*heads, kinds)
    torch.manual_seed(seed)
    length = 200
    q, k, v = (torch.randn(length, n, DIM) for n in (heads[0], heads[1], heads[1]))
    pages = [np.arange(1 + n * NUM_PAGES, 1 + (n + 1) * NUM_PAGES, dtype=np.int32) for n in (0, 1)]

    def attend(*rows_of: tuple[int, int, int]) -> list[torch.Tensor]:
        planned(attention, 16, [Span(begin, end, pages[copy]) for copy, begin, end in rows_of])
        rows = torch.cat([torch.arange(begin, end) for _, begin, end in rows_of])
        return [attention.attend(n, q[rows], k[rows], v[rows]) for n in range(len(kinds))]

    attend((1, 0, length - 1))
    found = [attend((0, begin, end)) for begin, end in pairwise([0, *sorted(edges), 190])]
    for end in range(190, length):
        both = attend((1, length - 1, length), (0, end, end + 1))
        found.append([layer[1:] for layer in both])
    for layer, kind in enumerate(kinds):
        rows = torch.cat([step[layer] for step in found])
        assert torch.allclose(rows, dense(q, k, v, kind.window), atol=1e-5, rtol=0)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=2), heads=st.sampled_from([(4, 2), (3, 3)]))
def test_whole_sequences_beside_each_other(lengths: list[int], heads: tuple[int, int]) -> None:
    attention = paged(*heads, [AttentionKind(sees_all=True)])
    attention.pool.pages.fill_(torch.nan)
    lengths.sort(key=lambda length: length > 1)
    pages = [np.arange(1 + n * NUM_PAGES, 1 + (n + 1) * NUM_PAGES, dtype=np.int32) for n in (0, 1)]
    q, k, v = (torch.randn(sum(lengths), n, DIM) for n in (heads[0], heads[1], heads[1]))
    planned(attention, 16, [Span(0, length, pages[n]) for n, length in enumerate(lengths)])
    found = attention.attend(0, q, k, v).split(lengths)
    for rows, *own in zip(found, *(x.split(lengths) for x in (q, k, v)), strict=True):
        turned = (x.transpose(0, 1).unsqueeze(0) for x in own)
        right = F.scaled_dot_product_attention(*turned, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        assert torch.allclose(rows, right, atol=1e-5, rtol=0)
