"""Cross-attention by FlashInfer: every row sees all encoder states of its sequence. Its oracle is `TorchAttention`.

Not yet run on a GPU: written after the sources of 0.6.13. The paged prefill kernel without causality serves chunks and
single rows alike. A sequence without states gets zeros from it (it does not divide by the empty sum of a row that sees
nothing); if no sequence has any states, it is not called. Not captured in graphs: no model here needs it yet.
"""

from torch import Tensor

from nodes.worker.attention.kinds import CROSS
from nodes.worker.cuda.flashinfer_plans import Planner
from nodes.worker.ops.torch.batch import PageTable, pinned


class CrossAttention:
    """Attention for the layers of kind CROSS."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._wrapper = planner.prefill_wrapper()
        self._any_states = False

    def plan(self, encoder: PageTable) -> None:
        """Plan all rows of a batch; `encoder` is `HostBatch.encoder`."""
        planner = self._planner
        self._any_states = encoder.indices.shape[0] > 0
        if self._any_states:
            indices = pinned(encoder.indices, planner.device).to(planner.device, non_blocking=True)
            planner.plan_prefill(self._wrapper, planner.on_host(encoder), indices, CROSS, causal=False)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attention of the planned rows into `out` (`[rows, heads, head_dim]`, contiguous)."""
        if self._any_states:
            self._wrapper.run(q=q, paged_kv_cache=pages, out=out)
        else:
            out.zero_()
