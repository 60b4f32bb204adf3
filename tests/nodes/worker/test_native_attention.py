"""Native attention beside torch's, and bit by bit beside itself: alone, in chunks, in a crowd, over poisoned pages."""

import ctypes
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.layout import KVLayout
from nodes.model_spec import RopeParameters, resolve_model
from nodes.models.ops import Ops, Value
from nodes.models.parts import Attention, Embedding, Linear, Norm, Parameter
from nodes.worker.ops.native.attention import MAX_BLOCK_ROWS
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.packed_weight import PackedWeight
from nodes.worker.ops.native.program import ProgramUnfit
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.ops.native.weights import Weights
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.kinds import AttentionKind
from nodes.worker.ops.torch.rotary import RotaryTable
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from tests.nodes.worker.spans import Span, planned

MAX_TOKENS = 200
NUM_LAYERS = 2
ROPE = RopeParameters(theta=10_000.0)
PLAIN = RopeParameters(rope_type="linear", factor=1e30)
"""Turns nothing: what follows attention alone is then equal to the bit."""


class Shape(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    window: int
    dtype: str


def pool_of(shape: Shape, num_sequences: int) -> PoolView:
    """Full of what others have left."""
    layout = KVLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        page_size=shape.page_size,
    )
    num_pages = 1 + num_sequences * layout.num_pages_for(MAX_TOKENS)
    view = PoolView(bytearray(num_pages * layout.page_bytes), layout)
    view.pages.fill_(float("nan"))
    return view


def span_of(pool: PoolView, sequence: int, start: int, end: int) -> Span:
    each = pool.layout.num_pages_for(MAX_TOKENS)
    first = 1 + sequence * each
    return Span(start, end, np.arange(first, first + pool.layout.num_pages_for(end), dtype=np.int32)[::1])


def heads_of(shape: Shape, sequence: int) -> torch.Tensor:
    """Projected queries, keys and values of all positions of a sequence."""
    width = (shape.group + 2) * shape.kv_heads * shape.head_dim
    drawn = torch.randn(MAX_TOKENS, width, generator=torch.Generator().manual_seed(sequence))
    return drawn.to(TORCH_DTYPES[shape.dtype])


class NativeAttention:
    """A program of nothing but attention: its tokens are rows of queries, keys and values."""

    def __init__(
        self,
        library: Library,
        pool: PoolView,
        shape: Shape,
        rope: RopeParameters = PLAIN,
        norms: tuple[torch.Tensor, ...] = (),
        scale: float = 0.0,
    ) -> None:
        heads, dim, dtype = shape.kv_heads * shape.group, shape.head_dim, TORCH_DTYPES[shape.dtype]
        parts = [Norm(Parameter(name, (dim,)), 1e-6) for name in ("q", "k")[: len(norms)]]
        self._attentions = [Attention(n, rope, scale or dim**-0.5, *parts) for n in range(NUM_LAYERS)]
        self._rows = torch.zeros(3 * MAX_TOKENS, (heads + 2 * shape.kv_heads) * dim, dtype=dtype)
        self._width = heads * dim
        head = PackedWeight(library, (torch.zeros(1, self._width, dtype=dtype),))
        weights = Weights(dtype, self._rows, {"head": head}, dict(zip(("q", "k"), norms, strict=False)))
        spec = msgspec.structs.replace(
            resolve_model("random:tiny-qwen3"), num_layers=NUM_LAYERS, num_heads=heads, num_kv_heads=shape.kv_heads,
            head_dim=dim, vocab_size=1, sliding_window=shape.window,
            sliding_layers=range(NUM_LAYERS) if shape.window else (),
        )  # fmt: skip
        model: Any = self
        self._steps = NativeSteps(spec, library, weights, model, pool)

    def run(self, ops: Ops[Value]) -> Value:
        rows = ops.embed(Embedding(Parameter("rows", self._rows.shape)))
        found = [ops.attend(rows, one) for one in self._attentions]
        return ops.head(found[-1], Linear((Parameter("head", ()),)))

    def attended(self, qkv: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        self._rows[: len(qkv)] = qkv
        counts = [span.num_tokens for span in spans]
        pages = np.cumsum([0, *(len(span.page_ids) for span in spans)])
        firsts = np.cumsum([0, *counts])
        table = [(span.start, span.num_tokens, pages[n], firsts[n]) for n, span in enumerate(spans)]
        every = np.arange(len(qkv), dtype=np.int32)
        page_ids = np.concatenate([span.page_ids for span in spans])
        self._steps.run(Columns(every, np.array(table, dtype=np.int32).ravel(), page_ids, every))
        program = self._steps._program
        _, out = program._attended[-1]
        size, at = len(qkv) * self._width * out.item_bytes, program._buffers[out.number].at
        # A build without products of bfloat16 pairs keeps rows as float32: rounded all the same, which the test holds.
        dtype = qkv.dtype if out.item_bytes == qkv.itemsize else torch.float32
        found = torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=dtype)
        assert torch.equal(found.nan_to_num(), found.to(qkv.dtype).to(dtype).nan_to_num())
        return found.view(len(qkv), self._width).to(torch.float32, copy=True)


def rows_of(shape: Shape, spans: list[tuple[int, Span]]) -> torch.Tensor:
    return torch.cat([heads_of(shape, sequence)[span.start : span.end] for sequence, span in spans])


