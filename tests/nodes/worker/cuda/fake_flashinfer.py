"""Plays the functions and wrappers of FlashInfer 0.6 that the backend calls, on CPU tensors, by torch.

Their parameters are keyword-only here and named as in FlashInfer 0.6.13; a test compares the names with the real module
where that is installed. What FlashInfer demands of its arguments (int32, where they lie, shapes) is asserted, so that
the backend's use of it is tested without a GPU. That the real kernels do the same is for `tests/gpu` to show.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nodes.worker.ops.torch.kernels import TorchKernels

__version__ = "fake"
_KERNELS = TorchKernels()


def rmsnorm(*, input: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    assert len(input), "CUDA refuses a launch of no blocks"
    result = _KERNELS.rms_norm(input, weight, eps)
    return result if out is None else out.copy_(result)


def fused_add_rmsnorm(*, input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    assert len(input), "CUDA refuses a launch of no blocks"
    _KERNELS.add_rms_norm(input, residual, weight, eps)


def silu_and_mul(*, input: Tensor) -> Tensor:
    return _KERNELS.gated(input, "silu")


def gelu_tanh_and_mul(*, input: Tensor) -> Tensor:
    return _KERNELS.gated(input, "gelu_tanh")


def apply_rope_with_cos_sin_cache_inplace(
    *, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    assert is_neox
    assert cos_sin_cache.dtype == torch.float32
    q, k = (x.view(x.shape[0], -1, head_size) for x in (query, key))
    _KERNELS.rotate(positions, q, k, cos_sin_cache)


def append_paged_kv_cache(
    *,
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str,
) -> None:
    assert kv_layout == "NHD"
    assert all(x.dtype == torch.int32 for x in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len))
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    assert len(batch_indices) == len(positions) == len(append_key)
    page_size = paged_kv_cache[0].shape[1]
    flat = kv_indptr[batch_indices] * page_size + positions
    pages, offsets = kv_indices[flat // page_size], flat % page_size
    paged_kv_cache[0][pages, offsets] = append_key
    paged_kv_cache[1][pages, offsets] = append_value


def _attend(rows: Tensor, keys: Tensor, values: Tensor, *, causal: bool, window_left: int) -> Tensor:
    """The kernels' masks (`variants.cuh`): row r is position `keys - rows + r`."""
    num_rows, num_keys = len(rows), len(keys)
    group = rows.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("rhd,phd->rhp", rows.float(), keys) * rows.shape[2] ** -0.5
    own, positions = torch.arange(num_keys - num_rows, num_keys).unsqueeze(1), torch.arange(num_keys)
    hidden = positions > own if causal else torch.zeros(num_rows, num_keys, dtype=torch.bool)
    if window_left >= 0:
        hidden = hidden | (positions < own - window_left)
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    return torch.einsum("rhp,phd->rhd", scores.softmax(-1), values).to(rows.dtype)


