"""How many pages the KV pools on one CUDA device get: what everything else on the device leaves. Pure.

Each worker group has its own weights and activations there, and each process that uses the device its own context.
Bounds of the model's share come from `nodes/worker/pool/device_memory.py`; the worker checks them by measuring.
"""

from typing import Final, NamedTuple

from cli.errors import BadConfig, NoMemory
from cli.plan.settings import Settings
from kvstore.layout import KVLayout
from kvstore.pool.device import CPU
from nodes.model_spec import ModelSpec
from nodes.worker.cuda.buckets import MAX_BUCKET
from nodes.worker.pool.device_memory import activation_bytes, weight_bytes

WORKER_OVERHEAD_BYTES: Final = 1280 << 20
"""A worker's CUDA context and libraries (796 MiB on an H200), FlashInfer's workspace (129 MiB), captured graphs (some
90 MiB), with room for a larger context: `benchmarks.gpu.contexts`."""
AGENT_OVERHEAD_BYTES: Final = 576 << 20
"""The kv_agent's CUDA context: 527 MiB on an H200 (`benchmarks.gpu.contexts`)."""
GROUP_OVERHEAD_BYTES: Final = 512 << 20
"""NCCL's buffers for a tensor-parallel group, at each rank. Estimated: two devices were never there."""
_GIB: Final = 1 << 30


class DeviceMemory(NamedTuple):
    """One device's memory in bytes, in total and free at the moment. `name` as in `cuda:0`."""

    name: str
    total_bytes: int
    free_bytes: int


class DeviceLoad(NamedTuple):
    """What `num_groups` workers of one model need on a device, besides their pools, and how much they may use.

    All bytes are those of one worker. With `tp_size` > 1 it is one rank of a group whose others are on other devices.
    """

    spec: ModelSpec
    dtype: str
    max_batch_tokens: int
    num_groups: int
    mem_fraction: float
    tp_size: int = 1

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.spec, self.dtype, self.tp_size)

    @property
    def activation_bytes(self) -> int:
        return activation_bytes(self.spec, self.dtype, self.max_batch_tokens, MAX_BUCKET, self.tp_size)

    @property
    def overhead_bytes(self) -> int:
        return WORKER_OVERHEAD_BYTES + (GROUP_OVERHEAD_BYTES if self.tp_size > 1 else 0)

    @property
    def group_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.overhead_bytes


def device_pages(memory: DeviceMemory, load: DeviceLoad, layout: KVLayout, wanted: int | None, least: int) -> int:
    """Pages of each group's pool: `wanted`, or as many as fit. Raises NoMemory, with the numbers, below `least`."""
    budget = min(int(memory.total_bytes * load.mem_fraction), memory.free_bytes)
    left = (budget - AGENT_OVERHEAD_BYTES) // load.num_groups - load.group_bytes
    fitting = left // layout.page_bytes
    if fitting >= (least if wanted is None else wanted):
        return fitting if wanted is None else wanted
    raise NoMemory(
        f"{load.spec.name} does not fit into {memory.name}",
        why=_account(memory, load, layout, least if wanted is None else wanted),
        do="use fewer groups, "
        + ("give pools fewer pages" if wanted is not None else "a smaller chunk or --context-length")
        + ", raise --mem-fraction, or stop what else uses the device (nvidia-smi lists it)",
    )


def _account(memory: DeviceMemory, load: DeviceLoad, layout: KVLayout, num_pages: int) -> str:
    budget = int(memory.total_bytes * load.mem_fraction)
    pages = f"{num_pages} pages ({_gib(num_pages * layout.page_bytes)})"
    return (
        f"{load.num_groups} groups of weights ({_gib(load.weight_bytes)}), activations ({_gib(load.activation_bytes)}),"
        f" context and graphs ({_gib(load.overhead_bytes)}) and a pool of {pages}, and the kv_agent's"
        f" context ({_gib(AGENT_OVERHEAD_BYTES)}), take more than"
        f" {load.mem_fraction:.0%} of {_gib(memory.total_bytes)}, which is {_gib(budget)}, or more than the"
        f" {_gib(memory.free_bytes)} that are free"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def check_device_options(settings: Settings, tp_size: int) -> None:
    """Raises BadConfig if an option needs a device, or the CPU, or cannot be combined with another."""
    device = settings.device
    if settings.quantize != "none" and (device != CPU or tp_size > 1):
        raise BadConfig(
            f"--quantize {settings.quantize} cannot be used with "
            + (f"--tp {tp_size}" if device == CPU else f"--device {device}"),
            why="only the CPU's own kernels compute with such weights, in workers that compute alone",
            do="leave --quantize out, or compute on the CPU without --tp",
        )
    if settings.memory_saver and device == CPU:
        raise BadConfig(
            "there is no memory saver on the CPU",
            why="it backs up a device's memory in host memory",
            do="leave --memory-saver out: on the CPU `meshctl release` drops weights, and `resume` reads them again",
        )
    if settings.memory_saver and tp_size > 1:
        raise BadConfig(
            "--memory-saver is for workers that compute alone",
            why="tensor-parallel ranks end together when their memory is released",
            do="leave out that option or --tp; `meshctl release --reload-weights` works with ranks",
        )
