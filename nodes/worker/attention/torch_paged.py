"""Paged attention with torch's own operators: the CPU path, and the reference for other devices.

Same bits: keys and values are reduced in splits of `SPLIT` positions counted from 0. Each split of each KV head is one
small matrix product of fixed inner size, in float32; a row's maximum is taken over all of its splits (exact in any
order), and the splits are summed one after the other. So a query row's bits depend neither on how many other rows,
sequences or chunks are computed with it, nor on what lies behind the last position: that is masked to weight 0, and the
pages hold no NaN there (`_write` zeroes the rest of a page when it begins one).

A layer with a sliding window reads only splits that a window can touch, still counted from 0: masked positions add
zeros, so it does not matter which splits are read beyond those.

A (sequence, split) pair is an item. Items are ordered by split, then by sequence, and sequences by falling length, so
the items of one split are those of the first few sequences: ragged batches need neither padding nor a loop over
sequences. The query heads of one KV head are rows of one product, padded to a multiple of four. The denominator of the
softmax comes from a column of ones beside the values. Follows the fixed-split idea of FlashDecoding as batch-invariant
kernels use it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from nodes.worker.attention.base import AttentionBackend, Span
from nodes.worker.attention.kinds import FULL, AttentionKind
from nodes.worker.errors import BackendMissing
from nodes.worker.layers.linear import padded_rows
from nodes.worker.pool.view import PoolView

SPLIT: Final = 64
_ONES: Final = 16
"""Columns beside the values, the first of which gives the denominator; this many keep rows aligned."""
_MAX_SCORE_BYTES: Final = 32 << 20
"""About a server's last-level cache: scores of larger tiles would go to memory and back, and take more of it."""
_MAX_ITEM_HEADS: Final = 4096
"""Each gathers 64 positions of keys and values: 256 MB in float32 with heads of 128; more would only take memory."""
_ALL_SPLITS: Final = 1 << 31


class _Splits(NamedTuple):
    """Items of some sequences. `page_rows` is `[layers, items * pages per split]`; `counts[j]` items are of split j.

    Splits are counted from `firsts` (`[sequences]`), the first split of each sequence that is read.
    """

    page_rows: Tensor
    sequences: Tensor
    counts: list[int]
    firsts: npt.NDArray[np.int64]

    @property
    def num_items(self) -> int:
        return self.sequences.shape[0]

    @property
    def is_even(self) -> bool:
        """Whether all sequences have the same number of splits."""
        return self.counts[0] == self.counts[-1]


class _Decode(NamedTuple):
    """Sequences with one row each, rows `first .. first + counts[0] - 1` of the batch.

    `bias` is `[items * heads, rows, SPLIT]`. `rows` holds the queries; the padding of their heads stays zero.
    """

    first: int
    splits: _Splits
    bias: Tensor
    rows: Tensor


class _Chunk(NamedTuple):
    """One sequence with several rows from `first` on, computed tile by tile."""

    first: int
    splits: _Splits
    tiles: "list[_Tile]"


class _Tile(NamedTuple):
    """Rows `begin .. end-1` of a chunk; they see its splits `splits`, and `bias` masks those from `first_masked` on."""

    begin: int
    end: int
    splits: slice
    first_masked: int
    bias: Tensor


class _Reads(NamedTuple):
    """What the layers of one kind read in a step."""

    decodes: list[_Decode]
    chunks: list[_Chunk]


class PagedPlan(NamedTuple):
    """One step. `cells` is `[layers, 2 * rows]`: where keys and values go; `fresh` names the cells to zero.

    `written` is `[rows, 2, kv_heads, head_dim]` and `out` `[padded rows, kv_heads, group, head_dim]`; each layer
    overwrites them. `reads` is by kind.
    """

    cells: Tensor
    fresh: tuple[Tensor, Tensor] | None
    reads: dict[AttentionKind, _Reads]
    written: Tensor
    out: Tensor


