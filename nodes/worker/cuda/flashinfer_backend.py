"""FlashInfer's kernels (Ye et al. 2025, version 0.6): the only file that knows them. Imported when a GPU worker starts.

Not yet run on a GPU: written after the sources of 0.6.13. Everything is called by keyword, because 0.6.18 moves
positions. `backend="fa2"`, because it takes any strides, so that a layer of the page-major pool is a view.

One 128 MiB workspace serves all wrappers, as all run on one stream. A wrapper's `plan` writes its schedule to its own
page-locked buffer and copies it to the device on the stream, later than the call returns: the buffer must not be
written again before that copy was made, so each plan waits for the copies of the plan before. With two steps in flight
that copy is behind the step before the last, which has ended when the next is planned, so the wait costs nothing.
"""

import importlib
import os
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from nodes.worker.cuda.batch import DeviceBatch, HostBatch, Ints, PageTable, pinned
from nodes.worker.errors import BackendMissing
from nodes.worker.pool_view import PoolView

HEAD_DIMS: Final = (64, 128, 256)
_WORKSPACE_BYTES: Final = 128 << 20
_SCHEDULE_BYTES: Final = 1 << 20
"""Per bucket: a decode schedule takes a few KiB, and FlashInfer's default of 8 MiB would be page-locked for each."""
_PLAIN_GROUPS: Final = (1, 2, 3)
"""Query heads per KV head for which the kernel without tensor cores is there and faster (mini-sglang's limit of 4)."""


def load_flashinfer() -> Any:
    """The module. Raises BackendMissing where it is not installed or does not import."""
    # The norms of the other choice need nvidia-cutlass-dsl, which is not among the requirements here.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:
        raise BackendMissing(
            f"FlashInfer cannot be imported ({type(error).__name__}: {error}): install kvmesh with the extra cuda12 or"
            " cuda13, or set the worker's attention to torch"
        ) from error


class FlashInferKernels:
    """See `kernels.Kernels`."""

    def __init__(self, flashinfer: Any) -> None:
        self._flashinfer = flashinfer

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels`."""
        return self._flashinfer.rmsnorm(input=x, weight=weight, eps=eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Kernels`."""
        self._flashinfer.fused_add_rmsnorm(input=x, residual=residual, weight=weight, eps=eps)

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """See `Kernels`."""
        self._flashinfer.rmsnorm(input=heads, weight=weight, eps=eps, out=heads)

    def rotate(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        """See `Kernels`."""
        rows, _, dim = q.shape
        # Flattening heads keeps the view: they lie side by side inside a row, whatever the stride of rows.
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions=positions,
            query=q.view(rows, -1),
            key=k.view(rows, -1),
            head_size=dim,
            cos_sin_cache=cos_sin,
            is_neox=True,
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels`."""
        return self._flashinfer.silu_and_mul(input=gate_up)


