"""FlashInfer's wrappers: how they are made, what memory they share, and how a step is planned on them.

Written after the sources of 0.6.13, like all of `flashinfer_backend`, which passes the module in.

One 128 MiB workspace serves all wrappers, as all run on one stream and none leaves anything there for the next. A
schedule, though, is read by every layer of the step, so each kind of layer has its own. A wrapper's `plan` writes its
schedule to its own page-locked buffer and copies it to the device on the stream, after the call has returned: the
buffer must not be written again before that copy is made, so each plan waits for the copies of the plan before. With
two steps in flight that copy is behind the step before the last, which has ended when the next is planned, so the wait
costs nothing.

Nothing else in a plan waits for the device, as all that it reads lies on the host. Its cost on the host, by the
sources: when decoding by tensor cores it takes Python's `max` over the tensor of lengths, one small tensor for each row
(4 us a row, 0.9 ms for 256, measured on a CPU), for a number that only other backends read. `fast_decode_plan`, public
from 0.6.13 to 0.6.18 at least, leaves out that and the filling of the arrays, for wrappers that have arrays of their
own and were planned before: those of captured steps. Others pay for it: to prefill, the longest sequence could be
passed as `max_sequence_kv`, but then the plan for "fa2" fails (0.6.13).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nodes.worker.ops.torch.attention import HeadForm
from nodes.worker.ops.torch.batch import DeviceBatch, Ints, PageTable, pinned
from nodes.worker.ops.torch.kinds import FULL, AttentionKind
from nodes.worker.pool.view import PoolView

# What FlashInfer's documentation recommends; its plans fail if split sequences do not fit.
_WORKSPACE_BYTES: Final = 128 << 20
_SCHEDULE_BYTES: Final = 1 << 20
"""Per kind, for all buckets: a decode schedule takes a few KiB, while FlashInfer's default is 8 MiB."""
_PLAIN_GROUPS: Final = (1, 2, 3)
"""Query heads per KV head for which the kernel without tensor cores exists and is faster (mini-sglang's limit of 4)."""


class PlacesHeads(Protocol):
    """The kernel of `nodes.worker.cuda.heads`, or a test's stand-in."""

    def takes(self, form: HeadForm) -> bool:
        """Whether it can do what `form` says."""
        ...

    def launch(
        self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor, write_pages: Tensor, write_offsets: Tensor
    ) -> None:
        """Do it for `heads`, and write keys and values where the last two, int32 `[rows]`, say."""
        ...


HeadsLoader = Callable[[Sequence[tuple[Tensor, Tensor]], int], PlacesHeads]
"""Makes it for the pages of keys and of values of each layer, and the number of query heads."""


class HostTable(NamedTuple):
    """A `PageTable` in page-locked memory, for `plan`, which reads it on the host and copies it to the device."""

    query_indptr: Tensor
    indptr: Tensor
    last_page_len: Tensor
    lengths: Tensor
    most_rows: int


