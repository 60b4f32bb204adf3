"""A step's rows as the flat int32 arrays that device kernels read, and their copy to the device.

Sequences with one row come first, then those with several. Everything that goes to the device is one array and one
copy. Page tables are in FlashInfer's form: `indptr` into `indices`, and how full each last page is.
"""

from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.layout import PADDING_PAGE
from nodes.model_spec import ModelSpec
from nodes.worker.steps.step import RunnableStep

Ints = npt.NDArray[np.int32]
KNOWN: Final = -1
"""In `sources`: the token id is in `token_ids`."""


def runs(starts: "npt.NDArray[np.int64]", counts: "npt.NDArray[np.int64]") -> "npt.NDArray[np.int64]":
    """For each i the `counts[i]` numbers from `starts[i]` on, one run after the other. There is at least one run."""
    ends = counts.cumsum()
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1], dtype=np.int64)


def check_whole(spec: ModelSpec, starts: "npt.NDArray[np.int64]", counts: "npt.NDArray[np.int64]") -> None:
    """Raises ValueError unless the rows of each sequence are all that it has, as an encoder computes them."""
    if starts.any():
        raise ValueError(f"{spec.name} is an encoder, but a sequence is continued at position {int(starts.max())}")
    if int(counts.max()) > spec.context_length:
        raise ValueError(f"{spec.name} has {spec.context_length} positions, but a sequence has {int(counts.max())}")


def token_types(
    starts: "npt.NDArray[np.int64]", counts: "npt.NDArray[np.int64]", seconds: "npt.NDArray[np.int32]"
) -> Ints:
    """The type of each row's token: 1 from position `seconds[i]` of sequence i on, if that is not 0."""
    from_there = np.repeat(seconds, counts)
    return ((runs(starts, counts) >= from_there) & (from_there > 0)).astype(np.int32)


class PageTable(NamedTuple):
    """Pages of some sequences: those of sequence i are `indices[indptr[i] : indptr[i + 1]]`.

    `last_page_len[i]` positions of its last page are in use, `lengths[i]` altogether. `query_indptr[i]` is its first
    row, counted from the table's first.
    """

    query_indptr: Ints
    indptr: Ints
    indices: Ints
    last_page_len: Ints
    lengths: Ints

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]

    def part(self, begin: int, end: int) -> "PageTable":
        """The table of sequences `begin .. end-1` alone."""
        first, last = self.indptr[begin], self.indptr[end]
        return PageTable(
            self.query_indptr[begin : end + 1] - self.query_indptr[begin],
            self.indptr[begin : end + 1] - first,
            self.indices[first:last],
            self.last_page_len[begin:end],
            self.lengths[begin:end],
        )


class HostBatch(NamedTuple):
    """One step, on the host. Arrays of `[rows]`: the input token, its position, and the page and offset of its KV.

    `sources[r]` >= 0: the token is what that row of the previous plan drew, and only the device knows it. `sampled` are
    the batch's rows whose logits are needed, `sampling` the indices of the same rows in the step. The first
    `num_decodes` sequences have one row each.
    """

    token_ids: Ints
    positions: Ints
    write_pages: Ints
    write_offsets: Ints
    sources: Ints
    table: PageTable
    num_decodes: int
    sampled: Ints
    sampling: list[int]

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.token_ids.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every sequence has one row."""
        return self.num_decodes == self.table.num_sequences

    @property
    def all_drawn(self) -> bool:
        """Whether the step before draws every row's token, as in decoding that runs ahead."""
        return bool((self.sources != KNOWN).all())

    def padded(self, num_rows: int) -> "HostBatch":
        """A decode batch filled up to `num_rows` with sequences of one position on the padding page."""
        extra = num_rows - self.num_rows
        if not extra:
            return self
        zeros, ones = np.zeros(extra, dtype=np.int32), np.ones(extra, dtype=np.int32)
        # Where all tokens come from the step before, padding takes that of its first row: see `DeviceRunner._resolved`.
        source = 0 if self.all_drawn else KNOWN
        more = np.arange(1, extra + 1, dtype=np.int32)
        table = self.table
        return self._replace(
            token_ids=np.concatenate((self.token_ids, zeros)),
            positions=np.concatenate((self.positions, zeros)),
            write_pages=np.concatenate((self.write_pages, zeros + PADDING_PAGE)),
            write_offsets=np.concatenate((self.write_offsets, zeros)),
            sources=np.concatenate((self.sources, zeros + source)),
            table=PageTable(
                np.concatenate((table.query_indptr, table.query_indptr[-1] + more)),
                np.concatenate((table.indptr, table.indptr[-1] + more)),
                np.concatenate((table.indices, zeros + PADDING_PAGE)),
                np.concatenate((table.last_page_len, ones)),
                np.concatenate((table.lengths, ones)),
            ),
            num_decodes=num_rows,
        )


