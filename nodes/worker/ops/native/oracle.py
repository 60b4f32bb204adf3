"""Tests whether the kernels compute, and draw, what torch does: on a small model and a few rows, before the real ones.

A build may meet a processor that it never ran on, a compiler that translates it wrongly, or damaged memory; its bits
would still be the same in any batch, which is all that `numerics` checks.
"""

from array import array
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from nodes.asks.edits import RowEdits, RowReads, mask_of
from nodes.model_spec import ModelSpec, Quantization, resolve_model
from nodes.models.registry import model_of
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.draw.measuring import measured
from nodes.worker.draw.sampler import Draw, sample
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.rows import NativeRows
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.ops.native.weights import pack_weights
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.batch import batch_types, host_batch, pack, unpack
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.pool.view import PoolView
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep
from nodes.worker.weights.part_weights import PartWeights
from nodes.worker.weights.quantization import QuantizedWeights, quantized_names
from nodes.worker.weights.random_weights import RandomWeights

TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest accepted difference of a logit, in units of the logits' deviation. Measured with AVX2: 1e-6 and 0.02."""
_PROMPT: Final = 70
_AT_ONCE: Final = 66
_SECOND: Final = 40


def disagreement(
    library: Library, dtype: torch.dtype, quantization: Quantization = "none", *, is_encoder: bool = False
) -> float:
    """Largest difference of a logit from torch's, in units of their deviation; infinite if one is not a number.

    Runs a chunk over two splits, the rest of the prompt, then a single row, through two layers with norms of heads, one
    of which has a window; with `is_encoder` a whole sequence over two splits, of which all states are compared. Takes
    30 to 60 ms; torch computes in one thread, since more would only be in the way here.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _disagreement(library, dtype, _small_encoder() if is_encoder else _small_decoder(), quantization)
    finally:
        torch.set_num_threads(num_threads)


def _small_decoder() -> ModelSpec:
    return msgspec.structs.replace(
        resolve_model("random:tiny-qwen3"), num_layers=2, hidden_size=64, intermediate_size=112, num_heads=4,
        num_kv_heads=2, head_dim=32, vocab_size=130, sliding_window=48, sliding_layers=(1,),
    )  # fmt: skip


def _small_encoder() -> ModelSpec:
    return msgspec.structs.replace(resolve_model("random:tiny-bert"), num_layers=2, vocab_size=130)


def _disagreement(library: Library, dtype: torch.dtype, spec: ModelSpec, quantization: Quantization) -> float:
    spec = spec.quantized(quantization)
    weights = RandomWeights(spec, dtype)
    layout = spec.kv_layout("bfloat16" if dtype == torch.bfloat16 else "float32")
    kinds, num_pages = kinds_of(spec), layout.num_pages_for(_PROMPT)
    # A pool for each: shared pages would hide that one of them writes wrongly.
    pools = [PoolView(bytearray((1 + num_pages) * layout.page_bytes), layout) for _ in range(2)]
    model = model_of(spec)
    packed = pack_weights(model, PartWeights(model, weights, spec.shard()), library, quantized_names(spec))
    steps = NativeSteps(spec, library, packed, model, pools[0])
    oracle = DeviceNetwork(spec, QuantizedWeights(weights, spec), TorchKernels(), torch.device("cpu"))
    attention = TorchAttention(pools[1], spec.num_heads, kinds)
    nobody = OpenSequence(Open(0, 0, 1, Sampling(), second_from=_SECOND if spec.is_encoder else 0))
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, _PROMPT, dtype=np.int32)
    pages = np.arange(1, 1 + num_pages, dtype=np.int32)
    worst = 0.0
    # 66 is past a split of 64 keys, so the merging of splits is tested as well.
    whole, chunks = ((0, _PROMPT),), ((0, _AT_ONCE), (_AT_ONCE, _PROMPT - 1), (_PROMPT - 1, _PROMPT))
    for begin, end in whole if spec.is_encoder else chunks:
        last = np.array([end - begin - 1], dtype=np.int32)
        spans = np.array([begin, end - begin, 0, 0], dtype=np.int32)
        pooled = steps.room_for(np.arange(end, dtype=np.int32)) if spec.is_encoder else None
        seconds = np.array([nobody.second_from], dtype=np.int32)
        found = steps.run(Columns(tokens[begin:end], spans, pages, last, seconds), pooled=pooled)[1]
        rows = Rows([nobody], [begin], [end - begin], [0], [0])
        step = RunnableStep(0, rows, array("i", tokens[begin:end].tobytes()), array("i", pages.tobytes()))
        batch = host_batch(step, layout.page_size)
        arrays = unpack(torch.from_numpy(pack(batch)), batch.num_rows, 1)
        attention.plan(batch, arrays)
        types = torch.from_numpy(batch_types(step, spec)) if spec.is_encoder else None
        every = None if pooled is None else torch.from_numpy(pooled.rows)
        expected = oracle.forward(
            arrays.token_ids, arrays.positions, attention, arrays.sampled, pooled=every, types=types
        ).float()
        if pooled is not None:
            assert oracle.states is not None, "an encoder pools"
            found, expected = torch.from_numpy(pooled.states), oracle.states
        assert found is not None
        difference = float((found.float() - expected).abs().max() / expected.std())
        # Any comparison with NaN is false.
        worst = max(worst, difference) if difference < float("inf") else float("inf")
    return worst


_WORDS: Final = 2500
_LOG_TOLERANCE: Final = 1e-4
"""Largest accepted difference of a logarithm; they are 0 to -20 here, and an ulp of `exp` is 1e-7."""


class TriedDraws(NamedTuple):
    """Rows `[rows, words]` that draw in all ways there are, and are read."""

    logits: Tensor
    draws: list[Draw]
    reads: list[RowReads]

    def drawn_by(self, rows: NativeRows, *which: int) -> tuple[list[int], Tensor]:
        """The tokens of all rows, or of some, and what is read of them."""
        these = which or range(len(self.draws))
        logits = self.logits[list(these)]
        altered = dict(enumerate(self.draws[i] for i in these))
        tokens, lines = rows.draw(logits, altered, dict(enumerate(self.reads[i] for i in these)), [0] * len(altered))
        assert lines is not None
        return tokens, lines


def tried_draws() -> TriedDraws:
    """The same rows each time."""
    edits = RowEdits()
    edits.mask, edits.floor = mask_of(range(0, _WORDS, 3), _WORDS), {6, 9}
    edits.bias, edits.scale, edits.add = {12: 2.0}, {3: 1.5, 12: 1.3}, {15: -0.5}
    samplings = [
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(temperature=0.7, top_p=0.95),
        Sampling(top_k=40),
        Sampling(temperature=1.3, min_p=0.02, top_p=0.9),
    ]
    draws = [
        Draw(msgspec.structs.replace(one, seed=at), at, with_edits)
        for at, (one, with_edits) in enumerate((one, some) for one in samplings for some in (None, edits))
    ]
    logits = torch.randn(len(draws), _WORDS, generator=torch.Generator().manual_seed(7)) * 3
    reads = [RowReads(5, (3, 12), "processed" if at % 3 else "raw") for at in range(len(draws))]
    return TriedDraws(logits, draws, reads)


def draws_agree(rows: NativeRows) -> bool:
    """Whether the library draws and reads what torch does. Takes 5 ms."""
    tried = tried_draws()
    tokens, lines = tried.drawn_by(rows)
    if tokens != sample(tried.logits, tried.draws).tolist():
        return False
    expected = measured(tried.logits, torch.tensor(tokens), tried.draws, tried.reads)
    is_log = torch.ones(lines.shape[1], dtype=torch.bool)
    # Ranks and ids are equal, logarithms nearly.
    is_log[[1, *range(2, 12, 2)]] = False
    logs, others = lines[:, is_log].view(torch.float32), lines[:, ~is_log]
    difference = (logs - expected[:, is_log].view(torch.float32)).abs().max()
    return torch.equal(others, expected[:, ~is_log]) and float(difference) <= _LOG_TOLERANCE
