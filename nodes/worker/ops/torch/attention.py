"""The network's interface to attention, and its torch form, the CPU's and the oracle of all others.

A plan of the step is kept between calls, because a captured graph has no arguments.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from kvstore.layout import PADDING_PAGE
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.torch.batch import DeviceBatch, HostBatch, PageTable, placed
from nodes.worker.ops.torch.kinds import FULL, AttentionKind
from nodes.worker.ops.torch.products import ROW_MULTIPLE
from nodes.worker.pool.view import PoolView

SPLIT: Final = 64
_TILE_ROWS: Final = (1, 4, 16, 64)
_MOST_SCORES: Final = 8 << 20
"""32 MB in float32, about a server's last-level cache: more would go to memory and back, and take more of it."""


class HeadForm(NamedTuple):
    """What is done to the heads of one layer before they attend; tensors are on the device.

    Weights of norms are `[head_dim]`, or longer for a norm over all heads of a row, or absent. `cos_sin` comes from
    `cos_sin_table`, or is absent. Queries are multiplied by `q_scale` at the end.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    q_eps: float
    k_eps: float
    q_scale: float
    cos_sin: Tensor | None


class DeviceAttention(Protocol):
    """Attention with grouped heads over pages, and the writing of pages. One step at a time.

    What a layer sees is its `AttentionKind`, given when the backend is made.
    """

    can_capture: bool
    """Whether `attend` may be captured as part of a CUDA graph."""

    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        """Prepare attention in all layers for one step. Never captured; may wait for the previous plan."""
        ...

    def place(self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor) -> bool:
        """Norm, rotate and scale `heads` as `form` says, and write their keys and values to the pages, all in one.

        `heads` is `[rows, heads + 2 * kv_heads, head_dim]`, overwritten. False: nothing was done, the backend cannot.
        """
        del layer, heads, form, positions
        return False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, is_placed: bool = False) -> Tensor:
        """Write `k` and `v` to their pages, unless `place` has done that, then attend over the pages.

        `q` is `[rows, heads, head_dim]`, the others `[rows, kv_heads, head_dim]`, in the pool's dtype; rows may be
        strided. Returns `[rows, heads * head_dim]`.
        """
        ...

    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "DeviceAttention":
        """Attention for decode steps of exactly `num_rows` rows, whose arrays always lie in `on_device`."""
        ...


class _Part(NamedTuple):
    """Tiles of equal numbers of rows, which see equal numbers of splits. Arrays are on the device.

    `rows` `[tiles, rows]`: rows of the batch; a tile's last row is repeated. `pages` are those of all splits of all
    tiles, `bias` is `[tiles, last splits, 1, query rows, SPLIT]`, since the first ones are seen by all rows, `empty`
    names the positions that hold nothing.
    """

    num_splits: int
    rows: Tensor
    pages: Tensor
    bias: Tensor
    empty: tuple[Tensor, Tensor, Tensor]


class TorchAttention(DeviceAttention):
    """With torch's own products, on any device: the CPU's attention, and the oracle of all others.

    Same bits: keys and values are reduced in splits of `SPLIT` positions counted from 0. Each split of each KV head is
    one small matrix product of fixed inner size, in float32; a row's maximum is taken over all of its splits (exact in
    any order), and the splits are summed one after the other. Splits that a row does not see add zeros, so its bits do
    not depend on the rows, sequences or chunks that are computed with it. Follows the fixed-split idea of FlashDecoding
    as batch-invariant kernels use it.

    The query heads of one KV head are rows of one product, padded to a multiple of four. Rows of a sequence are
    computed in tiles, and tiles of one shape together.

    `kinds` are those of the layers; by default all layers see everything. Raises BackendMissing for page sizes that do
    not divide a split.
    """

    def __init__(
        self,
        pool: PoolView,
        num_heads: int,
        kinds: Sequence[AttentionKind] = (),
        static: DeviceBatch | None = None,
    ) -> None:
        """`static`: arrays at fixed addresses that are read instead of those that `plan` is given."""
        layout = pool.layout
        if SPLIT % layout.page_size:
            raise BackendMissing(f"page size {layout.page_size} does not divide {SPLIT}: use 1, 2, 4, 8, 16, 32 or 64")
        self.can_capture = False
        self._kinds = tuple(kinds) or (FULL,) * layout.num_layers
        self._static = static
        self.pool, self.num_heads = pool, num_heads
        self._group = num_heads // layout.num_kv_heads
        self._table: PageTable | None = None
        self._on_device: DeviceBatch | None = None
        self._parts: dict[AttentionKind, list[_Part]] = {}

    @override
    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        self._table = batch.table
        self._on_device = on_device if self._static is None else self._static
        self._parts = {kind: self._plan_kind(batch.table, kind) for kind in dict.fromkeys(self._kinds)}

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, is_placed: bool = False) -> Tensor:
        assert not is_placed, "there is no kernel that places"
        table, arrays = self._table, self._on_device
        assert table is not None, "attention before it was planned"
        assert arrays is not None, "attention before it was planned"
        pages = self.pool.pages[:, layer]
        pages[arrays.write_pages, 0, arrays.write_offsets] = k
        pages[arrays.write_pages, 1, arrays.write_offsets] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts[self._kinds[layer]]:
            out.index_copy_(0, part.rows.view(-1), self._attend_part(part, pages, q).to(out.dtype))
        return out.view(q.shape[0], -1)

    @override
    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "TorchAttention":
        """It cannot be captured, but a `Recorder` may run it again instead, as tests do."""
        del num_rows
        return TorchAttention(self.pool, self.num_heads, self._kinds, on_device)

    def _attend_part(self, part: _Part, pages: Tensor, q: Tensor) -> Tensor:
        """`[tiles * rows, heads, dim]`, float32."""
        layout, group = self.pool.layout, self._group
        (num_tiles, num_tokens), num_splits = part.rows.shape, part.num_splits
        heads, dim, size = layout.num_kv_heads, layout.head_dim, layout.page_size
        num_rows, shape = num_tokens * group, (num_tiles, num_splits, heads)
        found = torch.empty(2, *shape, SPLIT // size, size, dim, device=q.device)
        taken = pages.index_select(0, part.pages).view(num_tiles, num_splits, SPLIT // size, 2, size, heads, dim)
        found.copy_(taken.permute(3, 0, 1, 5, 2, 4, 6))
        tiles, splits, positions = part.empty
        # An earlier sequence may have left NaN there: masked it has weight 0, but 0 times NaN is NaN.
        found.view(2, *shape, SPLIT, dim)[:, tiles, splits, :, positions] = 0
        keys, values = found.view(2, -1, SPLIT, dim).unbind(0)
        rows = q.index_select(0, part.rows.view(-1)).float().mul_(dim**-0.5)
        rows = rows.view(num_tiles, num_tokens, heads, group, dim).transpose(1, 2).reshape(num_tiles, heads, -1, dim)
        rows = F.pad(rows, (0, 0, 0, part.bias.shape[3] - num_rows)).unsqueeze(1).expand(-1, num_splits, -1, -1, -1)
        scores = torch.bmm(rows.reshape(len(keys), -1, dim), keys.transpose(1, 2)).view(*shape, -1, SPLIT)
        scores[:, -part.bias.shape[1] :].add_(part.bias)
        weights = scores.sub_(scores.amax(-1, keepdim=True).amax(1, keepdim=True)).exp_()
        weighted = torch.bmm(weights.view(len(keys), -1, SPLIT), values).view(*shape, -1, dim)
        total, share = (_sum_in_order(one) for one in (weighted, weights.sum(-1, keepdim=True)))
        total = total.div_(share)[:, :, :num_rows].view(num_tiles, heads, num_tokens, group, dim)
        return total.transpose(1, 2).reshape(num_tiles * num_tokens, heads * group, dim)

    def _plan_kind(self, table: PageTable, kind: AttentionKind) -> list[_Part]:
        """The tiles of all sequences."""
        window = kind.window
        by_shape: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        counts = np.diff(table.query_indptr)
        spans = zip(table.query_indptr.tolist(), counts.tolist(), table.lengths.tolist(), strict=False)
        for sequence, (first_row, count, length) in enumerate(spans):
            # Scores take most of a tile's memory, and grow with the context: long prompts get smaller tiles.
            most = max(_MOST_SCORES // (self.num_heads * -(-length // SPLIT) * SPLIT), 1)
            size = max(one for one in _TILE_ROWS if one <= most)
            for begin in range(0, count, size):
                num_rows = min(size, count - begin)
                start = length - count + begin
                first = max(start - window + 1, 0) // SPLIT if window else 0
                num_splits = -(-(length if kind.sees_all else start + num_rows) // SPLIT) - first
                tile_rows = min(one for one in _TILE_ROWS if one >= num_rows)
                if tile_rows < _TILE_ROWS[-1]:
                    # Few shapes, so that small tiles are computed together; at most half of a shape is padding.
                    num_splits = 1 << (num_splits - 1).bit_length()
                tiles = by_shape.setdefault((tile_rows, num_splits), [])
                tiles.append((first_row + begin, num_rows, start, first, sequence))
        parts: list[_Part] = []
        for (num_rows, num_splits), tiles in by_shape.items():
            if len(tiles) * num_splits * self.pool.layout.num_kv_heads == 1:
                # The library computes a batch of one matrix in another way, with other bits: add one that is masked.
                num_splits = 2
            at_once = max(_MOST_SCORES // (self.num_heads * num_rows * num_splits * SPLIT), 1)
            parts += [
                self._plan_part(table, np.array(tiles[begin : begin + at_once]), num_rows, num_splits, kind)
                for begin in range(0, len(tiles), at_once)
            ]
        return parts

    def _plan_part(
        self, table: PageTable, tiles: npt.NDArray[np.int64], num_rows: int, num_splits: int, kind: AttentionKind
    ) -> _Part:
        first_rows, counts, starts, first_splits, sequences = tiles.T[:, :, None]
        size, device = self.pool.layout.page_size, self.pool.pages.device
        offsets = np.minimum(np.arange(num_rows), counts - 1)
        positions = (starts + offsets)[:, None, :, None]
        seen = first_splits * SPLIT + np.arange(num_splits * SPLIT)
        empty = np.nonzero((seen >= table.lengths[sequences]).reshape(len(tiles), num_splits, SPLIT))
        keys = seen.reshape(len(tiles), num_splits, 1, SPLIT)
        last = table.lengths[sequences][:, None, :, None] - 1 if kind.sees_all else positions
        visible = np.broadcast_to(keys <= last, (*keys.shape[:2], num_rows, SPLIT))
        if kind.window:
            visible = visible & (keys > positions - kind.window)
        is_masked = ~visible.all((0, 2, 3))
        first = min(int(is_masked.argmax()), num_splits - 1) if is_masked.any() else num_splits - 1
        bias = np.where(visible[:, first:], np.float32(0), np.float32(-np.inf)).repeat(self._group, 2)
        padding = -bias.shape[2] % ROW_MULTIPLE
        bias = np.concatenate((bias, bias[:, :, -1:].repeat(padding, 2)), 2)
        numbers = first_splits * (SPLIT // size) + np.arange(num_splits * (SPLIT // size))
        ends = -(-table.lengths[sequences] // size)
        places = table.indptr[sequences] + np.minimum(numbers, ends - 1)
        pages = np.where(numbers < ends, table.indices[places], PADDING_PAGE).ravel()
        rows, pages, bias, *empty = (
            placed(one, device) for one in (first_rows + offsets, pages.astype(np.int64), bias[:, :, None], *empty)
        )
        return _Part(num_splits, rows, pages, bias, (empty[0], empty[1], empty[2]))


def _sum_in_order(items: Tensor) -> Tensor:
    """The sum over the second dimension, split after split (`items` is overwritten)."""
    total, *others = items.unbind(1)
    for one in others:
        total.add_(one)
    return total
