"""Loads the runner of a worker on the CPU: native kernels, or torch where they do not compute the model."""

from functools import cache

import torch

from kvstore.pool.page_pool import PagePool
from nodes.model_spec import ModelSpec
from nodes.worker.config import WorkerConfig
from nodes.worker.numerics import TILE_ROWS, Numerics, Rule, check_torch, drawn_model
from nodes.worker.ops.native.load import load_native_runner
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.ops.torch.runner import TorchRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.vectors.head import VectorHead
from nodes.worker.weights.loader import WeightSource
from nodes.worker.weights.opening import open_weights
from nodes.worker.weights.quantization import QuantizedWeights
from nodes.worker.weights.random_weights import PROBE_PIECE, RandomWeights

HostRunner = TorchRunner | NativeRunner


def load_host_runner(
    spec: ModelSpec, config: WorkerConfig, pool: PagePool, collectives: Collectives | None = None
) -> HostRunner:
    """Load `spec`'s weights, with `collectives` this rank's part, and check this machine's numerics.

    The bits of ranks are not those of one worker alone. Raises WorkerError, ModelError or CollectiveFailed. Must be
    called in the thread that will run the steps: torch's number of threads is set per calling thread.
    """
    own_threads = default_threads()
    num_threads = config.num_threads or own_threads
    torch.set_num_threads(num_threads)
    shard = spec.shard() if collectives is None else spec.shard(collectives.rank, collectives.size)
    with torch.inference_mode():
        view = PoolView(pool.pages_view, pool.layout)
        dtype = TORCH_DTYPES[spec.compute_dtype(config.dtype)]
        source = open_weights(spec, dtype, shard.size)
        if (native := load_native_runner(spec, config, source, view, num_threads, collectives)) is not None:
            return native
        torch.set_num_threads(num_threads)

        def attention_over(over: PoolView) -> TorchAttention:
            return TorchAttention(over, shard.num_heads, kinds_of(spec))

        def network_of(spec: ModelSpec, source: WeightSource, tile_rows: int) -> DeviceNetwork:
            weights = source if spec.quantization == "none" else QuantizedWeights(source, spec)
            return DeviceNetwork(spec, weights, TorchKernels(), torch.device("cpu"), tile_rows, collectives)

        def checked(rule: Rule, tile_rows: int) -> Numerics:
            # Of all words: libraries choose their kernels by shapes.
            drawn = drawn_model(spec)
            network = network_of(drawn, RandomWeights(drawn, dtype, PROBE_PIECE), tile_rows)
            return check_torch(spec, network, attention, rule, num_threads)

        attention, tile_rows = attention_over(view), 0
        numerics = checked("rows4", tile_rows)
        if numerics.rule == "varies":
            tile_rows = TILE_ROWS
            numerics = checked("tile16", tile_rows)
        network = network_of(spec, source, tile_rows)
    runner = TorchRunner(network, attention, view.layout.page_size, numerics.fingerprint)
    runner.head = VectorHead(spec)
    runner.over = lambda other: (attention_over(other), None)
    return runner


@cache
def default_threads() -> int:
    """How many threads torch uses by default, read at the first load, since native kernels leave it only one."""
    return torch.get_num_threads()
