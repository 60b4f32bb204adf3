"""Loads a model for the native kernels, where this machine has some that compute it."""

import torch

from nodes.model_spec import ModelSpec
from nodes.models.registry import decoder
from nodes.worker.config import WorkerConfig
from nodes.worker.numerics import check_numerics
from nodes.worker.ops.native.library import choose_library
from nodes.worker.ops.native.oracle import TOLERANCE, disagreement
from nodes.worker.ops.native.probe import program_results
from nodes.worker.ops.native.program import ProgramUnfit
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.native.steps import NativeSteps
from nodes.worker.ops.native.weights import pack_weights
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.weights.load_progress import current_load
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.part_weights import PartWeights


def load_native_runner(
    spec: ModelSpec, config: WorkerConfig, source: WeightSource, view: PoolView, num_threads: int
) -> NativeRunner | None:
    """The model as a recorded program; None, and said to whom waits for the load, where torch has to compute it.

    Nothing that was loaded is left then. Raises what `source` raises.
    """
    choice = choose_library(config.kernels)
    library, dtype = choice.library, TORCH_DTYPES[view.layout.dtype]
    if library is None:
        return _unfit(choice.note)
    if not (difference := disagreement(library, dtype)) <= TOLERANCE[dtype]:
        # Not an error: torch is right, and somebody waits for the mesh.
        return _unfit(
            f"torch kernels: the native ones ({library.name}) compute something else on this CPU (logits differ by"
            f" {difference:.2g} of their deviation); please report it with /proc/cpuinfo"
        )
    model = decoder(spec)
    weights = pack_weights(model, PartWeights(model, source, spec.shard()), library)
    try:
        steps = NativeSteps(spec, library, weights, model, view)
    except ProgramUnfit as error:
        return _unfit(f"torch kernels: {error}")

    def set_threads(count: int) -> None:
        library.set_threads(count)
        # Torch's own stand still beside them, for what is left to it is small.
        torch.set_num_threads(1)

    numerics = check_numerics(
        lambda: list(program_results(spec, library, weights, model, view.layout)),
        "any",
        dtype,
        f"native-{library.name}",
        num_threads,
        set_threads,
    )
    if numerics.rule == "varies":
        return _unfit("torch kernels: bits of the native ones vary with the batch here")
    _say("")
    return NativeRunner(steps, numerics.fingerprint)


def _unfit(why: str) -> None:
    _say(why)


def _say(kernels_note: str) -> None:
    if (progress := current_load.get()) is not None:
        progress.kernels_note = kernels_note
