"""Builds the runner of one CUDA worker: weights, backends, graphs, and the check that all of it fits."""

from contextlib import nullcontext
from typing import Any, Final

import torch

from kvstore.pool.device import CPU, cuda_ordinal
from kvstore.pool.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.worker.config import WorkerConfig
from nodes.worker.cuda.buckets import MAX_BUCKET, Buckets, bucket_sizes
from nodes.worker.cuda.few_rows import load_few_rows
from nodes.worker.cuda.flashinfer_backend import FlashInferAttention, FlashInferKernels, load_flashinfer
from nodes.worker.cuda.graphs import DecodeGraphs, GraphRecorder
from nodes.worker.cuda.heads import load_heads_kernel
from nodes.worker.cuda.memory import measured_activation_bytes
from nodes.worker.cuda.memory_saver import load_memory_saver
from nodes.worker.errors import BackendMissing, DeviceMemoryShort, DeviceUnfit, WorkerError
from nodes.worker.ops.torch.attention import DeviceAttention, TorchAttention
from nodes.worker.ops.torch.kernels import Kernels, TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.device_memory import Footprint, activation_bytes, check_fit, weight_bytes
from nodes.worker.pool.device_view import view_device_pages
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.vectors.head import VectorHead
from nodes.worker.weights.opening import open_weights

TILE_ROWS: Final = 64
"""Rows of one product with `deterministic`: about as many as take hardly longer than one, as memory is the limit."""


def load_cuda_runner(
    spec: ModelSpec, config: WorkerConfig, pool: PagePool, collectives: Collectives | None = None
) -> DeviceRunner:
    """Load `spec`'s weights onto the pool's device. Raises WorkerError, ModelError, PoolError or CollectiveFailed.

    With `collectives` only this rank's parts are loaded, and all ranks must load.

    Must be called in the thread that will launch the steps: the current device and stream are set per thread. Nothing
    runs on the device any more when it returns.
    """
    if not torch.cuda.is_available():
        raise BackendMissing(
            f"the worker's device is {config.device}, but torch {torch.__version__} sees no CUDA device: install a CUDA"
            " build of torch and the driver, or set the worker's device to cpu"
        )
    if pool.info.device == CPU:
        raise BackendMissing(
            f"the pool of {config.group} is in host memory, but the worker's device is {config.device}: give the"
            " kv_agent the same device"
        )
    if cuda_ordinal(pool.info.device) != cuda_ordinal(config.device):
        raise DeviceUnfit(
            f"the pool of {config.group} is on {pool.info.device}, but the worker's device is {config.device}: give"
            " both the same device"
        )
    device = torch.device("cuda", cuda_ordinal(pool.info.device))
    torch.cuda.set_device(device)
    if config.deterministic:
        # Otherwise a product may be cut along its inner dimension, and the parts summed in bfloat16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    view = _view_of(pool)
    dtype = pool.info.layout.dtype
    size = 1 if collectives is None else collectives.size
    bound = activation_bytes(spec, dtype, config.max_batch_tokens, MAX_BUCKET, size)
    _, total = torch.cuda.mem_get_info(device)
    footprint = Footprint(total, config.mem_fraction, weight_bytes(spec, dtype, size), bound)
    check_fit(footprint, pool.info.pages_bytes)
    try:
        runner, network, attention = build_runner(spec, config, view, collectives)
        with torch.inference_mode():
            measured = measured_activation_bytes(network, attention, config.max_batch_tokens, view.layout.page_size)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryShort(
            f"{device} has no room for {spec.name} beside a pool of {pool.info.pages_bytes / (1 << 30):.2f} GiB: give"
            f" the pool fewer pages, lower the memory fraction, or stop what else uses the device ({error})"
        ) from None
    check_fit(footprint._replace(weights=network.weight_bytes, activations=max(measured, bound)), pool.info.pages_bytes)
    runner.synchronize()
    runner.view_of = _view_of
    return runner


def _view_of(pool: PagePool) -> PoolView:
    return view_device_pages(pool.device_pages, pool.info.layout)


