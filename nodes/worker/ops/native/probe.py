"""Tests a recorded program, and draws, with rows batched in several ways.

The program's first layer and head are run, on pages of their own.
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvstore.layout import KVLayout
from nodes.model_spec import ModelSpec
from nodes.models.decoder import Decoder
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.oracle import tried_draws
from nodes.worker.ops.native.rows import NativeRows
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.ops.native.weights import Weights
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import PoolView

_EDGES: Final = (0, 1, 37, 64, 73)
_COPIES: Final = 3


class _Rows(NamedTuple):
    """Positions `begin .. end-1` of one copy of the sequence."""

    copy: int
    begin: int
    end: int


def program_results(
    spec: ModelSpec,
    library: Library,
    weights: Weights,
    model: Decoder,
    layout: KVLayout,
    collectives: Collectives | None = None,
) -> Iterator[tuple[bool, Tensor]]:
    """Whether some positions have the same bits in one piece, in chunks and as single rows; and logits `[4, vocab]`."""
    first = copy.copy(model)
    # One layer is enough: bits that depend on the batch would do so in each, and all of them would delay the load.
    first.layers = model.layers[:1]
    layout = msgspec.structs.replace(layout, num_layers=1)
    num_pages = layout.num_pages_for(_EDGES[-1])
    pool = PoolView(bytearray((1 + _COPIES * num_pages) * layout.page_bytes), layout)
    steps = NativeSteps(spec, library, weights, first, pool, collectives)
    token_ids = np.random.default_rng(1).integers(0, spec.vocab_size, _EDGES[-1], dtype=np.int32)

    def logits(*rows: _Rows, ends: Sequence[int] = ()) -> Tensor:
        """Logits of the last position of each of `rows`, or of the positions before `ends` of a single one."""
        table: list[tuple[int, int, int, int]] = []
        at = 0
        for one in rows:
            table.append((one.begin, one.end - one.begin, one.copy * num_pages, at))
            at += one.end - one.begin
        sampled = [end - 1 for end in ends] or [first_row + count - 1 for _, count, _, first_row in table]
        found = steps.run(
            Columns(
                np.concatenate([token_ids[one.begin : one.end] for one in rows]),
                np.array(table, dtype=np.int32).ravel(),
                np.arange(1, 1 + _COPIES * num_pages, dtype=np.int32),
                np.array(sampled, dtype=np.int32),
            )
        )[1]
        assert found is not None
        return found

    ends = _EDGES[1:]
    whole = logits(_Rows(0, 0, ends[-1]), ends=ends)
    chunks = torch.cat([logits(_Rows(1, begin, end)) for begin, end in pairwise(_EDGES)])
    # A copy that stops one position short of `ends[1]`, for the single row below.
    logits(_Rows(2, 0, ends[1] - 1))
    # A single row, the single row that continues that copy, and a chunk.
    mixed = logits(_Rows(0, ends[-1] - 1, ends[-1]), _Rows(2, ends[1] - 1, ends[1]), _Rows(1, ends[1], ends[2]))
    yield torch.equal(chunks, whole) and torch.equal(mixed, whole[[3, 1, 2]]), whole


def draw_results(rows: NativeRows) -> Iterator[tuple[bool, Tensor]]:
    """Whether rows draw and read the same alone, and in another order, as together; and what they do."""
    tried = tried_draws()
    tokens, lines = tried.drawn_by(rows)
    order = range(len(tokens) - 1, -1, -1)
    others = [tried.drawn_by(rows, *order), *(tried.drawn_by(rows, at) for at in order)]
    found = [token for some, _ in others for token in some]
    read = torch.cat([some for _, some in others])
    expected = lines.flip(0)
    holds = found == 2 * tokens[::-1] and torch.equal(read, torch.cat((expected, expected)))
    yield holds, torch.cat((torch.tensor(tokens, dtype=torch.int32), lines.flatten()))
