"""Runs steps on a torch model: rows of all sequences as one batch, one forward pass, then the sampler.

Synchronous, used by one thread. Stateless between steps but for the pages.
"""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.pool.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.worker.attention.base import Span, sort_key
from nodes.worker.attention.kinds import AttentionKind, kinds_of
from nodes.worker.attention.torch_paged import TorchPagedAttention
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import BackendMissing
from nodes.worker.network import TorchNetwork
from nodes.worker.numerics import TILE_ROWS, HostAttention, HostNetwork, check_numerics
from nodes.worker.ops.native.attention import NativeAttention
from nodes.worker.ops.native.library import choose_library
from nodes.worker.ops.native.network import NativeNetwork
from nodes.worker.ops.native.oracle import TOLERANCE, disagreement
from nodes.worker.ops.native.probe import program_results
from nodes.worker.ops.native.program import ProgramUnfit
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.native.steps import NativeSteps
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.sampler import Draw, sample
from nodes.worker.steps.step import RunnableStep, StepOutcome, drawn_outcome
from nodes.worker.weights.load_progress import current_load
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.opening import open_weights


def load_torch_runner(spec: ModelSpec, config: WorkerConfig, pool: PagePool) -> "HostRunner":
    """Load `spec`'s weights and check this machine's numerics. Raises WorkerError or ModelError.

    Must be called in the thread that will run the steps: the number of threads is a thread's own setting.
    """
    own_threads = default_threads()
    num_threads = config.num_threads or own_threads
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        dtype = TORCH_DTYPES[spec.compute_dtype(config.dtype)]
        weights = open_weights(spec, dtype)
        view = PoolView(pool.pages_view, pool.layout)
        kinds = kinds_of(spec.layer_windows)
        if (native := _native(spec, config, weights, view, kinds)) is not None:
            if (runner := _native_runner(spec, *native, view, num_threads)) is not None:
                return runner
            _say("torch kernels: bits of the native ones vary with the batch here")
        # Weights are most of the memory there is: those that serve no more go before they are loaded in another form.
        native = None
        attention = TorchPagedAttention(view, spec.num_heads, kinds)
        network = TorchNetwork(spec, weights, attention)
        numerics = check_numerics(spec, network, attention, "rows4", num_threads)
        if numerics.rule == "varies":
            del network
            network = TorchNetwork(spec, weights, attention, TILE_ROWS)
            numerics = check_numerics(spec, network, attention, "tile16", num_threads)
        return TorchRunner(network, numerics.fingerprint, attention)


@cache
def default_threads() -> int:
    """How many threads torch takes by itself: what it says at the first load, since native kernels leave it one."""
    return torch.get_num_threads()


def _native(
    spec: ModelSpec, config: WorkerConfig, weights: WeightSource, view: PoolView, kinds: Sequence[AttentionKind]
) -> tuple[NativeNetwork, NativeAttention] | None:
    """The network by the native kernels; None, and said why, where there are none for it."""
    choice = choose_library(config.kernels)
    _say(choice.note)
    if choice.library is None:
        return None
    dtype = TORCH_DTYPES[view.layout.dtype]
    if not (difference := disagreement(choice.library, dtype)) <= TOLERANCE[dtype]:
        # Not an error: torch is right, and somebody waits for the mesh.
        _say(
            f"torch kernels: the native ones ({choice.library.name}) compute something else on this CPU (logits differ "
            f"by {difference:.2g} of their deviation); please report it with /proc/cpuinfo"
        )
        return None
    try:
        attention = NativeAttention(choice.library, view, spec.num_heads, kinds)
    except BackendMissing as error:
        _say(f"torch kernels: {error.message}")
        return None
    return NativeNetwork(spec, weights, attention, choice.library), attention


