"""Draws a step's rows and reads their probabilities with the library: what `sampler.py` and `measuring.py` do by torch.

One call for all rows, of which each thread takes some. A row's bits are the same in any batch and with any build; from
torch's they differ only where `exp` is rounded otherwise.
"""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_void_p
from typing import Final

import numpy as np
import torch
from torch import Tensor

from nodes.asks.edits import RowEdits, RowReads
from nodes.worker.draw.sampler import PLAIN, Draw, uniform
from nodes.worker.ops.native.builds import Library

_TASK: Final = struct.Struct("=qqddff12i")
"""`RowTask` of draw.h."""
_DRAWS, _GREEDY, _EDITED, _READS, _PROCESSED = 1, 2, 4, 8, 16


class _RowsCall(Structure):
    """`RowsCall` of draw.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "tasks", "masks", "entry_ids", "entry_values", "read_ids")),
        *((name, c_void_p) for name in ("tokens", "lines", "scratch")),
        *((name, c_int64) for name in ("stride", "size")),
        ("num_tasks", c_int32),
    )


class NativeRows:
    """Used by one thread; the library's threads help. Its memory is kept from step to step."""

    def __init__(self, library: Library) -> None:
        self._functions = library.functions
        self._scratch = torch.empty(0, dtype=torch.int64)

    def draw(
        self, logits: Tensor, altered: Mapping[int, Draw], reads: Mapping[int, RowReads], drawn: Sequence[int]
    ) -> tuple[list[int], Tensor | None]:
        """All tokens: of the rows of `logits` (float32 `[rows, vocab]`) in `altered` as `sample` draws them.

        `drawn` has those of the other rows. And a line for each row in `reads`, as in `measured`.
        """
        assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), "rows are read as they lie in memory"
        size, places = logits.shape[1], sorted(altered.keys() | reads.keys())
        width = min(max((one.top for one in reads.values()), default=0), size)
        words = 2 + 2 * width + max((len(one.ids) for one in reads.values()), default=0)
        lines = torch.zeros(len(reads), words, dtype=torch.int32) if reads else None
        line_of = {place: words * number for number, place in enumerate(reads)}
        packing, tasks = _Packing(), array("B")
        for place in places:
            drawing, reading = altered.get(place), reads.get(place)
            of_draw = _of_draw(drawing or PLAIN, packing)
            of_read = (0, 0, 0, width)
            flags = (0 if drawing is None else _DRAWS) | _flags_of(drawing or PLAIN)
            if reading is not None:
                flags |= _READS | (_PROCESSED if reading.of == "processed" else 0)
                of_read = (line_of[place], len(packing.read_ids), min(reading.top, size), width)
                packing.read_ids.extend(one if 0 <= one < size else -1 for one in reading.ids)
            num_ids = 0 if reading is None else len(reading.ids)
            tasks.frombytes(_TASK.pack(*of_draw, place, flags, *of_read, num_ids))
        tokens = array("i", [drawn[place] for place in places])
        self._call(logits, len(places), tasks, packing, tokens, lines)
        result = list(drawn)
        for place, token in zip(places, tokens, strict=True):
            result[place] = token
        return result, lines

    def _call(
        self,
        logits: Tensor,
        num_tasks: int,
        tasks: "array[int]",
        packing: "_Packing",
        tokens: "array[int]",
        lines: Tensor | None,
    ) -> None:
        size = logits.shape[1]
        if self._scratch.nbytes < (needed := self._functions.kvmesh_rows_scratch(size)):
            # Pages are made as they are first used: most rows need few of them.
            self._scratch = torch.empty(needed // 8, dtype=torch.int64)
        held = (tasks, packing.masks, packing.ids, packing.values, packing.read_ids, tokens)
        addresses = [one.buffer_info()[0] for one in held]
        call = _RowsCall(
            logits.data_ptr(), *addresses, 0 if lines is None else lines.data_ptr(), self._scratch.data_ptr(),
            logits.stride(0), size, num_tasks,
        )  # fmt: skip
        self._functions.kvmesh_rows(byref(call))


def _flags_of(draw: Draw) -> int:
    return (_GREEDY if draw.sampling.is_greedy else 0) | (_EDITED if draw.edits is not None else 0)


def _of_draw(draw: Draw, packing: "_Packing") -> tuple[int | float, ...]:
    """The fields of a task that say how its row is drawn."""
    sampling, edits = draw.sampling, draw.edits
    mask, entries = ((-1, 0), (0, 0, 0, 0)) if edits is None else (packing.mask(edits.mask), packing.entries(edits))
    if sampling.is_greedy:
        return *mask, 0.0, 1.0, 1.0, -math.inf, 0, *entries
    number = uniform(sampling.seed, sampling.sample_index, draw.position)
    lowest = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return *mask, number, sampling.top_p, sampling.temperature, lowest, sampling.top_k, *entries


class _Packing:
    """What tasks refer to, one row after the other."""

    def __init__(self) -> None:
        self.masks, self.ids, self.values, self.read_ids = array("B"), array("q"), array("f"), array("i")

    def mask(self, mask: bytes | None) -> tuple[int, int]:
        """Where a mask begins, and how many bytes it has; none begins at -1."""
        if mask is None:
            return -1, 0
        begin = len(self.masks)
        self.masks.frombytes(memoryview(mask).cast("B"))
        return begin, len(self.masks) - begin

    def entries(self, edits: RowEdits) -> tuple[int, int, int, int]:
        """Where the entries begin, and how many there are of bias and floor, scale, and add."""
        begin = len(self.ids)
        first = {**edits.bias, **dict.fromkeys(edits.floor, -math.inf)} if edits.floor else edits.bias
        for part in (first, edits.scale, edits.add):
            if part:
                # Arrays convert the numbers of a dictionary one by one: 250 us for 1,000 entries, and not 60.
                self.ids.frombytes(struct.pack(f"={len(part)}q", *part))
                self.values.frombytes(np.fromiter(part.values(), np.float32, len(part)).tobytes())
        return begin, len(first), len(edits.scale), len(edits.add)
