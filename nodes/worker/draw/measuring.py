"""Computes what rows want to know of their probabilities (`reads.py`), on any device, the same beside any other rows.

The logarithm of the sum of exponentials is taken over pieces of fixed length, whose sums are added up in double, as the
samplers do. Tokens are compared by keys that are all different, so that of equal logits the lower id comes first
however a device sorts.
"""

import sys
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from nodes.asks.edits import UNLIKELIEST, RowReads
from nodes.worker.draw.adjusting import adjusted, piece_sums
from nodes.worker.draw.sampler import Draw
from nodes.worker.ops.torch.batch import placed

_AT_ONCE: Final = 16
"""Rows; keys of 151,936 tokens take 1.2 MB a row, which is 300 MB for the rows of a large batch."""


def measured(logits: Tensor, tokens: Tensor, draws: Sequence[Draw], reads: Sequence[RowReads]) -> Tensor:
    """A line of int32 words for each row of `logits`, `[rows, words]`, on its device; `payloads` takes it apart.

    `tokens` are what the rows drew, int64.
    """
    top = min(max(one.top for one in reads), logits.shape[1])
    ids = np.zeros((len(reads), max(len(one.ids) for one in reads)), np.int64)
    for at, one in enumerate(reads):
        ids[at, : len(one.ids)] = one.ids
    parts: list[Tensor] = []
    for begin in range(0, len(reads), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        rows = _rows(logits[some], draws[some], reads[some])
        parts.append(_lines(rows, tokens[some], top, placed(ids[some], logits.device), logits.shape[1]))
    return torch.cat(parts)


def payloads(lines: Tensor, reads: Sequence[RowReads]) -> list[bytes]:
    """The extra of each row, from its line, which is on the host."""
    assert sys.byteorder == "little", "extras are written as they are in memory"
    words = lines.numpy()
    first_id = words.shape[1] - max(len(one.ids) for one in reads)
    found: list[bytes] = []
    for line, one in zip(words, reads, strict=True):
        ids = line[first_id : first_id + len(one.ids)]
        found.append(line[: min(2 + 2 * one.top, first_id)].tobytes() + ids.tobytes())
    return found


def _rows(logits: Tensor, draws: Sequence[Draw], reads: Sequence[RowReads]) -> Tensor:
    """Float32 logits as each row wants them, padded with minus infinity to whole pieces."""
    is_changed = [one.of == "processed" for one in reads]
    edits = [draw.edits if changed else None for draw, changed in zip(draws, is_changed, strict=True)]
    rows = adjusted(logits, edits)
    samplings = [draw.sampling for draw in draws]
    divisors = [
        one.temperature if changed and not one.is_greedy else 1.0
        for one, changed in zip(samplings, is_changed, strict=True)
    ]
    if set(divisors) != {1.0}:
        rows /= placed(np.array(divisors, np.float32), logits.device).unsqueeze(-1)
    return rows


def _lines(rows: Tensor, tokens: Tensor, top: int, ids: Tensor, size: int) -> Tensor:
    shifted = rows - rows.amax(-1, keepdim=True)
    logs = (shifted - piece_sums(torch.exp(shifted))[:, -1:].log().to(torch.float32))[:, :size]
    keys, own = _keys(logs), tokens.clamp(0, size - 1).unsqueeze(-1)
    rank = (keys > keys.gather(1, own)).sum(-1, keepdim=True) + 1
    likely = (size - 1) - (keys.topk(top, dim=-1).values & 0xFFFFFFFF)
    pairs = torch.stack((likely.to(torch.int32), _words(logs.gather(1, likely))), -1).flatten(1)
    # An id outside the vocabulary is never drawn.
    others = logs.gather(1, ids.clamp(0, size - 1)).masked_fill_((ids < 0) | (ids >= size), -torch.inf)
    return torch.cat((_words(logs.gather(1, own)), rank.to(torch.int32), pairs, _words(others)), 1)


def _words(logs: Tensor) -> Tensor:
    return logs.clamp(min=UNLIKELIEST).view(torch.int32)


def _keys(logs: Tensor) -> Tensor:
    """Different int64 numbers in the order of the logarithms, of equal ones the lower id higher."""
    size = logs.shape[1]
    # Minus zero becomes zero, which has other bits.
    bits = (logs + 0.0).view(torch.int32).to(torch.int64)
    # The bits of a negative float grow as it falls.
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (ordered << 32) + torch.arange(size - 1, -1, -1, device=logs.device)