class TorchPagedAttention(AttentionBackend):
    """On the CPU, with torch's products. `kinds` are those of the layers; by default all layers see everything.

    Raises BackendMissing for page sizes that do not divide the split.
    """

    def __init__(self, pool: PoolView, num_heads: int, kinds: Sequence[AttentionKind] = ()) -> None:
        layout = pool.layout
        self._kinds = tuple(kinds) or (FULL,) * layout.num_layers
        if SPLIT % layout.page_size:
            raise BackendMissing(f"page size {layout.page_size} does not divide {SPLIT}: use 1, 2, 4, 8, 16, 32 or 64")
        self._pool = pool
        self.layout = layout
        self.num_heads = num_heads
        self._group = num_heads // layout.num_kv_heads
        self._group_rows = padded_rows(self._group)
        self._pages_per_split = SPLIT // layout.page_size
        self._scale = layout.head_dim**-0.5
        self._layers = torch.arange(layout.num_layers).unsqueeze(1)
        self._gathered = torch.empty(2, 0)

    def over(self, pool: PoolView) -> "TorchPagedAttention":
        """The same attention over another pool, with layers that all see everything."""
        return TorchPagedAttention(pool, self.num_heads)

    def unmap(self) -> None:
        """Forget the pool; nothing can be computed until `remap`."""
        del self._pool
        self._gathered = torch.empty(2, 0)

    def remap(self, pool: PoolView) -> None:
        """Compute over another pool of the same layout."""
        self._pool = pool

    @override
    def plan(self, spans: Sequence[Span]) -> PagedPlan:
        """`spans` sorted by `sort_key`."""
        reads = {kind: self._plan_reads(spans, kind.window) for kind in dict.fromkeys(self._kinds)}
        self._reserve(max(part.splits.num_items for read in reads.values() for part in (*read.decodes, *read.chunks)))
        num_rows = sum(span.num_tokens for span in spans)
        heads, dim = self.layout.num_kv_heads, self.layout.head_dim
        written = torch.empty(num_rows, 2, heads, dim, dtype=self._pool.cells.dtype)
        out = torch.zeros(padded_rows(num_rows), heads, self._group, dim)
        return PagedPlan(self._cells(spans), self._fresh(spans), reads, written, out)

    @override
    def attend(self, layer: int, plan: PagedPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._write(layer, plan, k, v)
        q, out = q.view(q.shape[0], self.layout.num_kv_heads, self._group, self.layout.head_dim), plan.out
        reads = plan.reads[self._kinds[layer]]
        for decode in reads.decodes:
            self._gather(layer, decode.splits)
            last = decode.first + decode.splits.counts[0]
            self._decode(decode, q[decode.first : last], out[decode.first : last])
        for chunk in reads.chunks:
            self._gather(layer, chunk.splits)
            for tile in chunk.tiles:
                rows = slice(chunk.first + tile.begin, chunk.first + tile.end)
                self._tile(tile, q[rows], out[rows])
        return out.view(out.shape[0], self.num_heads * self.layout.head_dim)[: q.shape[0]]

    def _write(self, layer: int, plan: PagedPlan, k: Tensor, v: Tensor) -> None:
        if plan.fresh is not None and layer == 0:
            pages, offsets = plan.fresh
            # An earlier sequence may have left NaN behind the end: masked it has weight 0, but 0 times NaN is NaN.
            self._pool.pages[pages, :, :, offsets] = 0
        num_rows = plan.written.shape[0]
        plan.written[:, 0] = k[:num_rows]
        plan.written[:, 1] = v[:num_rows]
        self._pool.cells.index_copy_(0, plan.cells[layer], plan.written.view(2 * num_rows, -1))

    def _gather(self, layer: int, splits: _Splits) -> None:
        """Keys and values of all items, float32, into `_gathered`."""
        layout, items = self.layout, splits.num_items
        found = self._pool.layer_pages.index_select(0, splits.page_rows[layer]).view(
            items, self._pages_per_split, 2, layout.page_size, layout.num_kv_heads, layout.head_dim
        )
        self._gathered[:, :items, ..., : layout.head_dim] = found.permute(2, 0, 4, 1, 3, 5)

    def _decode(self, decode: _Decode, q: Tensor, out: Tensor) -> None:
        splits, rows = decode.splits, decode.rows
        num_sequences, num_splits = splits.counts[0], len(splits.counts)
        rows[:, :, : self._group] = q
        if num_splits == 1:
            items = rows
        # If all sequences have the same number of splits, as a single one has, views do without the copy of an index.
        elif splits.is_even:
            items = rows.expand(num_splits, *rows.shape) if num_sequences == 1 else rows.repeat(num_splits, 1, 1, 1)
        else:
            items = rows.index_select(0, splits.sequences)
        scores = self._scores(items.reshape(splits.num_items, *rows.shape[1:]), decode.bias, 1)
        if splits.is_even:
            by_split = scores.view(num_splits, num_sequences, *scores.shape[1:])
            by_split.sub_(by_split.amax(-1, keepdim=True).amax(0))
        else:
            scores.sub_(self._highest(scores.amax(-1, keepdim=True), splits))
        weighted = self._weigh(scores.exp_())
        total = _sum_in_order(weighted, splits.counts)[:, :, : self._group]
        dim = self.layout.head_dim
        torch.div(total[..., :dim], total[..., dim : dim + 1], out=out)

    def _tile(self, tile: _Tile, q: Tensor, out: Tensor) -> None:
        num_tokens, heads, group, dim = q.shape
        num_rows = num_tokens * group
        rows = q.new_zeros(heads, padded_rows(num_rows), dim)
        # Query heads of one KV head as rows of one product: its keys are read once for all of them.
        rows[:, :num_rows].view(heads, num_tokens, group, dim).copy_(q.transpose(0, 1))
        first, num_splits = tile.splits.start, tile.splits.stop - tile.splits.start
        scores = self._scores(rows.expand(num_splits, *rows.shape), rows.new_empty(1, 1, SPLIT), 0, first)
        scores[tile.first_masked :].add_(tile.bias)
        highest = scores.amax(-1, keepdim=True).amax(0)
        weighted = self._weigh(scores.sub_(highest).exp_(), first)
        total = _sum_in_order(weighted, [1] * num_splits)[0, :, :num_rows].view(heads, num_tokens, group, -1)
        torch.div(total[..., :dim].transpose(0, 1), total[..., dim : dim + 1].transpose(0, 1), out=out)

    def _scores(self, rows: Tensor, bias: Tensor, beta: int, first: int = 0) -> Tensor:
        """`[items, heads, rows, dim]` against the gathered keys, plus `beta * bias`: `[items, heads, rows, SPLIT]`."""
        items, heads, num_rows, dim = rows.shape
        keys = self._gathered[0, first : first + items].view(items * heads, SPLIT, -1)[..., :dim].transpose(1, 2)
        rows = rows.reshape(items * heads, num_rows, dim)
        return torch.baddbmm(bias, rows, keys, beta=beta, alpha=self._scale).view(items, heads, num_rows, SPLIT)

    def _weigh(self, weights: Tensor, first: int = 0) -> Tensor:
        """`[items, heads, rows, SPLIT]` times the gathered values: `[items, heads, rows, dim + ones]`."""
        items, heads, num_rows, _ = weights.shape
        values = self._gathered[1, first : first + items].view(items * heads, SPLIT, -1)
        return torch.bmm(weights.view(items * heads, num_rows, SPLIT), values).view(items, heads, num_rows, -1)

    @staticmethod
    def _highest(of_items: Tensor, splits: _Splits) -> Tensor:
        """Maximum over the items of a sequence, for each of its items."""
        counts = splits.counts
        highest, first = of_items[: counts[0]], counts[0]
        for count in counts[1:]:
            torch.maximum(highest[:count], of_items[first : first + count], out=highest[:count])
            first += count
        return highest.index_select(0, splits.sequences)

    def _plan_reads(self, spans: Sequence[Span], window: int) -> _Reads:
        num_decodes = sum(span.num_tokens == 1 for span in spans)
        decodes = [self._plan_decode(first, part, window) for first, part in self._parts(spans[:num_decodes], window)]
        chunks: list[_Chunk] = []
        num_rows = num_decodes
        for span in spans[num_decodes:]:
            chunks.append(self._plan_chunk(num_rows, span, window))
            num_rows += span.num_tokens
        return _Reads(decodes, chunks)

    def _parts(self, spans: Sequence[Span], window: int) -> list[tuple[int, Sequence[Span]]]:
        """Decoding sequences, cut into runs that bound the memory of one gather."""
        parts: list[tuple[int, Sequence[Span]]] = []
        first = num_items = 0
        for index, span in enumerate(spans):
            num_splits = min(-(-span.end // SPLIT), _most_splits(window))
            if num_items and (num_items + num_splits) * self.layout.num_kv_heads > _MAX_ITEM_HEADS:
                parts.append((first, spans[first:index]))
                first, num_items = index, 0
            num_items += num_splits
        if num_items:
            parts.append((first, spans[first:]))
        return parts

    def _plan_decode(self, first: int, spans: Sequence[Span], window: int) -> _Decode:
        # As many splits of each as a window can touch, so that no sequence has fewer items than a shorter one.
        splits, ends = self._plan_splits(spans, [-(-span.end // SPLIT) - _most_splits(window) for span in spans])
        sequences = splits.sequences.numpy()
        in_split = (ends[sequences] - SPLIT * (_split_numbers(splits.counts) + splits.firsts[sequences]))[:, None]
        visible = np.arange(SPLIT) < in_split
        if window:
            visible &= np.arange(SPLIT) >= in_split - window
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        heads, rows, dim = self.layout.num_kv_heads, self._group_rows, self.layout.head_dim
        expanded = torch.from_numpy(bias)[:, None, None, :].expand(-1, heads, rows, SPLIT)
        return _Decode(first, splits, expanded.reshape(-1, rows, SPLIT), torch.zeros(len(spans), heads, rows, dim))

    def _plan_chunk(self, first: int, span: Span, window: int) -> _Chunk:
        splits, _ = self._plan_splits([span], [_first_split(span.start, window)])
        # Scores take most of a tile's memory, and grow with the context: long prompts get smaller tiles.
        bytes_per_token = len(splits.counts) * SPLIT * 4 * self.num_heads
        size = max(min(SPLIT, _MAX_SCORE_BYTES // bytes_per_token), 1)
        return _Chunk(first, splits, [
            self._plan_tile(span, begin, min(begin + size, span.num_tokens), splits, window)
            for begin in range(0, span.num_tokens, size)
        ])  # fmt: skip

    def _plan_tile(self, span: Span, begin: int, end: int, splits: _Splits, window: int) -> _Tile:
        num_splits, base = len(splits.counts), int(splits.firsts[0])
        seen = -(-(span.start + end) // SPLIT) - base
        first = _first_split(span.start + begin, window) - base
        if self.layout.num_kv_heads == 1 and seen - first == 1:
            # Never a single split of a single head: see `_plan_splits`.
            first, seen = (first - 1, seen) if first else (first, min(num_splits, 2))
        first_masked = first if window else (span.start + begin) // SPLIT
        num_rows = padded_rows((end - begin) * self._group)
        positions = np.minimum(np.arange(num_rows) // self._group + span.start + begin, span.start + end - 1)[:, None]
        columns = np.arange((base + first_masked) * SPLIT, (base + seen) * SPLIT).reshape(-1, 1, SPLIT)
        visible = columns <= positions
        if window:
            visible &= columns > positions - window
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        return _Tile(begin, end, slice(first, seen), first_masked - first, torch.from_numpy(bias)[:, None])

    def _plan_splits(self, spans: Sequence[Span], firsts: Sequence[int]) -> tuple[_Splits, npt.NDArray[np.int64]]:
        """The splits of each sequence from `firsts` on (below 0: all), and where the sequences end."""
        ends = np.array([span.end for span in spans], dtype=np.int64)
        begins = np.maximum(np.array(firsts, dtype=np.int64), 0)
        num_splits = -(-ends // SPLIT) - begins
        most = int(num_splits[0])
        if len(spans) * most * self.layout.num_kv_heads == 1:
            # The library computes a batch of one matrix in another way, with other bits: add a masked one.
            most = 2
            num_splits[0] = 2
        pages = np.zeros((len(spans), most * self._pages_per_split), dtype=np.int64)
        for row, span in enumerate(spans):
            found = span.page_ids[begins[row] * self._pages_per_split : self.layout.num_pages_for(span.end)]
            pages[row, : len(found)] = found
        present = np.arange(most)[:, None] < num_splits[None, :]
        items = pages.reshape(len(spans), most, -1).transpose(1, 0, 2)[present]
        base = torch.from_numpy(np.ascontiguousarray(items).reshape(1, -1)) * self.layout.num_layers
        sequences = torch.from_numpy(np.nonzero(present)[1])
        return _Splits(base + self._layers, sequences, present.sum(1).tolist(), begins), ends

    def _cells(self, spans: Sequence[Span]) -> Tensor:
        size, layers = self.layout.page_size, self.layout.num_layers
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        pages = np.concatenate([span.page_ids[np.arange(span.start, span.end) // size] for span in spans])
        keys = pages.astype(np.int64) * (layers * 2 * size) + positions % size
        cells = torch.from_numpy(np.stack((keys, keys + size), axis=1).reshape(1, -1))
        return cells + self._layers * (2 * size)

    def _fresh(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor] | None:
        """The cells behind a sequence's end in a page that the step begins."""
        size = self.layout.page_size
        pages: list[int] = []
        offsets: list[int] = []
        for span in spans:
            last = (span.end - 1) // size
            if span.start <= last * size:
                behind = range(span.end - last * size, size)
                pages += [int(span.page_ids[last])] * len(behind)
                offsets += behind
        return (torch.tensor(pages), torch.tensor(offsets)) if pages else None

    def _reserve(self, num_items: int) -> None:
        if self._gathered.shape[1] < num_items:
            heads, dim = self.layout.num_kv_heads, self.layout.head_dim
            shape = (num_items, heads, self._pages_per_split, self.layout.page_size)
            self._gathered = torch.zeros(2, *shape, dim + _ONES)
            # A column of ones beside the values: its weighted sum is the sum of the weights, from the same product.
            self._gathered[..., dim] = 1


def _sum_in_order(items: Tensor, counts: list[int]) -> Tensor:
    """Sum over the items of each sequence, split after split (`items` is overwritten)."""
    total, first = items[: counts[0]], counts[0]
    for count in counts[1:]:
        total[:count].add_(items[first : first + count])
        first += count
    return total


def _first_split(position: int, window: int) -> int:
    """The first split that a position sees."""
    return max(position - window + 1, 0) // SPLIT if window else 0


def _most_splits(window: int) -> int:
    """Splits that one window may touch."""
    return (window + SPLIT - 2) // SPLIT + 1 if window else _ALL_SPLITS


def _split_numbers(counts: list[int]) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(counts)), counts)