class DeviceBatch(NamedTuple):
    """The arrays of a `HostBatch` on the device, int32; all are parts of one tensor, in the order of `pack`.

    `placing` is positions, pages and offsets as one array.
    """

    token_ids: Tensor
    positions: Tensor
    write_pages: Tensor
    write_offsets: Tensor
    sources: Tensor
    sampled: Tensor
    indices: Tensor
    placing: Tensor


def host_batch(step: RunnableStep, page_size: int) -> HostBatch:
    """Lay out the rows of `step`."""
    rows = step.rows
    columns = (rows.starts, rows.counts, rows.token_offsets, rows.page_offsets, rows.sources, rows.draws)
    fields = np.array(columns, dtype=np.int64)
    # Decoding sequences first: they go through another kernel than chunks, and each kernel takes one stretch of rows.
    order = _order(fields[1])
    starts, counts, token_offsets, page_offsets, from_rows, draws = fields[:, order]
    ends = starts + counts
    positions = runs(starts, counts)
    page_ids = np.frombuffer(step.page_ids, dtype=np.int32)
    num_pages = -(-ends // page_size)
    lasts = counts.cumsum() - 1
    drawing = draws.nonzero()[0]
    return HostBatch(
        token_ids=np.frombuffer(step.token_ids, dtype=np.int32)[runs(token_offsets, counts)],
        positions=positions.astype(np.int32),
        write_pages=page_ids[np.repeat(page_offsets, counts) + positions // page_size],
        write_offsets=(positions % page_size).astype(np.int32),
        sources=np.repeat(from_rows, counts).astype(np.int32),
        table=PageTable(
            _indptr(counts),
            _indptr(num_pages),
            page_ids[runs(page_offsets, num_pages)],
            (ends - (num_pages - 1) * page_size).astype(np.int32),
            ends.astype(np.int32),
        ),
        num_decodes=int((counts == 1).sum()),
        sampled=lasts[drawing].astype(np.int32),
        sampling=order[drawing].tolist(),
    )


def batch_types(step: RunnableStep, spec: ModelSpec) -> Ints:
    """The types of the tokens of an encoder's `host_batch`. Raises ValueError as `check_whole` does."""
    rows = step.rows
    fields = np.array((rows.starts, rows.counts, [one.second_from for one in rows.found]), dtype=np.int64)
    starts, counts, seconds = fields[:, _order(fields[1])]
    check_whole(spec, starts, counts)
    # A vocabulary of one type has no other to add.
    return token_types(starts, counts, seconds if spec.type_vocab_size > 1 else np.zeros_like(seconds))


def first_rows(step: RunnableStep) -> list[int]:
    """Where each row's tokens begin in `host_batch`."""
    counts = np.array(step.rows.counts, dtype=np.int64)
    order = _order(counts)
    ordered, firsts = counts[order], np.empty_like(counts)
    firsts[order] = ordered.cumsum() - ordered
    return cast("list[int]", firsts.tolist())


def _order(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    return np.argsort(counts > 1, kind="stable")


def pack(batch: HostBatch) -> Ints:
    """All arrays of `DeviceBatch` one after the other."""
    return np.concatenate(
        (
            # In one array, for one copy to the device: each transfer has a start-up cost, and there would be seven.
            batch.token_ids,
            batch.positions,
            batch.write_pages,
            batch.write_offsets,
            batch.sources,
            batch.sampled,
            batch.table.indices,
        )
    )


def unpack(packed: Tensor, num_rows: int, num_sampled: int) -> DeviceBatch:
    """The parts of a packed tensor; `indices` is everything behind the others."""
    sizes = [num_rows] * 5 + [num_sampled]
    parts = torch.split(packed, [*sizes, packed.shape[0] - sum(sizes)])
    return DeviceBatch._make((*parts, packed[num_rows : 4 * num_rows]))


def pinned(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host tensor with the numbers of `array`, in page-locked memory if `device` copies out of it asynchronously.

    New for each step: torch's allocator of page-locked memory reuses a block only when all copies begun from it have
    ended, so a step may be prepared while the one before is still in flight.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def placed(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of `array` on `device`, which may still be under way there when this returns; on the CPU, `array`."""
    tensor = pinned(array, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _indptr(counts: npt.NDArray[np.int64]) -> Ints:
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)
