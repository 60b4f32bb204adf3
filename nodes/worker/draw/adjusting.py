"""Logits as rows want them: copied to float32, changed by each row's edits, padded to whole pieces. On any device.

What is drawn or read of a row must not depend on the rows beside it: sums over a whole vocabulary round differently for
one row than for many, sums over pieces of fixed length do not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mesh.transport.base import Buffer
from nodes.asks.edits import RowEdits
from nodes.worker.ops.torch.batch import placed

_Place = Callable[[npt.NDArray[Any]], Tensor]
"""Copies a host array to a device."""

PIECE: Final = 1024
"""Elements of a row that are summed together."""


def piece_sums(weights: Tensor) -> Tensor:
    """Float64 sums of the first 1, 2, ... pieces of each row of float32 numbers, whole pieces of them."""
    return weights.view(weights.shape[0], -1, PIECE).sum(-1).to(torch.float64).cumsum(-1)


def adjusted(logits: Tensor, edits: Sequence[RowEdits | None]) -> Tensor:
    """A float32 copy of `logits`, on any device, changed by each row's edits and padded with -inf to whole pieces."""
    (num_rows, size), place = logits.shape, partial(placed, device=logits.device)
    rows = torch.full((num_rows, -(-size // PIECE) * PIECE), -math.inf, device=logits.device)
    rows[:, :size] = logits
    edited = [(row, one) for row, one in enumerate(edits) if one is not None]
    if not edited:
        return rows
    if masks := [(row, one.mask) for row, one in edited if one.mask is not None]:
        # Minus infinity is added, not set: a row that has a NaN is not drawn from, wherever the NaN is.
        which, allowed = place(np.array([row for row, _ in masks])), _allowed([mask for _, mask in masks], size, place)
        rows[which, :size] += torch.where(allowed, 0.0, -math.inf)
    first = [(row, {**one.bias, **dict.fromkeys(one.floor, -math.inf)}) for row, one in edited]
    if entries := _entries(first, size, place):
        at, values = entries
        rows[at] += values
    if entries := _entries([(row, one.scale) for row, one in edited], size, place):
        at, values = entries
        found = rows[at]
        # Less likely in either case: dividing a negative logit would make it more likely. By a tensor even if all
        # are equal: some devices divide by a plain number by multiplying with its inverse.
        rows[at] = torch.where(found < 0, found * values, found / values)
    if entries := _entries([(row, one.add) for row, one in edited], size, place):
        at, values = entries
        rows[at] += values
    return rows


def _allowed(masks: Sequence[Buffer], size: int, place: _Place) -> Tensor:
    """`[masks, size]`: which ids each mask allows. Bits are told apart on the device: fewer bytes to send."""
    packed = np.zeros((len(masks), -(-size // 8)), np.uint8)
    for line, mask in zip(packed, masks, strict=True):
        given = np.frombuffer(mask, np.uint8)[: len(line)]
        line[: len(given)] = given
    bits = place(packed).unsqueeze(-1) & place(np.left_shift(1, np.arange(8)).astype(np.uint8))
    return bits.ne(0).flatten(1)[:, :size]


def _entries(
    parts: Sequence[tuple[int, Mapping[int, float]]], size: int, place: _Place
) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """Where the entries of `parts`, by row and id, are in the logits, and their values; None if there are none."""
    parts = [(row, part) for row, part in parts if part]
    if not parts:
        return None
    rows = np.repeat([row for row, _ in parts], [len(part) for _, part in parts])
    tokens = np.fromiter(chain.from_iterable(part for _, part in parts), np.int64)
    values = np.fromiter(chain.from_iterable(part.values() for _, part in parts), np.float32)
    inside = (tokens >= 0) & (tokens < size)
    if not inside.any():
        return None
    return (place(rows[inside]), place(tokens[inside])), place(values[inside])
