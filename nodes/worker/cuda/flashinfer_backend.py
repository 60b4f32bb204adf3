"""FlashInfer's kernels (Ye et al. 2025, version 0.6): only this file imports it, when a GPU worker starts.

Written after the sources of 0.6.13, and run with it on an H100. All arguments are passed by keyword, because 0.6.18
changes their positions. `backend="fa2"`, because it takes any strides, so that a layer of the page-major pool is a
view. `flashinfer_plans` plans the steps.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from nodes.models.parts import Activation
from nodes.worker.cuda.flashinfer_plans import Captured, HeadsLoader, Planner
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.torch.attention import DeviceAttention, HeadForm
from nodes.worker.ops.torch.batch import DeviceBatch, HostBatch, PageTable
from nodes.worker.ops.torch.kernels import Kernels
from nodes.worker.ops.torch.kinds import AttentionKind
from nodes.worker.pool.view import PoolView

HEAD_DIMS: Final = (64, 128, 256)


def load_flashinfer() -> Any:
    """The module. Raises BackendMissing if it is not installed or cannot be imported."""
    # FlashInfer's other norms need nvidia-cutlass-dsl, which is not among the requirements here.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        return importlib.import_module("flashinfer")
    # Its import runs the driver and compilers, and raises whatever they do; the message says what to install.
    except Exception as error:
        raise BackendMissing(
            f"FlashInfer cannot be imported ({type(error).__name__}: {error}): install kvmesh with the extra cuda12 or"
            " cuda13, or set the worker's attention to torch"
        ) from error


class FlashInferKernels(Kernels):
    """Each operation by one kernel of FlashInfer."""

    def __init__(self, flashinfer: Any) -> None:
        self.has_wide_norms = False
        self._flashinfer = flashinfer

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.shape[0]:
            # A step that draws nothing has no rows left at the last norm, and CUDA refuses a launch of no blocks.
            return torch.empty_like(x)
        return self._flashinfer.rmsnorm(input=x, weight=weight, eps=eps)

    @override
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        if x.shape[0]:
            self._flashinfer.fused_add_rmsnorm(input=x, residual=residual, weight=weight, eps=eps)

    @override
    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        self._flashinfer.rmsnorm(input=heads, weight=weight, eps=eps, out=heads)

    @override
    def rotate(self, positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
        rows, _, dim = q.shape
        # Flattening the heads needs no copy: they lie side by side inside a row, whatever the stride of rows.
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            positions=positions,
            query=q.view(rows, -1),
            key=k.view(rows, -1),
            head_size=dim,
            cos_sin_cache=cos_sin,
            is_neox=True,
        )

    @override
    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return self._flashinfer.silu_and_mul(input=gate_up)
        return self._flashinfer.gelu_tanh_and_mul(input=gate_up)


class FlashInferAttention(DeviceAttention):
    """Rows of decoding sequences go through one kernel, those of chunks through another.

    `kinds` are those of the layers; by default all layers see everything. A plan is made for each kind that occurs.
    `heads` makes the kernel for `place`. Raises BackendMissing for shapes that FlashInfer has no kernels for.
    """

    def __init__(
        self,
        flashinfer: Any,
        pool: PoolView,
        num_heads: int,
        max_rows: int,
        kinds: Sequence[AttentionKind] = (),
        *,
        deterministic: bool,
        heads: HeadsLoader | None = None,
    ) -> None:
        layout = pool.layout
        if layout.head_dim not in HEAD_DIMS or pool.pages.dtype not in (torch.bfloat16, torch.float16):
            raise BackendMissing(
                f"FlashInfer has no kernels for heads of size {layout.head_dim} in {layout.dtype}, only for"
                f" sizes {', '.join(map(str, HEAD_DIMS))} in bfloat16: set the worker's attention to torch"
            )
        self._planner = planner = Planner(
            flashinfer, pool, num_heads, max_rows, kinds, deterministic=deterministic, heads=heads
        )
        self.can_capture = True
        self._decode = {kind: planner.decode_wrapper(kind) for kind in planner.distinct}
        self._prefill = {kind: planner.prefill_wrapper() for kind in planner.distinct}
        self._arrays: DeviceBatch | None = None
        self._num_decodes = 0

    @override
    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        planner, table, split = self._planner, batch.table, batch.num_decodes
        first = int(table.indptr[split])
        planner.wait()
        if split:
            decodes = planner.on_host(table.part(0, split))
            for kind, wrapper in self._decode.items():
                planner.plan_decode(wrapper, decodes, on_device.indices[:first], kind)
        if split < table.num_sequences:
            self._plan_chunks(table.part(split, table.num_sequences), on_device.indices[first : int(table.indptr[-1])])
        planner.planned()
        self._arrays, self._num_decodes = on_device, split

    @override
    def place(self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor) -> bool:
        assert self._arrays is not None, "attention before it was planned"
        return self._planner.place(layer, heads, form, positions, self._arrays)

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, is_placed: bool = False) -> Tensor:
        planner, split = self._planner, self._num_decodes
        assert self._arrays is not None, "attention before it was planned"
        kind, pages = planner.kinds[layer], planner.layers[layer]
        if not is_placed:
            planner.append(layer, k, v, self._arrays)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if split:
            self._decode[kind].run(q=q[:split], paged_kv_cache=pages, out=out[:split])
        if split < q.shape[0]:
            self._prefill[kind].run(q=q[split:], paged_kv_cache=pages, out=out[split:])
        return out.view(q.shape[0], -1)

    @override
    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "FlashInferBucket":
        return FlashInferBucket(self._planner, num_rows, on_device)

    def _plan_chunks(self, chunks: PageTable, indices: Tensor) -> None:
        table = self._planner.on_host(chunks)
        for kind, wrapper in self._prefill.items():
            self._planner.plan_prefill(wrapper, table, indices, kind)


class FlashInferBucket(DeviceAttention):
    """Decode attention of a fixed number of rows, with its arrays at fixed addresses; see `DeviceAttention`."""

    def __init__(self, planner: Planner, num_rows: int, on_device: DeviceBatch) -> None:
        self.can_capture = True
        self._planner = planner
        self._arrays = on_device
        self._captured = Captured(planner, num_rows, on_device.indices)

    @override
    def plan(self, batch: HostBatch, on_device: DeviceBatch) -> None:
        """`on_device.indices` are copied to where the captured graph reads them."""
        self._captured.plan(batch.table, on_device.indices)

    @override
    def place(self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor) -> bool:
        return self._planner.place(layer, heads, form, positions, self._arrays)

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, is_placed: bool = False) -> Tensor:
        planner = self._planner
        if not is_placed:
            planner.append(layer, k, v, self._arrays)
        wrapper = self._captured.wrappers[planner.kinds[layer]]
        return wrapper.run(q=q, paged_kv_cache=planner.layers[layer]).view(q.shape[0], -1)

    @override
    def for_bucket(self, num_rows: int, on_device: DeviceBatch) -> "FlashInferBucket":
        return FlashInferBucket(self._planner, num_rows, on_device)
