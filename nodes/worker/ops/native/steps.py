"""Runs a recorded model over a pool: a step's columns go in, drawn tokens and logits come out."""

from array import array
from operator import add
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.architecture import Architecture
from nodes.worker.draw.sampler import most_likely
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.program import Step
from nodes.worker.ops.native.recording import Recording
from nodes.worker.ops.native.weights import Weights
from nodes.worker.ops.torch.batch import check_whole, runs, token_types
from nodes.worker.ops.torch.rotary import RotaryTable
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import PoolView

Ints: TypeAlias = "array[int] | npt.NDArray[np.int32]"
"""Contiguous int32. For a step of few rows, Python arrays are made and read in a tenth of numpy's time."""


class Columns(NamedTuple):
    """A step. `token_ids` are those of its rows; `spans` has four numbers for each sequence: first position, number of
    tokens, index of its first page in `pages`, first row; `sampled` are the rows that draw. `seconds`, if given, has
    the position of each sequence from which on its tokens are of type 1 (0: none is).
    """

    token_ids: Ints
    spans: Ints
    pages: Ints
    sampled: Ints
    seconds: "Ints | None" = None


class PooledRows(NamedTuple):
    """Rows of a step, and room for their last hidden states: float32 `[rows, hidden]`."""

    rows: Ints
    states: npt.NDArray[np.float32]