def _native_runner(
    spec: ModelSpec, network: NativeNetwork, attention: NativeAttention, view: PoolView, num_threads: int
) -> "HostRunner | None":
    """By a recorded program, or operation by operation where it cannot be recorded; None if bits vary."""
    library, weights, model = network.library, network.weights(), network.model
    try:
        steps = NativeSteps(spec, library, weights, model, view)
    except ProgramUnfit as error:
        _say(f"native kernels, an operation at a time: {error}")
        numerics = check_numerics(spec, network, attention, "any", num_threads)
        return TorchRunner(network, numerics.fingerprint, attention) if numerics.rule == "any" else None
    probe = partial(program_results, spec, library, weights, model, view.layout)
    numerics = check_numerics(spec, network, attention, "any", num_threads, probe)
    return NativeRunner(steps, numerics.fingerprint) if numerics.rule == "any" else None


def _say(kernels_note: str) -> None:
    if (progress := current_load.get()) is not None:
        progress.kernels_note = kernels_note


class TorchRunner:
    """See `Runner`, and `RemappableRunner` if `attention`, which is the network's, is given."""

    def __init__(self, network: HostNetwork, numerics: str, attention: HostAttention | None = None) -> None:
        self._network = network
        self._attention = attention
        self.numerics = numerics

    def unmap(self, *, backs_up: bool) -> None:
        """See `RemappableRunner`. In host memory there is nowhere else to keep weights."""
        assert not backs_up, "host memory is not backed up in host memory"
        assert self._attention is not None, "it was not made to be unmapped"
        self._attention.unmap()

    def remap(self, pool: PagePool) -> None:
        """See `RemappableRunner`."""
        assert self._attention is not None, "it was unmapped"
        self._attention.remap(PoolView(pool.pages_view, pool.layout))

    def run(self, step: RunnableStep) -> StepOutcome:
        """See `Runner.run`."""
        with torch.inference_mode():
            batch = _Batch(step)
            logits = self._forward(batch)
            drawn = sample(logits, batch.draws) if batch.draws else []
        return drawn_outcome(step, batch.sampling, drawn)

    def logits(self, step: RunnableStep) -> dict[int, Tensor]:
        """Logits `[vocab]` of each row that samples, by the row's index in the plan; for tests and embeddings."""
        with torch.inference_mode():
            batch = _Batch(step)
            logits = self._forward(batch)
        return {step.rows[index].row: logits[i] for i, index in enumerate(batch.sampling)}

    def _forward(self, batch: "_Batch") -> Tensor:
        if batch.draws:
            return self._network.forward(batch.token_ids, batch.spans, torch.tensor(batch.sampled_rows))
        return self._network.forward(batch.token_ids, batch.spans, torch.empty(0, dtype=torch.int64))


HostRunner = TorchRunner | NativeRunner


class _Batch:
    """A step's rows in the order in which attention wants them.

    `sampling` holds the indices (into the step's rows) of those that draw, in the order of `draws` and `sampled_rows`.
    """

    def __init__(self, step: RunnableStep) -> None:
        token_ids = np.frombuffer(step.token_ids, dtype=np.int32)
        page_ids = np.frombuffer(step.page_ids, dtype=np.int32)
        spans = [
            Span(row.start, row.end, page_ids[row.page_offset : row.page_offset + row.num_pages]) for row in step.rows
        ]
        order = sorted(range(len(spans)), key=lambda index: sort_key(spans[index]))
        parts: list[npt.NDArray[np.int32]] = []
        self.spans = [spans[index] for index in order]
        self.sampling: list[int] = []
        self.sampled_rows: list[int] = []
        self.draws: list[Draw] = []
        num_rows = 0
        for index in order:
            row = step.rows[index]
            parts.append(token_ids[row.token_offset : row.token_offset + row.num_tokens])
            num_rows += row.num_tokens
            if row.sampling is not None:
                self.sampling.append(index)
                self.sampled_rows.append(num_rows - 1)
                self.draws.append(Draw(row.sampling, row.output_position, row.history))
        self.token_ids: Tensor = torch.from_numpy(np.concatenate(parts).astype(np.int64))