def build_runner(
    spec: ModelSpec, config: WorkerConfig, view: PoolView, collectives: Collectives | None = None
) -> tuple[DeviceRunner, DeviceNetwork, DeviceAttention]:
    """A runner over `view`, on its device; on the CPU, where tests build it, with the torch backend only.

    Raises WorkerError or ModelError.
    """
    device = view.pages.device
    dtype = TORCH_DTYPES[spec.compute_dtype(config.dtype)]
    with torch.inference_mode():
        shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
        weights = open_weights(spec, dtype, shard.size)
        kernels, attention, version = _backends(spec, config, view, shard.num_heads)
        tile_rows = TILE_ROWS if config.deterministic else 0
        # Not with `deterministic`: a row would have other bits where few are computed with it. Nor in torch's backend,
        # the oracle of all others.
        few_rows = load_few_rows(device) if isinstance(kernels, FlashInferKernels) and not tile_rows else None
        saver = load_memory_saver() if config.memory_saver else None
        with saver.region() if saver is not None else nullcontext():
            network = DeviceNetwork(spec, weights, kernels, device, tile_rows, collectives, few_rows)
        graphs = _graphs(config, network, attention, view)
        numerics = fingerprint(
            device, dtype, version, graphs=graphs is not None, deterministic=config.deterministic, tp_size=shard.size
        )
        runner = DeviceRunner(network, attention, view.layout.page_size, config.max_batch_tokens, numerics, graphs)

        def over(other: PoolView) -> tuple[DeviceAttention, DecodeGraphs | None]:
            _, attention, _ = _backends(spec, config, other, shard.num_heads)
            return attention, _graphs(config, network, attention, other)

        runner.over, runner.saver, runner.head = over, saver, VectorHead(spec)
    return runner, network, attention


def _graphs(
    config: WorkerConfig, network: DeviceNetwork, attention: DeviceAttention, view: PoolView
) -> DecodeGraphs | None:
    """Captured decode steps, if configured and possible. They hold the addresses of pool and workspaces."""
    if not (config.cuda_graphs and attention.can_capture and network.can_capture):
        return None
    most = min(MAX_BUCKET, config.max_batch_tokens)
    max_pages = most * (view.layout.num_pages_for(network.spec.context_length) + 1)
    recorder = GraphRecorder(view.pages.device)
    return DecodeGraphs(network, attention, Buckets(bucket_sizes(most)), recorder, max_pages)


def fingerprint(
    device: torch.device, dtype: torch.dtype, attention: str, *, graphs: bool, deterministic: bool, tp_size: int = 1
) -> str:
    """Names everything that bits depend on, as far as it is known without computing: see `Runner.numerics`.

    `attention` is the backend with its version. Graphs matter, because their steps are padded to other numbers of rows.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (
        f"torch-{torch.__version__}",
        f"cuda-{torch.version.cuda or 'none'}",
        name.replace(" ", "-").lower(),
        str(dtype).removeprefix("torch."),
        attention,
        "graphs" if graphs else "eager",
        # The sums over the inner dimension are cut differently.
        *((f"tp{tp_size}",) if tp_size > 1 else ()),
        "fixed" if deterministic else "varies",
    )
    return "/".join(parts)


def _backends(
    spec: ModelSpec, config: WorkerConfig, view: PoolView, num_heads: int
) -> tuple[Kernels, DeviceAttention, str]:
    """Kernels and attention as configured, and their name for the fingerprint."""
    kinds = kinds_of(spec)
    if view.pages.device.type == "cuda" and config.attention != "torch" and not spec.is_encoder:
        try:
            flashinfer: Any = load_flashinfer()
            attention = FlashInferAttention(
                flashinfer,
                view,
                num_heads,
                config.max_batch_tokens,
                kinds,
                deterministic=config.deterministic,
                heads=load_heads_kernel if view.pages.dtype == torch.bfloat16 else None,
            )
        except WorkerError:
            if config.attention == "flashinfer":
                raise
        else:
            return FlashInferKernels(flashinfer), attention, f"flashinfer-{flashinfer.__version__}"
    if config.attention == "flashinfer" and not spec.is_encoder:
        raise BackendMissing(f"FlashInfer needs a CUDA device, but the pool is on {view.pages.device}")
    return TorchKernels(), TorchAttention(view, num_heads, kinds), "torch"
