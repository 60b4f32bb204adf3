"""Paged attention by the native kernels, with norms of heads, rotation and the writing of pages in the same call."""

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nodes.worker.attention.base import Span
from nodes.worker.attention.kinds import FULL, AttentionKind
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.native.library import Library
from nodes.worker.ops.native.linear import DTYPES
from nodes.worker.pool.view import PoolView

MAX_HEAD_DIM: Final = 256
MAX_BLOCK_ROWS: Final = 64
"""Both as in attention.h."""


class AttendCall(Structure):
    """`AttendCall` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cos", "sin", "pool")),
        *((name, c_int64) for name in ("page_bytes", "value_bytes")),
        *((name, c_void_p) for name in ("spans", "pages", "blocks")),
        *((name, c_int32) for name in ("num_blocks", "has_chunks", "page_size", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("window", "qk_dtype", "v_dtype", "out_dtype")),
        *((name, c_float) for name in ("eps", "scale")),
    )


class Rotation(NamedTuple):
    """Tables of cosines and of sines, the first half of them negated: float32 `[positions, head_dim]`."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """Weights of the norms of each head, float32 `[head_dim]`."""

    query: Tensor
    key: Tensor
    eps: float


class NativePlan(NamedTuple):
    """One step; arrays as attention.h has them. `num_positions`: the highest end of a span."""

    spans: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    has_chunks: bool
    num_rows: int
    num_positions: int


class NativeAttention:
    """An `AttentionBackend` over a pool in this machine's memory. `kinds` are those of the layers, all full by default.

    Raises BackendMissing for cross-attention, and for heads of a size or a number that the kernels do not take.
    """

    def __init__(self, library: Library, pool: PoolView, num_heads: int, kinds: Sequence[AttentionKind] = ()) -> None:
        self.layout = layout = pool.layout
        self.num_heads = num_heads
        self._library = library
        self._kinds = tuple(kinds) or (FULL,) * layout.num_layers
        group = num_heads // layout.num_kv_heads
        if layout.head_dim > MAX_HEAD_DIM or layout.head_dim % 2 or group > MAX_BLOCK_ROWS:
            raise BackendMissing(
                f"native attention takes even heads up to {MAX_HEAD_DIM} and up to {MAX_BLOCK_ROWS} query heads of one"
                f" KV head, not {layout.head_dim} and {group}"
            )
        if any(kind.cross for kind in self._kinds):
            raise BackendMissing("the kernels compute no cross-attention: set the worker's device to a CUDA device")
        self._block_tokens = MAX_BLOCK_ROWS // group
        self._pool: PoolView | None = pool

    def over(self, pool: PoolView) -> "NativeAttention":
        """The same over another pool, whose layers all see everything."""
        return NativeAttention(self._library, pool, self.num_heads)

    def unmap(self) -> None:
        """Forget the pool; nothing can be computed until `remap`."""
        self._pool = None

    def remap(self, pool: PoolView) -> None:
        """Compute over another pool of the same layout."""
        self._pool = pool

    def plan(self, spans: Sequence[Span]) -> NativePlan:
        """See `AttentionBackend.plan`; spans in any order."""
        starts, ends = (np.array([getattr(span, name) for span in spans], dtype=np.int32) for name in ("start", "end"))
        tokens = ends - starts
        lengths = [len(span.page_ids) for span in spans]
        table = np.empty((len(spans), 4), dtype=np.int32)
        table[:, 0], table[:, 1] = starts, tokens
        table[:, 2] = [0, *accumulate(lengths[:-1])]
        table[:, 3] = np.concatenate(([0], np.cumsum(tokens)[:-1]))
        size = self._block_tokens
        per_span = -(-tokens // size)
        blocks = np.empty((int(per_span.sum()), 3), dtype=np.int32)
        blocks[:, 0] = np.repeat(np.arange(len(spans)), per_span)
        blocks[:, 1] = size * (np.arange(len(blocks)) - np.repeat(np.cumsum(per_span) - per_span, per_span))
        blocks[:, 2] = np.minimum(tokens[blocks[:, 0]] - blocks[:, 1], size)
        pages = np.concatenate([span.page_ids for span in spans]).astype(np.int32, copy=False)
        return NativePlan(table, pages, blocks, bool((tokens > 1).any()), int(tokens.sum()), int(ends.max()))

    def attend(self, layer: int, plan: NativePlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`: everything before attention is done."""
        out = torch.zeros(q.shape[0], self.num_heads * self.layout.head_dim)
        self._attend(layer, plan, (q, k, v), out, self.layout.head_dim**-0.5, None, None)
        return out

    def attend_projected(
        self, layer: int, plan: NativePlan, qkv: Tensor, scale: float, rotation: Rotation, norms: HeadNorms | None
    ) -> Tensor:
        """The same from what was projected, `[rows, (heads + 2 * kv_heads) * head_dim]`; all that follows is done here.

        Scores are scaled by `scale`. Returns `[rows, heads * head_dim]` in the dtype of `qkv`.
        """
        layout = self.layout
        heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
        parts = torch.split(heads, [self.num_heads, layout.num_kv_heads, layout.num_kv_heads], 1)
        out = torch.empty(qkv.shape[0], self.num_heads * layout.head_dim, dtype=qkv.dtype)
        self._attend(layer, plan, parts, out, scale, rotation, norms)
        return out

    def _attend(
        self,
        layer: int,
        plan: NativePlan,
        heads: Sequence[Tensor],
        out: Tensor,
        scale: float,
        rotation: Rotation | None,
        norms: HeadNorms | None,
    ) -> None:
        assert self._pool is not None, "it was unmapped"
        layout, pages = self.layout, self._pool.pages
        q, k, v = heads
        # Rows are read by their stride, heads of one row lie side by side.
        assert all(one.stride()[1:] == (layout.head_dim, 1) and one.shape[0] >= plan.num_rows for one in heads)
        assert q.dtype == k.dtype
        assert v.dtype == pages.dtype
        assert rotation is None or len(rotation.cos) >= plan.num_positions, "positions beyond the table"
        call = AttendCall(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            pool=pages.data_ptr() + layer * pages.stride(1) * pages.itemsize,
            page_bytes=pages.stride(0) * pages.itemsize,
            value_bytes=pages.stride(2) * pages.itemsize,
            spans=plan.spans.ctypes.data,
            pages=plan.pages.ctypes.data,
            blocks=plan.blocks.ctypes.data,
            num_blocks=len(plan.blocks),
            has_chunks=plan.has_chunks,
            page_size=layout.page_size,
            heads=self.num_heads,
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            window=self._kinds[layer].window,
            qk_dtype=DTYPES[q.dtype],
            v_dtype=DTYPES[v.dtype],
            out_dtype=DTYPES[out.dtype],
            scale=scale,
        )
        if rotation is not None:
            call.cos, call.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        if norms is not None:
            call.q_norm, call.k_norm, call.eps = norms.query.data_ptr(), norms.key.data_ptr(), norms.eps
        self._library.functions.kvmesh_attend(byref(call))