class NativeSteps:
    """A model's program over `pool`, which `remap` may replace later. Raises ProgramUnfit.

    With `collectives` it is one rank's part: between operations sums are taken over all ranks, and the logits are
    gathered, so that every rank has the same ones.
    """

    def __init__(
        self,
        spec: ModelSpec,
        library: Library,
        weights: Weights,
        model: Architecture,
        pool: PoolView,
        collectives: Collectives | None = None,
    ) -> None:
        self._shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
        self.collectives = collectives
        if collectives is not None:
            assert isinstance(weights.embedding, Tensor), "ranks do not support int8 weights"
            # One more row, of zeros, for tokens that another rank holds.
            weights = weights._replace(embedding=F.pad(weights.embedding, (0, 0, 0, 1)))
        recording = Recording(spec, library, weights, pool.layout, self._shard)
        self._program = recording.program(model)
        self._weights = weights
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size
        self._ropes = recording.ropes
        self._rotary = {rope: RotaryTable(rope, spec.head_dim) for rope in recording.ropes if rope is not None}
        self._encoder = spec if spec.is_encoder else None
        self._num_positions = 0
        self._step, self._blocks = Step(), array("i")
        self.remap(pool)

    def unmap(self) -> None:
        """Forget the pool; nothing can be computed until `remap`."""
        self._pool, self._pool_at = None, 0

    def remap(self, pool: PoolView) -> None:
        """Compute over another pool of the same layout."""
        self._pool: PoolView | None = pool
        self._pool_at = pool.pages.data_ptr()

    def run(
        self, columns: Columns, *, wants_logits: bool = True, pooled: PooledRows | None = None
    ) -> tuple["array[int]", Tensor | None]:
        """The most likely token of each sampled row, -1 if its logit is not finite; the logits, `[sampled, vocab]`.

        Logits are float32. KV of all rows is written to the pages, and the rows that `pooled` names are left in it.
        Raises CollectiveFailed.
        """
        assert self._pool is not None, "the pool is unmapped"
        token_ids, spans, pages, sampled, seconds = columns
        num_rows, num_sampled = len(token_ids), len(sampled)
        # Angles are made as contexts grow, not for the whole context length when a model is loaded.
        self._reach(int(max(map(add, spans[0::4], spans[1::4]))))
        places = None if self._encoder is None else _places(self._encoder, np.asarray(spans), seconds)
        drawn = array("i", bytes(4 * num_sampled))
        if self.collectives is not None:
            own, ids = self._shard.vocab, np.frombuffer(token_ids, np.int32)
            token_ids = np.where((ids >= own.start) & (ids < own.stop), ids - own.start, len(own)).astype(np.int32)
            # A rank has the logits of its own words only, so the most likely word is found after they are gathered.
            wants_logits = True
        # None for greedy steps: the head then keeps a maximum for each panel and writes no logits (608 kB a row at
        # 151,936 words).
        logits = torch.empty(num_sampled, len(self._shard.vocab)) if wants_logits else None
        if len(self._blocks) < 3 * num_rows:
            # Kept, since each step overwrites what it reads; a new one would be zeroed first, 12 bytes a row.
            self._blocks = array("i", bytes(2 * 12 * num_rows))
        # One structure for all steps: making one takes 4 us, setting its fields 1.
        step = self._step
        step.pool, step.token_ids, step.spans = self._pool_at, _at(token_ids), _at(spans)
        step.pages, step.sampled, step.drawn, step.blocks = _at(pages), _at(sampled), _at(drawn), _at(self._blocks)
        step.places = None if places is None else places.ctypes.data
        step.logits = None if logits is None else logits.data_ptr()
        step.num_rows, step.num_spans, step.num_sampled, step.num_pooled = num_rows, len(spans) // 4, num_sampled, 0
        if pooled is not None:
            step.num_pooled = len(pooled.rows)
            step.pooled_rows, step.pooled = _at(pooled.rows), pooled.states.ctypes.data
        self._program.run(step, self.collectives)
        if self.collectives is not None and logits is not None:
            logits = self.collectives.all_gather(logits)[:, : self._vocab_size]
            drawn = array("i", cast("list[int]", most_likely(logits)[1].tolist()))
        return drawn, logits

    def room_for(self, rows: Ints) -> PooledRows:
        """Room for the states of `rows`, for `run`. The model makes vectors (`ModelSpec.pooling`)."""
        return PooledRows(rows, np.empty((len(rows), self._hidden_size), np.float32))

    def logits_of(self, sampled: Ints) -> Tensor:
        """Logits `[sampled, vocab]` of other rows of the step that was just run. Raises CollectiveFailed."""
        drawn = array("i", bytes(4 * len(sampled)))
        logits = torch.empty(len(sampled), len(self._shard.vocab))
        step = self._step
        step.sampled, step.drawn, step.logits = _at(sampled), _at(drawn), logits.data_ptr()
        # Attention is done, and the step's spans may be gone.
        step.num_spans, step.num_sampled = 0, len(sampled)
        self._program.run_head(step)
        if self.collectives is None:
            return logits
        return self.collectives.all_gather(logits)[:, : self._vocab_size]

    def _reach(self, num_positions: int) -> None:
        """Make the angles of `num_positions` available to the kernels."""
        if num_positions <= self._num_positions or not self._rotary:
            return
        tables = {rope: table.tables(num_positions) for rope, table in self._rotary.items()}
        self._num_positions = min(len(cos) for cos, _ in tables.values())
        for call, rope in zip(self._program.attends, self._ropes, strict=True):
            if rope is not None:
                cos, sin = tables[rope]
                call.cos, call.sin = cos.data_ptr(), sin.data_ptr()


def _places(spec: ModelSpec, spans: npt.NDArray[np.int32], seconds: "Ints | None") -> npt.NDArray[np.int32]:
    """The rows of `Embedding.positions` and of its `types` that are added to each of the step's rows, `[rows, 2]`."""
    starts, counts = spans[0::4].astype(np.int64), spans[1::4].astype(np.int64)
    check_whole(spec, starts, counts)
    places = np.zeros((int(counts.sum()), 2), np.int32)
    places[:, 0] = spec.first_position + runs(starts, counts)
    if seconds is not None and spec.type_vocab_size > 1:
        places[:, 1] = token_types(starts, counts, np.asarray(seconds))
    return places


def _at(ints: Ints) -> int:
    return ints.buffer_info()[0] if isinstance(ints, array) else ints.ctypes.data
