"""The device network's interface to attention, and its plain torch form, the oracle of all others.

Unlike the CPU's backends these keep the plan of the step between calls, because a captured graph has no arguments.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from nodes.worker.attention.kinds import FULL, AttentionKind
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.torch.batch import DeviceBatch, HostBatch, PageTable
from nodes.worker.ops.torch.merged import attend_part, merge
from nodes.worker.pool.view import PoolView


def check_mergeable(kinds: Sequence[AttentionKind]) -> None:
    """Raises BackendMissing if a layer has a window.

    Its start within the cached positions differs per row, which FlashInfer cannot express in one call.
    """
    if any(kind.window for kind in kinds):
        raise BackendMissing(
            "prefill_attention merged does not support sliding windows: set the worker's prefill_attention to paged"
        )


class DeviceAttention(Protocol):
    """Causal attention with grouped heads over pages, and the writing of pages. One step at a time.

    What a layer sees is its `AttentionKind`, given when the backend is made.
    """

    can_capture: bool
    """Whether `attend` may be captured as part of a CUDA graph."""

    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        """Prepare attention in all layers for one step. Never captured; may wait for the previous plan."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write `k` and `v` to their pages, then attend over the pages.

        `q` is `[rows, heads, head_dim]`, the others `[rows, kv_heads, head_dim]`, in the pool's dtype; rows may be
        strided. Returns `[rows, heads * head_dim]`.
        """
        ...

    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "DeviceAttention":
        """Attention for decode steps of exactly `num_rows` rows, whose arrays always lie in `on_device`."""
        ...


class TorchAttention(DeviceAttention):
    """Gathers each sequence's pages and attends in float32. Slow but correct, on any device.

    `kinds` are those of the layers; by default all layers see everything. `merged`: sequences with several rows are
    computed as in `nodes.worker.ops.torch.merged`; raises BackendMissing if a layer has a window.
    """

    def __init__(
        self,
        pool: PoolView,
        num_heads: int,
        kinds: Sequence[AttentionKind] = (),
        static: DeviceBatch | None = None,
        *,
        merged: bool = False,
    ) -> None:
        """`static`: arrays at fixed addresses that are read instead of those that `plan` is given."""
        self.can_capture = False
        self._kinds = tuple(kinds) or (FULL,) * pool.layout.num_layers
        if merged:
            check_mergeable(self._kinds)
        self._merged = merged
        self._static = static
        self._pool = pool
        self._num_heads = num_heads
        self._group = num_heads // pool.layout.num_kv_heads
        self._scale = pool.layout.head_dim**-0.5
        self._table: PageTable | None = None
        self._cached: PageTable | None = None
        self._on_device: DeviceBatch | None = None

    @override
    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        self._table = batch.table
        self._cached = batch.table.cached(self._pool.layout.page_size) if self._merged else None
        self._on_device = on_device if self._static is None else self._static
        if self._static is not None:
            self._static.indices[: on_device.indices.shape[0]].copy_(on_device.indices)

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table, arrays = self._table, self._on_device
        assert table is not None, "attention before it was planned"
        assert arrays is not None, "attention before it was planned"
        pages = self._pool.pages[:, layer]
        pages[arrays.write_pages, 0, arrays.write_offsets] = k
        pages[arrays.write_pages, 1, arrays.write_offsets] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for i in range(table.num_sequences):
            rows = slice(int(table.query_indptr[i]), int(table.query_indptr[i + 1]))
            if self._cached is not None and rows.stop - rows.start > 1:
                out[rows] = self._attend_merged(q[rows], k[rows], v[rows], pages, self._cached, i).to(out.dtype)
                continue
            found = pages[arrays.indices[int(table.indptr[i]) : int(table.indptr[i + 1])]]
            out[rows] = self._attend_one(q[rows], found, int(table.lengths[i]), self._kinds[layer]).to(out.dtype)
        return out.view(q.shape[0], -1)

    @override
    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "TorchAttention":
        """It cannot be captured, but a `Recorder` may run it again instead, as tests do."""
        del num_rows
        return TorchAttention(self._pool, self._num_heads, self._kinds, on_device, merged=self._merged)

    @staticmethod
    def _found(pages: Tensor, table: PageTable, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of sequence `number`, `[positions, kv_heads, dim]` each."""
        indices = torch.from_numpy(table.indices[table.indptr[number] : table.indptr[number + 1]]).to(pages.device)
        keys, values = pages[indices].transpose(0, 1).flatten(1, 2)[:, : int(table.lengths[number])].unbind(0)
        return keys, values

    def _attend_merged(self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, cached: PageTable, number: int) -> Tensor:
        """Sequence `number`, whose new rows are `q`, `k` and `v`."""
        keys, values = self._found(pages, cached, number)
        return merge(*attend_part(q, k, v, causal=True), *attend_part(q, keys, values, causal=False))

    def _attend_one(self, q: Tensor, pages: Tensor, length: int, kind: AttentionKind) -> Tensor:
        """`q` is the last rows of a sequence of `length` positions on `pages`, `[pages, 2, page, kv_heads, dim]`."""
        keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :length].float().unbind(0)
        num_rows, _, dim = q.shape
        grouped = q.float().view(num_rows, -1, self._group, dim)
        scores = torch.einsum("rhgd,phd->hgrp", grouped, keys) * self._scale
        positions = torch.arange(length, device=q.device)
        rows = positions[length - num_rows :].unsqueeze(1)
        hidden = positions > rows
        if kind.window:
            hidden |= positions <= rows - kind.window
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hgrp,phd->rhgd", weights, values).reshape(num_rows, -1, dim)