class _Shared:
    """What all wrappers of one worker have in common: pool, shapes, workspaces."""

    def __init__(self, flashinfer: Any, pool: PoolView, num_heads: int, max_rows: int, *, deterministic: bool) -> None:
        layout = pool.layout
        self.flashinfer = flashinfer
        self.device = pool.pages.device
        self.dtype = pool.pages.dtype
        self.num_heads = num_heads
        self.layout = layout
        self.deterministic = deterministic
        self.tensor_cores = deterministic or num_heads // layout.num_kv_heads not in _PLAIN_GROUPS
        self.layers = [(pool.pages[:, index, 0], pool.pages[:, index, 1]) for index in range(layout.num_layers)]
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.schedule = torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, device=self.device)
        self.numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        self._copied = torch.cuda.Event() if self.device.type == "cuda" else None

    def wait(self) -> None:
        """Return when the copies of the last plan have been made."""
        if self._copied is not None:
            self._copied.synchronize()

    def planned(self) -> None:
        """All copies of a plan have been begun."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))

    def host(self, array: Ints) -> Tensor:
        """Page-locked, for `plan`, which reads it on the host and copies it to the device."""
        return pinned(array, self.device)

    def plan_decode(self, wrapper: Any, table: PageTable, indices: Tensor) -> None:
        """Schedule one row of each sequence of `table`, whose page numbers on the device are `indices`."""
        wrapper.plan(
            indptr=self.host(table.indptr),
            indices=indices,
            last_page_len=self.host(table.last_page_len),
            num_qo_heads=self.num_heads,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            page_size=self.layout.page_size,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            seq_lens=self.host(table.lengths),
            # Whole sequences rather than splits of fixed size: those change the number of blocks, which a captured
            # graph cannot.
            disable_split_kv=self.deterministic,
        )

    def plan_prefill(self, wrapper: Any, table: PageTable, indices: Tensor) -> None:
        """Schedule several rows of each sequence of `table`: cached prefix and new rows at once, after the append."""
        wrapper.plan(
            qo_indptr=self.host(table.query_indptr),
            paged_kv_indptr=self.host(table.indptr),
            paged_kv_indices=indices,
            paged_kv_last_page_len=self.host(table.last_page_len),
            num_qo_heads=self.num_heads,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim_qk=self.layout.head_dim,
            page_size=self.layout.page_size,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            seq_lens=self.host(table.lengths),
            max_token_per_sequence=int((table.query_indptr[1:] - table.query_indptr[:-1]).max()),
            disable_split_kv=self.deterministic,
        )

    def append(self, layer: int, k: Tensor, v: Tensor, arrays: DeviceBatch) -> None:
        """Write rows to their pages. Each row is a sequence of one page here, its position the offset in that page."""
        num_rows = k.shape[0]
        self.flashinfer.append_paged_kv_cache(
            append_key=k,
            append_value=v,
            batch_indices=self.numbers[:num_rows],
            positions=arrays.write_offsets,
            paged_kv_cache=self.layers[layer],
            kv_indices=arrays.write_pages,
            kv_indptr=self.numbers[: num_rows + 1],
            # Not read by the kernel but for its length.
            kv_last_page_len=self.numbers[:num_rows],
            kv_layout="NHD",
        )


class FlashInferAttention:
    """See `attention.DeviceAttention`. Rows of decoding sequences first, through one kernel, then those of chunks.

    Raises BackendMissing for shapes that FlashInfer has no kernels for.
    """

    can_capture: ClassVar[bool] = True

    def __init__(self, flashinfer: Any, pool: PoolView, num_heads: int, max_rows: int, *, deterministic: bool) -> None:
        layout = pool.layout
        if layout.head_dim not in HEAD_DIMS or pool.pages.dtype not in (torch.bfloat16, torch.float16):
            raise BackendMissing(
                f"FlashInfer has no kernels for heads of {layout.head_dim} in {layout.dtype}, only for"
                f" {', '.join(map(str, HEAD_DIMS))} in bfloat16: set the worker's attention to torch"
            )
        self._shared = shared = _Shared(flashinfer, pool, num_heads, max_rows, deterministic=deterministic)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=shared.workspace,
            kv_layout="NHD",
            use_tensor_cores=shared.tensor_cores,
            backend="fa2",
        )
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=shared.workspace, kv_layout="NHD", backend="fa2"
        )
        self._arrays: DeviceBatch | None = None
        self._num_decodes = 0

    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        """See `DeviceAttention`."""
        shared, table, split = self._shared, batch.table, batch.num_decodes
        first = int(table.indptr[split])
        shared.wait()
        if split:
            shared.plan_decode(self._decode, table.part(0, split), on_device.indices[:first])
        if split < table.num_sequences:
            shared.plan_prefill(
                self._prefill, table.part(split, table.num_sequences), on_device.indices[first : int(table.indptr[-1])]
            )
        shared.planned()
        self._arrays, self._num_decodes = on_device, split

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `DeviceAttention`."""
        shared, split = self._shared, self._num_decodes
        assert self._arrays is not None, "attention before its plan"
        shared.append(layer, k, v, self._arrays)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if split:
            self._decode.run(q=q[:split], paged_kv_cache=shared.layers[layer], out=out[:split])
        if split < q.shape[0]:
            self._prefill.run(q=q[split:], paged_kv_cache=shared.layers[layer], out=out[split:])
        return out.view(q.shape[0], -1)

    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "FlashInferBucket":
        """See `DeviceAttention`."""
        return FlashInferBucket(self._shared, num_rows, on_device)


class FlashInferBucket:
    """Decode attention of a fixed number of rows, with its arrays at fixed addresses; see `DeviceAttention`."""

    can_capture: ClassVar[bool] = True

    def __init__(self, shared: _Shared, num_rows: int, on_device: DeviceBatch) -> None:
        self._shared = shared
        self._arrays = on_device
        self._wrapper = shared.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=shared.workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=shared.tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(num_rows + 1, dtype=torch.int32, device=shared.device),
            paged_kv_indices_buffer=on_device.indices,
            paged_kv_last_page_len_buffer=torch.ones(num_rows, dtype=torch.int32, device=shared.device),
            backend="fa2",
        )
        self._wrapper.reset_workspace_buffer(
            float_workspace_buffer=shared.workspace, int_workspace_buffer=shared.schedule
        )

    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        """See `DeviceAttention`; `on_device.indices` are copied to where the captured graph reads them."""
        self._shared.wait()
        self._shared.plan_decode(self._wrapper, batch.table, on_device.indices)
        self._shared.planned()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `DeviceAttention`."""
        self._shared.append(layer, k, v, self._arrays)
        return self._wrapper.run(q=q, paged_kv_cache=self._shared.layers[layer]).view(q.shape[0], -1)

    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "FlashInferBucket":
        """See `DeviceAttention`."""
        return FlashInferBucket(self._shared, num_rows, on_device)