class Planner:
    """What all wrappers of one worker have in common: pool, shapes, workspaces. `kinds` are those of the layers.

    `distinct` are those that occur.
    """

    def __init__(
        self,
        flashinfer: Any,
        pool: PoolView,
        num_heads: int,
        max_rows: int,
        kinds: Sequence[AttentionKind],
        *,
        deterministic: bool,
        heads: HeadsLoader | None = None,
    ) -> None:
        layout = pool.layout
        self.flashinfer = flashinfer
        self.device = pool.pages.device
        self.dtype = pool.pages.dtype
        self.num_heads = num_heads
        self.layout = layout
        self.deterministic = deterministic
        self.kinds = tuple(kinds) or (FULL,) * layout.num_layers
        self.fast_plan = getattr(flashinfer, "fast_decode_plan", None)
        self.distinct = tuple(dict.fromkeys(self.kinds))
        self._tensor_cores = deterministic or num_heads // layout.num_kv_heads not in _PLAIN_GROUPS
        self.layers = [(pool.pages[:, index, 0], pool.pages[:, index, 1]) for index in range(layout.num_layers)]
        self._heads = None if heads is None else heads(self.layers, num_heads)
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.schedules = [
            torch.empty(_SCHEDULE_BYTES, dtype=torch.uint8, device=self.device) for _ in range(len(self.distinct))
        ]
        self.numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        self._copied = torch.cuda.Event() if self.device.type == "cuda" else None
        self.scheduled: tuple[Captured, Ints] | None = None
        """Whose schedule lies in `schedules`, and for which `indptr`."""

    def wait(self) -> None:
        """Wait until the copies of the last plan have been made."""
        if self._copied is not None:
            self._copied.synchronize()

    def planned(self) -> None:
        """Note that all copies of a plan have been begun."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))

    def tensor_cores(self, kind: AttentionKind) -> bool:
        """Whether to decode with tensor cores. The other kernel reads what lies before a window and masks it."""
        return self._tensor_cores or kind.window > 0

    def decode_wrapper(self, kind: AttentionKind) -> Any:
        """For one row of each sequence, and any number of sequences."""
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self.workspace,
            kv_layout="NHD",
            use_tensor_cores=self.tensor_cores(kind),
            backend="fa2",
        )

    def prefill_wrapper(self) -> Any:
        """For several rows of each sequence."""
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=self.workspace, kv_layout="NHD", backend="fa2"
        )

    def on_host(self, table: PageTable) -> HostTable:
        """`table` as the plans of all kinds read it."""
        arrays = (table.query_indptr, table.indptr, table.last_page_len, table.lengths)
        counts = table.query_indptr[1:] - table.query_indptr[:-1]
        query_indptr, indptr, last_page_len, lengths = (pinned(array, self.device) for array in arrays)
        return HostTable(query_indptr, indptr, last_page_len, lengths, int(counts.max()))

    def plan_decode(self, wrapper: Any, table: HostTable, indices: Tensor, kind: AttentionKind) -> None:
        """Schedule one row of each sequence of `table`, whose page numbers on the device are `indices`."""
        wrapper.plan(
            indptr=table.indptr,
            indices=indices,
            last_page_len=table.last_page_len,
            num_qo_heads=self.num_heads,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            page_size=self.layout.page_size,
            # FlashInfer counts the positions to the left; -1 means all.
            window_left=kind.window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            seq_lens=table.lengths,
            # Whole sequences, not splits of fixed size: those change the number of blocks, which is fixed in a
            # captured graph.
            disable_split_kv=self.deterministic,
        )

    def plan_again(self, wrapper: Any, table: HostTable, indices: Tensor, kind: AttentionKind) -> None:
        """As `plan_decode`, for a wrapper that was planned by it before and whose arrays are filled already."""
        assert self.fast_plan is not None, "see Captured"
        self.fast_plan(
            wrapper,
            indptr=table.indptr,
            indices=indices,
            last_page_len=table.last_page_len,
            num_qo_heads=self.num_heads,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            page_size=self.layout.page_size,
            window_left=kind.window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            disable_split_kv=self.deterministic,
            global_override_indptr_cpu=table.indptr,
        )

    def plan_prefill(self, wrapper: Any, table: HostTable, indices: Tensor, kind: AttentionKind) -> None:
        """Schedule several rows of each sequence of `table`, its last positions, which are in its pages by then.

        Cached prefix and new rows at once: separately, and then joined, took 0.91 to 0.93 of the time with nothing
        cached, and 1.00 to 1.30 behind 2,048 tokens and more (8B shape, H200).
        """
        wrapper.plan(
            qo_indptr=table.query_indptr,
            paged_kv_indptr=table.indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=table.last_page_len,
            num_qo_heads=self.num_heads,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim_qk=self.layout.head_dim,
            page_size=self.layout.page_size,
            causal=True,
            window_left=kind.window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            seq_lens=table.lengths,
            max_token_per_sequence=table.most_rows,
            disable_split_kv=self.deterministic,
        )

    def place(self, layer: int, heads: Tensor, form: HeadForm, positions: Tensor, arrays: DeviceBatch) -> bool:
        """Norm, rotate and write heads by one kernel, for the rows of `arrays`; False if there is none for them."""
        if self._heads is None or not self._heads.takes(form):
            return False
        self._heads.launch(layer, heads, form, positions, arrays.write_pages, arrays.write_offsets)
        return True

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
            # The kernel reads nothing of it but its length.
            kv_last_page_len=self.numbers[:num_rows],
            kv_layout="NHD",
        )


class Captured:
    """Decode wrappers for exactly `num_rows` sequences, one for each kind, and the arrays that captured kernels read.

    Page numbers are copied to `indices`. A schedule depends on numbers of pages alone: it stays what it is until a
    sequence gets another page, or another bucket is planned.
    """

    def __init__(self, planner: Planner, num_rows: int, indices: Tensor) -> None:
        self._planner = planner
        self._indptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=planner.device)
        self._last_page_len = torch.ones(num_rows, dtype=torch.int32, device=planner.device)
        self._indices = indices
        self.wrappers = {
            kind: self._wrapper(kind, schedule)
            for kind, schedule in zip(planner.distinct, planner.schedules, strict=True)
        }
        self._planned = False

    def plan(self, pages: PageTable, indices: Tensor) -> None:
        """Schedule one row of each sequence of `pages` for all kinds; `indices` are its page numbers on the device."""
        planner = self._planner
        last = planner.scheduled
        if last is not None and last[0] is self and np.array_equal(last[1], pages.indptr):
            # At batch 1 that is 15 of 16 steps, and FlashInfer's plan took 0.19 of the host's 1.15 ms (H200).
            self._last_page_len.copy_(pinned(pages.last_page_len, planner.device), non_blocking=True)
            self._indices[: indices.shape[0]].copy_(indices, non_blocking=True)
            return
        planner.wait()
        table = planner.on_host(pages)
        again = self._planned and planner.fast_plan is not None
        # The quick plan does not fill the wrapper's arrays, which the captured kernels read.
        if again:
            self._indptr.copy_(table.indptr, non_blocking=True)
            self._last_page_len.copy_(table.last_page_len, non_blocking=True)
            self._indices[: indices.shape[0]].copy_(indices, non_blocking=True)
        for kind, wrapper in self.wrappers.items():
            # The plan of the kernel without tensor cores takes no maximum.
            if again and planner.tensor_cores(kind):
                planner.plan_again(wrapper, table, indices, kind)
            else:
                planner.plan_decode(wrapper, table, indices, kind)
        self._planned = True
        planner.scheduled = self, pages.indptr
        planner.planned()

    def _wrapper(self, kind: AttentionKind, schedule: Tensor) -> Any:
        wrapper = self._planner.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self._planner.workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._planner.tensor_cores(kind),
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(float_workspace_buffer=self._planner.workspace, int_workspace_buffer=schedule)
        # A captured kernel has more blocks than a step has tiles. FlashInfer masks those left over if it splits
        # sequences; with `disable_split_kv` (0.6.13) they read whatever page-locked memory held before, and follow it
        # anywhere: on an H100 workers died of illegal addresses. As zeros they compute the first sequence again, into
        # the same place.
        wrapper._pin_memory_int_workspace_buffer.zero_()  # noqa: SLF001
        return wrapper
