"""Tests a recorded program, and draws, with rows batched in several ways.

The program is that of a model with drawn weights, one layer of each kind and a head, on pages of its own.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvstore.layout import KVLayout
from nodes.model_spec import ModelSpec
from nodes.models.registry import model_of
from nodes.worker.numerics import drawn_model
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.oracle import tried_draws
from nodes.worker.ops.native.rows import NativeRows
from nodes.worker.ops.native.steps import Columns, NativeSteps, PooledRows
from nodes.worker.ops.native.weights import pack_weights
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import PoolView
from nodes.worker.weights.part_weights import PartWeights
from nodes.worker.weights.quantization import quantized_names
from nodes.worker.weights.random_weights import PROBE_PIECE, RandomWeights

_EDGES: Final = (0, 1, 37, 64, 73)
_COPIES: Final = 3
_MOST_WORDS: Final = 4096
"""A head's numbers are sums of their own, however many there are; those of 151,936 words took half of a check."""


class _Rows(NamedTuple):
    """Positions `begin .. end-1` of one copy of the sequence."""

    copy: int
    begin: int
    end: int


class Probe:
    """A model of drawn weights, shaped as `spec`, over pages of its own for some copies of a sequence.

    Raises ProgramUnfit.
    """

    def __init__(
        self, spec: ModelSpec, library: Library, layout: KVLayout, dtype: torch.dtype, collectives: Collectives | None
    ) -> None:
        # One layer of each kind is enough: bits that depend on the batch would do so in each.
        self.spec = spec = drawn_model(spec, _MOST_WORDS)
        model = model_of(spec)
        shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
        drawn = PartWeights(model, RandomWeights(spec, dtype, PROBE_PIECE), shard)
        weights = pack_weights(model, drawn, library, quantized_names(spec))
        layout = msgspec.structs.replace(layout, num_layers=spec.num_layers)
        self._num_pages = layout.num_pages_for(_EDGES[-1])
        pool = PoolView(bytearray((1 + _COPIES * self._num_pages) * layout.page_bytes), layout)
        self._steps = NativeSteps(spec, library, weights, model, pool, collectives)
        self._token_ids = np.random.default_rng(1).integers(0, spec.vocab_size, _EDGES[-1], dtype=np.int32)

    def logits(self, *rows: _Rows, ends: Sequence[int] = ()) -> Tensor:
        """Logits of the last position of each of `rows`, or of the positions before `ends` of a single one."""
        counts = accumulate(one.end - one.begin for one in rows)
        found = self._run(rows, [end - 1 for end in ends or counts])
        assert found is not None
        return found

    def states(self, *rows: _Rows) -> Tensor:
        """The last hidden states of all positions of `rows`."""
        pooled = self._steps.room_for(array("i", range(sum(one.end - one.begin for one in rows))))
        self._run(rows, (), pooled)
        return torch.from_numpy(pooled.states)

    def _run(self, rows: Sequence[_Rows], sampled: Sequence[int], pooled: PooledRows | None = None) -> Tensor | None:
        """Logits of the rows `sampled`, counted among all."""
        table: list[tuple[int, int, int, int]] = []
        at = 0
        for one in rows:
            table.append((one.begin, one.end - one.begin, one.copy * self._num_pages, at))
            at += one.end - one.begin
        columns = Columns(
            np.concatenate([self._token_ids[one.begin : one.end] for one in rows]),
            np.array(table, dtype=np.int32).ravel(),
            np.arange(1, 1 + _COPIES * self._num_pages, dtype=np.int32),
            np.array(sampled, dtype=np.int32),
        )
        return self._steps.run(columns, pooled=pooled)[1]


def program_results(probe: Probe) -> Iterator[tuple[bool, Tensor]]:
    """Whether some positions have the same bits in one piece, in chunks and as single rows; and logits `[4, words]`.

    Of an encoder, whether three sequences have the same bits alone and together; and their last hidden states.
    """
    spec = probe.spec
    if spec.is_encoder:
        # It has embeddings of no more positions than its context.
        each = [_Rows(copy, 0, min(end, spec.context_length)) for copy, end in enumerate(_EDGES[2:])]
        alone = torch.cat([probe.states(one) for one in each])
        yield torch.equal(probe.states(*each), alone), alone
        return
    ends = _EDGES[1:]
    whole = probe.logits(_Rows(0, 0, ends[-1]), ends=ends)
    chunks = torch.cat([probe.logits(_Rows(1, begin, end)) for begin, end in pairwise(_EDGES)])
    # A copy that stops one position short of `ends[1]`, for the single row below.
    probe.logits(_Rows(2, 0, ends[1] - 1))
    # A single row, the single row that continues that copy, and a chunk.
    mixed = probe.logits(_Rows(0, ends[-1] - 1, ends[-1]), _Rows(2, ends[1] - 1, ends[1]), _Rows(1, ends[1], ends[2]))
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
