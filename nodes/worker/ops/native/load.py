"""Loads a model for the native kernels, if this machine has some that compute it."""

import torch

from nodes.model_spec import ModelSpec
from nodes.models.registry import model_of
from nodes.worker.config import WorkerConfig
from nodes.worker.numerics import Numerics, check_numerics, numbers_of
from nodes.worker.ops.native.builds import Library, choose_library
from nodes.worker.ops.native.oracle import TOLERANCE, disagreement, draws_agree
from nodes.worker.ops.native.probe import Probe, draw_results, program_results
from nodes.worker.ops.native.program import ProgramUnfit
from nodes.worker.ops.native.rows import NativeRows
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.native.steps import NativeSteps
from nodes.worker.ops.native.weights import pack_weights
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.vectors.head import VectorHead
from nodes.worker.weights.load_progress import current_load
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.part_weights import PartWeights
from nodes.worker.weights.quantization import quantized_names


def load_native_runner(
    spec: ModelSpec,
    config: WorkerConfig,
    source: WeightSource,
    view: PoolView,
    num_threads: int,
    collectives: Collectives | None = None,
) -> NativeRunner | None:
    """The model as a recorded program; None if torch has to compute it, with the reason in the load's progress.

    Nothing that was loaded is left then. With `collectives` it is this rank's part, and all ranks must load; if one of
    them has no native kernels, none uses them. Raises what `source` raises, and CollectiveFailed.
    """
    library, why = _fitting_library(config, TORCH_DTYPES[view.layout.dtype], spec)
    if (
        collectives is not None
        and collectives.all_reduce(torch.tensor([float(library is not None)])) < collectives.size
    ):
        library, why = None, why or "torch kernels: another rank has no native kernels"
    rows, draws_note = (None, "") if library is None else _fitting_rows(library, collectives)
    found = None if library is None else _load(spec, source, view, num_threads, library, rows, collectives)
    if isinstance(found, str):
        found, why = None, found
    _say(why or draws_note)
    return found


def _fitting_library(config: WorkerConfig, dtype: torch.dtype, spec: ModelSpec) -> tuple[Library | None, str]:
    """The library that computes here, or None and why not."""
    library, note = choose_library(config.kernels)
    if library is None:
        return None, note
    difference = disagreement(library, dtype, spec.quantization, is_encoder=spec.is_encoder)
    if difference <= TOLERANCE[dtype]:
        return library, note
    # Not an error: torch computes correctly, and somebody waits for the mesh.
    return None, (
        f"torch kernels: the native kernels ({library.name}) give wrong results on this CPU (logits differ by"
        f" {difference:.2g} standard deviations); please report it with /proc/cpuinfo"
    )


def _fitting_rows(library: Library, collectives: Collectives | None) -> tuple[NativeRows | None, str]:
    """What draws with the library here; None: torch draws on all ranks, and why."""
    rows = NativeRows(library)
    agrees = draws_agree(rows)
    if collectives is not None:
        agrees = float(collectives.all_reduce(torch.tensor([float(agrees)]))) == collectives.size
    if agrees:
        return rows, ""
    return None, (
        f"torch draws: those of the native kernels ({library.name}) differ from torch's on this CPU; please report it"
        " with /proc/cpuinfo"
    )


def _load(
    spec: ModelSpec,
    source: WeightSource,
    view: PoolView,
    num_threads: int,
    library: Library,
    rows: NativeRows | None,
    collectives: Collectives | None,
) -> NativeRunner | str:
    try:
        numerics = _numerics(spec, view, num_threads, library, rows, collectives)
    except ProgramUnfit as error:
        return f"torch kernels: {error}"
    # Better slower than a text that depends on the other requests: failover promises the same bits.
    if numerics.rule == "varies":
        return "torch kernels: with native kernels the bits would depend on the batch here"
    model = model_of(spec)
    shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
    weights = pack_weights(model, PartWeights(model, source, shard), library, quantized_names(spec))
    steps = NativeSteps(spec, library, weights, model, view, collectives)
    return NativeRunner(steps, numerics.fingerprint, rows, VectorHead(spec))


def _numerics(
    spec: ModelSpec,
    view: PoolView,
    num_threads: int,
    library: Library,
    rows: NativeRows | None,
    collectives: Collectives | None,
) -> Numerics:
    """Before the model itself is loaded, so that nothing was read in vain. Raises ProgramUnfit."""
    dtype = TORCH_DTYPES[view.layout.dtype]
    probe = Probe(spec, library, view.layout, dtype, collectives)

    def set_threads(count: int) -> None:
        library.set_threads(count)
        # torch's own threads would idle beside them: little work is left to torch.
        torch.set_num_threads(1)

    def tried() -> list[tuple[bool, torch.Tensor]]:
        drawn = () if rows is None else draw_results(rows)
        return [*program_results(probe), *drawn]

    # The sums over the inner dimension are cut differently.
    tp = "" if collectives is None else f"-tp{collectives.size}"
    return check_numerics(tried, "any", numbers_of(spec, dtype), f"native-{library.name}{tp}", num_threads, set_threads)


def _say(kernels_note: str) -> None:
    if (progress := current_load.get()) is not None:
        progress.kernels_note = kernels_note
