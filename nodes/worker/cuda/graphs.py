"""Decode steps captured once per bucket and replayed: one launch in place of some three hundred.

Each bucket reads its input from static arrays and leaves its logits in a static tensor, which the next replay of any
bucket may overwrite: they share memory. What a replay needs is copied on the same stream before it, so a step can be
prepared while the one before still runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from nodes.worker.cuda.buckets import Buckets
from nodes.worker.ops.torch.attention import DeviceAttention
from nodes.worker.ops.torch.batch import KNOWN, DeviceBatch, HostBatch, PageTable, unpack
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.pool.device_view import bytes_at

Replay = Callable[[], None]


class Recorder(Protocol):
    """Captures work on the device."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Run and capture `work`. Returns its result, and a call that repeats it in the same memory."""
        ...


class GraphRecorder(Recorder):
    """CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    @override
    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Runs `work` twice beforehand, so that kernels are compiled and libraries have their workspaces."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile; only this one's calls are restricted.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()
        # The caller reads it after each replay and before the next one, of whichever graph.
        return borrowed(result), graph.replay


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, which is free for others once nobody else holds `tensor`; contiguous, on a device.

    Graphs that share a pool reuse only what no tensor holds: with the logits of each of 35 buckets held, a worker with
    151,936 tokens took 1.28 GiB more than with those of the largest.
    """
    plain = bytes_at(tensor.data_ptr(), tensor.nbytes, tensor.get_device())
    return plain.view(tensor.dtype).view(tensor.shape)


class _Bucket(NamedTuple):
    """One captured batch size: where its input goes, the attention to plan, and its logits `[rows, vocab]`."""

    arrays: DeviceBatch
    attention: DeviceAttention
    logits: Tensor
    replay: Replay


class DecodeGraphs:
    """Captures at construction, largest bucket first. `max_pages` bounds the page numbers of one step."""

    def __init__(
        self,
        network: DeviceNetwork,
        attention: DeviceAttention,
        buckets: Buckets,
        recorder: Recorder,
        max_pages: int,
    ) -> None:
        self._buckets = buckets
        most = buckets.sizes[-1]
        device = network.device
        num_indices = max(max_pages, most)
        self._indices = torch.zeros(num_indices, dtype=torch.int32, device=device)
        self._captured = {size: self._capture(network, attention, recorder, size) for size in buckets.capture_order}

    def bucket_for(self, batch: HostBatch) -> int:
        """Rows that a step is to be padded to; 0 if it cannot be replayed."""
        fits = batch.is_decode and batch.table.indices.shape[0] + self._buckets.sizes[-1] <= self._indices.shape[0]
        return self._buckets.choose(batch.num_rows) if fits else 0

    def replay(self, batch: HostBatch, on_device: DeviceBatch) -> Tensor:
        """Logits `[rows, vocab]` of a batch that was padded to a bucket; valid until the next replay on the stream."""
        bucket = self._captured[batch.num_rows]
        # Two copies, as each costs the host 10 to 25 us; the tokens may come from the step before, and lie elsewhere.
        bucket.arrays.token_ids.copy_(on_device.token_ids)
        bucket.arrays.placing.copy_(on_device.placing)
        bucket.attention.plan(batch, on_device)
        bucket.replay()
        return bucket.logits

    def _capture(self, network: DeviceNetwork, attention: DeviceAttention, recorder: Recorder, size: int) -> _Bucket:
        # Of its own, so that its fields lie side by side and are filled by few copies; page numbers, which are many,
        # are shared.
        rows = torch.zeros(6 * size, dtype=torch.int32, device=network.device)
        arrays = unpack(rows, size, size)._replace(indices=self._indices)
        of_bucket = attention.for_bucket(size, arrays)
        padding = padding_batch(size)
        of_bucket.plan(padding, arrays._replace(indices=torch.zeros(size, dtype=torch.int32, device=network.device)))
        logits, replay = recorder.record(lambda: network.forward(arrays.token_ids, arrays.positions, of_bucket, None))
        return _Bucket(arrays, of_bucket, logits, replay)


def padding_batch(num_rows: int) -> HostBatch:
    """A decode step of nothing but padding, for capturing and measuring."""
    nothing = np.zeros(0, dtype=np.int32)
    start = np.zeros(1, dtype=np.int32)
    table = PageTable(start, start, nothing, nothing, nothing)
    empty = HostBatch(nothing, nothing, nothing, nothing, nothing + KNOWN, table, 0, nothing, [])
    return empty.padded(num_rows)
