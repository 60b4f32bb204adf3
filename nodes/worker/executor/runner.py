"""Runs steps on a torch model: rows of all sequences as one batch, one forward pass, then the sampler.

Synchronous, used by one thread. Keeps no state between steps except the pages.
"""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from kvstore.pool.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.worker.attention.base import Span, sort_key
from nodes.worker.attention.kinds import kinds_of
from nodes.worker.attention.torch_paged import TorchPagedAttention
from nodes.worker.config import WorkerConfig
from nodes.worker.draw.stage import Draws
from nodes.worker.numerics import TILE_ROWS, check_torch
from nodes.worker.ops.native.load import load_native_runner
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.torch.host_network import TorchNetwork
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.steps.step import RemappableRunner, RunnableStep, StepOutcome
from nodes.worker.weights.opening import open_weights
from nodes.worker.weights.quantization import QuantizedWeights


def load_torch_runner(spec: ModelSpec, config: WorkerConfig, pool: PagePool) -> "HostRunner":
    """Load `spec`'s weights and check this machine's numerics. Raises WorkerError or ModelError.

    Must be called in the thread that will run the steps: torch's number of threads is set per calling thread.
    """
    own_threads = default_threads()
    num_threads = config.num_threads or own_threads
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        dtype = TORCH_DTYPES[spec.compute_dtype(config.dtype)]
        weights = open_weights(spec, dtype)
        view = PoolView(pool.pages_view, pool.layout)
        if (native := load_native_runner(spec, config, weights, view, num_threads)) is not None:
            return native
        torch.set_num_threads(num_threads)
        weights = QuantizedWeights(weights, spec)
        attention = TorchPagedAttention(view, spec.num_heads, kinds_of(spec.layer_windows))
        network = TorchNetwork(spec, weights, attention)
        numerics = check_torch(spec, network, attention, "rows4", num_threads)
        if numerics.rule == "varies":
            del network
            network = TorchNetwork(spec, weights, attention, TILE_ROWS)
            numerics = check_torch(spec, network, attention, "tile16", num_threads)
        return TorchRunner(network, numerics.fingerprint, attention)


@cache
def default_threads() -> int:
    """How many threads torch uses by default, read at the first load, since native kernels leave it only one."""
    return torch.get_num_threads()


class TorchRunner(RemappableRunner):
    """Torch on the CPU. It can be unmapped and mapped again only if `attention`, the network's own, is given."""

    def __init__(self, network: TorchNetwork, numerics: str, attention: TorchPagedAttention | None = None) -> None:
        self._network = network
        self._attention = attention
        self.numerics = numerics

    @override
    def unmap(self, *, backs_up: bool) -> None:
        """`backs_up` must be False: in host memory there is nowhere else to keep weights."""
        assert not backs_up, "host memory is not backed up in host memory"
        assert self._attention is not None, "this runner was not made to be unmapped"
        self._attention.unmap()

    @override
    def remap(self, pool: PagePool) -> None:
        assert self._attention is not None, "this runner was not made to be mapped again"
        self._attention.remap(PoolView(pool.pages_view, pool.layout))

    @override
    def run(self, step: RunnableStep) -> StepOutcome:
        with torch.inference_mode():
            batch = _Batch(step)
            draws = Draws(step.rows, batch.sampling)
            return draws.on_host(self._forward(batch))

    def logits(self, step: RunnableStep) -> dict[int, Tensor]:
        """Logits `[vocab]` of each row that samples, by the row's index in the plan; for tests and embeddings."""
        with torch.inference_mode():
            batch = _Batch(step)
            logits = self._forward(batch)
        return {step.rows.numbers[index]: logits[i] for i, index in enumerate(batch.sampling)}

    def _forward(self, batch: "_Batch") -> Tensor:
        sampled = torch.tensor(batch.sampled_rows, dtype=torch.int64)
        return self._network.forward(batch.token_ids, batch.spans, sampled)


HostRunner = TorchRunner | NativeRunner


class _Batch:
    """A step's rows in the order that attention requires.

    `sampling` holds the indices (into the step's rows) of those that draw, in the order of `sampled_rows`.
    """

    def __init__(self, step: RunnableStep) -> None:
        token_ids = np.frombuffer(step.token_ids, dtype=np.int32)
        page_ids = np.frombuffer(step.page_ids, dtype=np.int32)
        rows = [(Span(row.start, row.end, page_ids[row.page_offset :]), row) for row in step.rows]
        order = sorted(range(len(rows)), key=lambda index: sort_key(rows[index][0]))
        parts: list[npt.NDArray[np.int32]] = []
        self.spans = [rows[index][0] for index in order]
        self.sampling: list[int] = []
        self.sampled_rows: list[int] = []
        num_rows = 0
        for index in order:
            _, row = rows[index]
            parts.append(token_ids[row.token_offset : row.token_offset + row.num_tokens])
            num_rows += row.num_tokens
            if row.draws:
                self.sampling.append(index)
                self.sampled_rows.append(num_rows - 1)
        self.token_ids: Tensor = torch.from_numpy(np.concatenate(parts).astype(np.int64))
