"""Runs a recorded model over a pool: a step's columns go in, drawn tokens and logits come out."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.decoder import Decoder
from nodes.worker.layers.rotary import RotaryTable
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.program import Step
from nodes.worker.ops.native.recording import Recording
from nodes.worker.ops.native.weights import Weights
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import PoolView
from nodes.worker.sampler import most_likely

Ints = npt.NDArray[np.int32]


class Columns(NamedTuple):
    """A step, contiguous int32. `token_ids` is of its rows; `spans` `[][4]`: first position, tokens, first of `pages`,
    first row; `sampled` are the rows that draw.
    """

    token_ids: Ints
    spans: Ints
    pages: Ints
    sampled: Ints


class NativeSteps:
    """A model's program over `pool`, whose memory may be another one later. Raises ProgramUnfit.

    With `collectives` it is one rank's part of it: between its operations sums are taken over all ranks, and the logits
    are gathered, so that every rank has the same ones.
    """

    def __init__(
        self,
        spec: ModelSpec,
        library: Library,
        weights: Weights,
        model: Decoder,
        pool: PoolView,
        collectives: Collectives | None = None,
    ) -> None:
        self._shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
        self.collectives = collectives
        if collectives is not None:
            assert isinstance(weights.embedding, Tensor), "ranks have no int8 weights"
            # One row more: what tokens that another rank has look up.
            weights = weights._replace(embedding=F.pad(weights.embedding, (0, 0, 0, 1)))
        recording = Recording(spec, weights, pool.layout, self._shard)
        self._program = recording.program(library, model)
        self._weights = weights
        self._vocab_size = spec.vocab_size
        self._ropes = recording.ropes
        self._rotary = {rope: RotaryTable(rope, spec.head_dim) for rope in recording.ropes}
        self._num_positions = 0
        self._pool: PoolView | None = pool

    def unmap(self) -> None:
        """Forget the pool; nothing can be computed until `remap`."""
        self._pool = None

    def remap(self, pool: PoolView) -> None:
        """Compute over another pool of the same layout."""
        self._pool = pool

    def run(self, columns: Columns, *, wants_logits: bool = True) -> tuple[Ints, Tensor | None]:
        """The most likely token of each sampled row, -1 where a logit is not finite; their logits, `[sampled, vocab]`.

        Logits are float32. KV of all rows is written to the pages. Raises CollectiveFailed.
        """
        assert self._pool is not None, "it was unmapped"
        token_ids, spans, pages, sampled = columns
        num_rows, num_sampled = len(token_ids), len(sampled)
        # Angles are made as contexts grow, not for the whole context length when a model is loaded.
        self._reach(int((spans[:, 0] + spans[:, 1]).max()))
        drawn = np.empty(num_sampled, dtype=np.int32)
        if self.collectives is not None:
            own = self._shard.vocab
            token_ids = np.where((token_ids >= own.start) & (token_ids < own.stop), token_ids - own.start, len(own))
            # A rank has the logits of its own words only, so the most likely word is found after they are gathered.
            token_ids, wants_logits = token_ids.astype(np.int32), True
        # None for greedy steps: the head then keeps a maximum for each panel and writes no logits (608 kB a row at
        # 151,936 words).
        logits = torch.empty(num_sampled, len(self._shard.vocab)) if wants_logits else None
        blocks = np.empty((num_rows, 3), dtype=np.int32)
        self._program.run(
            Step(
                pool=self._pool.pages.data_ptr(),
                token_ids=token_ids.ctypes.data,
                spans=spans.ctypes.data,
                pages=pages.ctypes.data,
                sampled=sampled.ctypes.data,
                drawn=drawn.ctypes.data,
                logits=None if logits is None else logits.data_ptr(),
                blocks=blocks.ctypes.data,
                num_rows=num_rows,
                num_spans=len(spans),
                num_sampled=num_sampled,
            ),
            self.collectives,
        )
        if self.collectives is not None and logits is not None:
            logits = self.collectives.all_gather(logits)[:, : self._vocab_size]
            drawn = np.array([token for _, token in most_likely(logits)], dtype=np.int32)
        return drawn, logits

    def _reach(self, num_positions: int) -> None:
        """Angles of so many positions."""
        if num_positions <= self._num_positions:
            return
        tables = {rope: table.tables(num_positions) for rope, table in self._rotary.items()}
        self._num_positions = min(len(cos) for cos, _ in tables.values())
        for call, rope in zip(self._program.attends, self._ropes, strict=True):
            cos, sin = tables[rope]
            call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