def attended(backend: NativeAttention | TorchAttention, shape: Shape, spans: list[tuple[int, Span]]) -> torch.Tensor:
    qkv, of_sequences = rows_of(shape, spans), [span for _, span in spans]
    if isinstance(backend, NativeAttention):
        return backend.attended(qkv, of_sequences)
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    counts = [shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads]
    q, k, v = torch.split(heads, counts, 1)
    planned(backend, shape.page_size, of_sequences)
    return backend.attend(1, q, k, v).float()


SHAPES = st.builds(
    Shape,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 7, 64]),
    st.sampled_from([2, 12, 64, 80, 256]),
    st.sampled_from([1, 8, 16, 64]),
    st.sampled_from([0, 1, 37, 64, 100]),
    st.sampled_from(["float32", "bfloat16"]),
)
ENDS = st.lists(st.sets(st.integers(1, MAX_TOKENS), min_size=1, max_size=4).map(sorted), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=SHAPES, ends=ENDS, threads=st.integers(1, 3))
def test_any_batch_is_torchs_attention_with_the_bits_of_each_alone(
    library: Library, shape: Shape, ends: list[list[int]], threads: int
) -> None:
    """Sequences reach each of their `ends` in a step of its own, the last step one row each beside chunks of others."""
    kinds = [AttentionKind(window=shape.window)] * 2
    num_heads, together, alone = shape.kv_heads * shape.group, pool_of(shape, len(ends)), pool_of(shape, len(ends))
    by_torch = pool_of(shape, len(ends))
    by_torch.pages.zero_()
    crowd, single = (NativeAttention(library, pool, shape) for pool in (together, alone))
    oracle = TorchAttention(by_torch, num_heads, kinds)
    whole: dict[int, torch.Tensor] = {}
    for sequence, own in enumerate(ends):
        library.set_threads(1)
        span = span_of(alone, sequence, 0, own[-1])
        whole[sequence] = attended(single, shape, [(sequence, span)])
        right = attended(oracle, shape, [(sequence, span)])
        # In bfloat16 what is nearly between two numbers is rounded either way.
        assert torch.allclose(whole[sequence], right, rtol=1e-4 if shape.dtype == "float32" else 1e-2, atol=1e-5)
        written = [pool.pages[span.page_ids.astype(np.int64), 1] for pool in (alone, by_torch)]
        assert torch.equal(*written)
    library.set_threads(threads)
    done = dict.fromkeys(whole, 0)
    for number in range(4):
        spans = [(sequence, span_of(together, sequence, done[sequence], own[number]))
                 for sequence, own in enumerate(ends) if number < len(own)]  # fmt: skip
        spans.sort(key=lambda one: one[1].num_tokens > 1)
        if not spans:
            break
        found = attended(crowd, shape, spans)
        row = 0
        for sequence, span in spans:
            expected = whole[sequence][span.start : span.end]
            assert torch.equal(found[row : row + span.num_tokens], expected), (sequence, span.start, span.end)
            row += span.num_tokens
            done[sequence] = span.end


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_norms_and_rotation_are_torchs(library: Library, dtype: str, head_dim: int) -> None:
    shape = Shape(2, 3, head_dim, 16, 0, dtype)
    native, by_torch = pool_of(shape, 1), pool_of(shape, 1)
    by_torch.pages.zero_()
    qkv, rope = heads_of(shape, 0)[:90], RotaryTable(ROPE, head_dim)
    norms = tuple(1 + 0.1 * torch.randn(2, head_dim, generator=torch.Generator().manual_seed(1)))
    heads = qkv.view(90, -1, head_dim)
    turned = torch.rms_norm(heads[:, :8].float(), [head_dim], None, 1e-6)
    turned[:, :6] *= norms[0]
    turned[:, 6:] *= norms[1]
    cos, sin = (table[:90].unsqueeze(1) for table in rope.tables(90))
    turned = turned * cos + turned.roll(head_dim // 2, -1) * sin
    oracle = TorchAttention(by_torch, 6)
    span = [span_of(native, 0, 0, 90)]
    scaled = turned[:, :6] * 0.5
    planned(oracle, 16, span)
    right = oracle.attend(1, scaled, turned[:, 6:8].to(qkv.dtype), heads[:, 8:])
    backend = NativeAttention(library, native, shape, ROPE, norms, 0.5 * head_dim**-0.5)
    found = backend.attended(qkv, span)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    assert torch.allclose(found, right, rtol=tolerance, atol=tolerance)
    rows = span[0].page_ids.astype(np.int64)
    assert torch.allclose(
        native.pages[rows, 1].float(), by_torch.pages[rows, 1].float(), rtol=tolerance, atol=tolerance
    )


def test_a_poisoned_sequence_keeps_its_poison(library: Library) -> None:
    shape = Shape(2, 2, 64, 16, 0, "float32")
    pool = pool_of(shape, 2)
    backend = NativeAttention(library, pool, shape)
    spans = [(sequence, span_of(pool, sequence, 0, 100)) for sequence in (0, 1)]
    clean = attended(backend, shape, spans)[100:]
    for poison in (float("nan"), float("inf")):
        pool.pages[1, 1, 0, 3] = poison
        last = [(sequence, span_of(pool, sequence, 99, 100)) for sequence in (0, 1)]
        found = attended(backend, shape, last)
        assert bool(found[0].isnan().all())
        assert torch.equal(found[1], clean[99])


def test_what_the_kernels_do_not_take_is_refused(library: Library) -> None:
    for shape in (Shape(1, 1, 258, 16, 0, "float32"), Shape(1, MAX_BLOCK_ROWS + 1, 64, 16, 0, "float32")):
        with pytest.raises(ProgramUnfit, match="native attention supports even head sizes"):
            NativeAttention(library, pool_of(shape, 1), shape)
