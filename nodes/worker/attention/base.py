"""The interface of attention over a paged pool; one implementation per kind of device.

A step is planned once; `attend` then runs once per layer. The order of sequences in a plan is the order of their rows
in the batch; sequences with one token come first, longest first (`sort_key`), and runners lay out rows in this order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor


class Span(NamedTuple):
    """The rows of one sequence in a batch: positions `start .. end-1`. `page_ids` (int32) are its pages from 0 on."""

    start: int
    end: int
    page_ids: npt.NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        """How many rows of the batch belong to this sequence."""
        return self.end - self.start


def sort_key(span: Span) -> tuple[bool, int]:
    """Decoding sequences first, the longest of them first."""
    return (span.num_tokens > 1, -span.end if span.num_tokens == 1 else 0)


class AttentionBackend(Protocol):
    """Causal attention with grouped heads over pages, and the writing of pages."""

    def plan(self, spans: Sequence[Span]) -> Any:
        """Everything that is the same for all layers of a step."""
        ...

    def attend(self, layer: int, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write `k` and `v` of all rows to their pages, then attend over the pages.

        `q` is `[rows, heads, head_dim]` and `k` `[rows, kv_heads, head_dim]`, float32, after the rotary embedding; `v`
        is `[rows, kv_heads, head_dim]`. Rows after those of the plan's spans are padding and come back as zeros.
        Returns `[rows, heads * head_dim]`, float32, valid until the next call.
        """
        ...
