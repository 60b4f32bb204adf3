"""Prefill in two parts by FlashInfer, joined by its `merge_state`; `merged` says what is computed and is its oracle.

Written after the sources of 0.6.13. The cached positions may end inside a page whose rest this
step writes: the lengths say where. For a sequence with nothing cached the paged kernel returns zeros and a sum of next
to nothing (its minus infinity is -50,000), so that merging leaves its rows unchanged; if no sequence has anything
cached, that kernel is not called.
"""

import torch
from torch import Tensor

from nodes.worker.cuda.flashinfer_plans import Planner
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.torch.batch import PageTable, pinned
from nodes.worker.ops.torch.kinds import FULL

# CUDA's limit for a block.
_MOST_THREADS = 1024
_VECTOR = 8
"""How many 16-bit numbers a thread of `merge_state` takes; one block merges all heads of a row."""


class MergedPrefill:
    """Prefill attention in two parts. Raises BackendMissing for shapes that `merge_state` cannot be launched for."""

    def __init__(self, planner: Planner) -> None:
        if planner.num_heads * planner.layout.head_dim > _MOST_THREADS * _VECTOR:
            raise BackendMissing(
                f"prefill_attention merged does not support {planner.num_heads} heads of size"
                f" {planner.layout.head_dim}: set the worker's prefill_attention to paged"
            )
        self._planner = planner
        self._among_new = planner.ragged_wrapper()
        self._over_cached = planner.prefill_wrapper()
        self._any_cached = False

    def plan(self, chunks: PageTable) -> None:
        """Plan the sequences of `chunks`, whose rows are the batch's last."""
        planner = self._planner
        cached = chunks.cached(planner.layout.page_size)
        table = planner.on_host(cached)
        planner.plan_ragged(self._among_new, table)
        self._any_cached = cached.indices.shape[0] > 0
        if self._any_cached:
            indices = pinned(cached.indices, planner.device).to(planner.device, non_blocking=True)
            planner.plan_prefill(self._over_cached, table, indices, FULL, causal=False)

    def run(self, q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attention of the planned rows into `out` (`[rows, heads, head_dim]`, contiguous)."""
        if not self._any_cached:
            self._among_new.run(q=q, k=k, v=v, out=out)
            return
        _, sums = self._among_new.run(q=q, k=k, v=v, out=out, return_lse=True)
        other = torch.empty_like(out)
        _, other_sums = self._over_cached.run(q=q, paged_kv_cache=pages, out=other, return_lse=True)
        self._planner.flashinfer.merge_state_in_place(v=out, s=sums, v_other=other, s_other=other_sums)
