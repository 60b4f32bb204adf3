"""Layers of every kind, by torch against dense attention, and by FlashInfer's calls against torch."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.worker.cuda.flashinfer_backend import FlashInferAttention
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.batch import HostBatch
from nodes.worker.ops.torch.kinds import AttentionKind
from nodes.worker.pool.view import PoolView
from tests.nodes.worker.cuda import fake_flashinfer
from tests.nodes.worker.cuda.attention_cases import KINDS, MIXED, Shape, attend, batch_of, random_pool, rows_of

SHAPES = st.lists(st.builds(Shape, st.integers(0, 60), st.sampled_from([1, 1, 2, 17, 40])), min_size=1, max_size=5)


def dense(view: PoolView, layer: int, kind: AttentionKind, batch: HostBatch, q: torch.Tensor) -> torch.Tensor:
    """Each sequence alone, through torch's own attention, over what its pages hold after the step."""
    table = batch.table
    out = []
    for i in range(table.num_sequences):
        rows = q[table.query_indptr[i] : table.query_indptr[i + 1]]
        length, num_rows = int(table.lengths[i]), len(rows)
        pages = view.pages[torch.from_numpy(table.indices[table.indptr[i] : table.indptr[i + 1]]), layer]
        keys, values = (pages[:, part].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0) for part in (0, 1))
        own, positions = torch.arange(length - num_rows, length).unsqueeze(1), torch.arange(length)
        seen = positions <= own
        if kind.window:
            seen = seen & (positions > own - kind.window)
        heads = rows.transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(heads, keys, values, seen, enable_gqa=True)
        out.append(attended[0].transpose(0, 1).flatten(1))
    return torch.cat(out)


def check_torch(shapes: Sequence[Shape], heads: tuple[int, int], seed: int) -> None:
    view = random_pool(*heads, 16, "float32")
    batch = batch_of(shapes, seed)
    q, k, v = rows_of(batch, heads[0], view.layout, torch.float32, seed=seed)
    found = attend(TorchAttention(view, heads[0], KINDS), batch, q, k, v, KINDS)
    for layer, kind in enumerate(KINDS):
        assert torch.allclose(found[layer], dense(view, layer, kind, batch, q), atol=1e-5, rtol=0), kind


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([(4, 2), (3, 1), (2, 2)]), st.integers(0, 99))
def test_every_kind_is_dense_attention_under_its_mask(shapes: list[Shape], heads: tuple[int, int], seed: int) -> None:
    check_torch(shapes, heads, seed)


def test_chunks_and_single_rows_together() -> None:
    check_torch(MIXED, (4, 2), 3)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flashinfer_is_asked_for_the_same(heads: tuple[int, int], deterministic: bool) -> None:
    view = random_pool(*heads, 64, "bfloat16")
    batch = batch_of(MIXED)
    q, k, v = rows_of(batch, heads[0], view.layout, torch.bfloat16)
    expected = attend(TorchAttention(view, heads[0], KINDS), batch, q, k, v, KINDS)
    fast = FlashInferAttention(fake_flashinfer, view, heads[0], 400, KINDS, deterministic=deterministic)
    found = attend(fast, batch, q, k, v, KINDS)
    for layer in range(len(KINDS)):
        assert torch.allclose(found[layer].float(), expected[layer].float(), atol=0.02, rtol=0.02)