class _Planned:
    """What `plan` left: numbers on the host, page numbers where the device reads them."""

    def attend(self, q: Tensor, kv: tuple[Tensor, Tensor], query_indptr: list[int], *, causal: bool) -> Tensor:
        assert kv[0].dtype == kv[1].dtype == q.dtype == self.dtype
        assert query_indptr[-1] == len(q)
        found = []
        for i, length in enumerate(self.lengths):
            rows = q[query_indptr[i] : query_indptr[i + 1]]
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]]
            keys, values = (part[pages].flatten(0, 1)[:length] for part in kv)
            found.append(_attend(rows, keys, values, causal=causal, window_left=self.window_left))
        return torch.cat(found)

    def keep(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        seq_lens: Tensor,
        page_size: int,
        dtype: object,
        window_left: int,
    ) -> None:
        assert window_left >= -1
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len, seq_lens))
        assert all(x.device.type == "cpu" for x in (indptr, last_page_len, seq_lens)), "plan would wait for the device"
        assert len(indices) >= indptr[-1] > 0
        assert indptr[0] == 0
        used = (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last_page_len
        assert used.tolist() == seq_lens.tolist()
        self.window_left, self.page_size = window_left, page_size
        self.indptr, self.indices, self.lengths, self.dtype = indptr.tolist(), indices, seq_lens.tolist(), dtype


class BatchDecodeWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self,
        *,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str,
    ) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert not float_workspace_buffer.any()
        self.use_tensor_cores = use_tensor_cores
        self.buffer = paged_kv_indices_buffer
        self.buffers = (paged_kv_indptr_buffer, paged_kv_last_page_len_buffer)
        self.size = 0
        self.plans: list[str] = []
        if use_cuda_graph:
            self.size = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == self.size + 1

    def reset_workspace_buffer(self, *, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.float_workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer
        # As it comes from the allocator: whatever was there.
        self._pin_memory_int_workspace_buffer = torch.full_like(int_workspace_buffer, 0xFF, device="cpu")

    def plan(
        self,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
        disable_split_kv: bool,
    ) -> None:
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3)
        assert self.use_tensor_cores or not disable_split_kv, "not heeded without tensor cores"
        assert head_dim in (64, 128, 256)
        if self.buffer is not None:
            assert len(last_page_len) == self.size, "the batch size of a captured wrapper is fixed"
            assert len(indices) <= len(self.buffer)
            is_masked = not disable_split_kv
            assert is_masked or not self._pin_memory_int_workspace_buffer.any(), "blocks left over would read garbage"
            for buffer, array in zip(self.buffers, (indptr, last_page_len), strict=True):
                buffer.copy_(array)
            self.buffer[: len(indices)].copy_(indices)
            indices = self.buffer
        self.plans.append("full")
        self.keep(indptr, indices, last_page_len, seq_lens, page_size, q_data_type, window_left)
        assert kv_data_type == q_data_type

    def run(self, *, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        assert len(q) == len(self.lengths)
        if self.buffer is not None:
            # A plan counts pages; how full the last ones are is read on the device when the kernel runs.
            pages, last = (buffer.tolist() for buffer in self.buffers)
            assert pages == self.indptr, "the schedule is of other numbers of pages"
            counts = [end - begin for begin, end in pairwise(pages)]
            self.lengths = [(count - 1) * self.page_size + used for count, used in zip(counts, last, strict=True)]
        result = self.attend(q, paged_kv_cache, list(range(len(q) + 1)), causal=False)
        return result if out is None else out.copy_(result)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    *,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    window_left: int,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
    disable_split_kv: bool,
    global_override_indptr_cpu: Tensor,
) -> None:
    """Fills no array and finds no module: both must be there, from the caller and from a plan before."""
    assert self.plans, "the module is found by a whole plan"
    assert self.size == len(last_page_len), "for captured wrappers"
    assert self.use_tensor_cores
    assert (window_left, q_data_type, kv_data_type) == (self.window_left, self.dtype, self.dtype)
    assert num_qo_heads % num_kv_heads == 0
    assert head_dim in (64, 128, 256)
    assert disable_split_kv in (False, True)
    assert torch.equal(global_override_indptr_cpu, indptr)
    assert torch.equal(self.buffers[0], indptr)
    assert torch.equal(self.buffers[1], last_page_len)
    assert torch.equal(self.buffer[: len(indices)], indices)
    lengths = (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last_page_len
    self.keep(indptr, self.buffer, last_page_len, lengths, page_size, q_data_type, window_left)
    self.plans.append("fast")


class BatchPrefillWithPagedKVCacheWrapper(_Planned):
    def __init__(self, *, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert not float_workspace_buffer.any()

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
        max_token_per_sequence: int,
        disable_split_kv: bool,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256)
        assert disable_split_kv in (False, True)
        assert max_token_per_sequence == (qo_indptr[1:] - qo_indptr[:-1]).max()
        self.keep(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens, page_size, q_data_type, window_left
        )
        self.query_indptr = qo_indptr.tolist()

    def run(self, *, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        assert self.query_indptr[0] == 0
        return out.copy_(self.attend(q, paged_kv_cache, self.query_indptr, causal=True))
