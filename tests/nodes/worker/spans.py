"""Rows of sequences for attention or a network alone, without a runner."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nodes.worker.ops.torch.attention import DeviceAttention
from nodes.worker.ops.torch.batch import DeviceBatch, HostBatch, host_batch, pack, unpack
from nodes.worker.steps.step import Rows, RunnableStep
from tests.nodes.worker.torch_running import GREEDY, sequence_of


class Span(NamedTuple):
    """The rows of one sequence in a batch: positions `start .. end-1`. `page_ids` (int32) are its pages from 0 on."""

    start: int
    end: int
    page_ids: npt.NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def planned(
    attention: DeviceAttention, page_size: int, spans: Sequence[Span], token_ids: Sequence[int] = ()
) -> tuple[HostBatch, DeviceBatch]:
    """The spans' batch, for which `attention` is planned then. Single rows must come first."""
    counts = [span.num_tokens for span in spans]
    page_offsets = np.cumsum([0, *(len(span.page_ids) for span in spans)])[:-1].tolist()
    rows = Rows(
        [sequence_of(GREEDY)] * len(spans), [span.start for span in spans], counts,
        np.cumsum([0, *counts])[:-1].tolist(), page_offsets,
    )  # fmt: skip
    tokens = array("i", token_ids or [0] * sum(counts))
    pages = array("i", np.concatenate([span.page_ids for span in spans]).tolist())
    batch = host_batch(RunnableStep(1, rows, tokens, pages), page_size)
    arrays = unpack(torch.from_numpy(pack(batch)), batch.num_rows, len(batch.sampled))
    attention.plan(batch, arrays)
    return batch, arrays
