"""Draws tokens from logits, so that a draw depends on nothing but its row's logits, its request and its position.

Randomness is counter-based: one uniform number per draw, from a hash of (seed, sample index, output position), looked
up in the cumulative distribution. Everything is computed per row, or by operators whose rows do not depend on each
other (`exp` element by element, sums over pieces of fixed length, cumulative sums in double, one after the other):
`sum` and `logsumexp` over a whole vocabulary round differently for one row than for many.

The order is vLLM's: edits of the logits (`RowEdits`), temperature, min_p, top_k, top_p. Filters need the
most likely tokens only, so candidates are taken from the top down, in windows of falling probability, until the filters
are settled; the order is total (equal logits: lower id first), so the result does not depend on how many it took.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mesh.transport.base import Buffer
from nodes.asks.edits import RowEdits
from nodes.request import Sampling
from nodes.worker.ops.torch.batch import placed

_Place = Callable[[npt.NDArray[Any]], Tensor]
"""Copies a host array to a device."""

NOT_DRAWN: Final = -1
"""Instead of a token: the logits are not finite."""
NO_CANDIDATE: Final = -2
"""The model's logits would do, but edits leave none that is finite."""

PIECE: Final = 1024
_WINDOWS: Final = (4.0, 12.0, math.inf)
_MASK: Final = (1 << 64) - 1


class Draw(NamedTuple):
    """How one row is sampled; `position` is the output position of the token. Edits of `sampling` are in `edits`."""

    sampling: Sampling
    position: int
    edits: RowEdits | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it takes the most likely token of the unchanged logits."""
        return self.edits is None and self.sampling.is_greedy


PLAIN: Final = Draw(Sampling(temperature=0.0), 0)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row of `logits` (`[rows, vocab]`); negative, as above, where no finite logit allows one."""
    drawn = [NOT_DRAWN] * len(draws)
    altered = [i for i, draw in enumerate(draws) if not draw.is_plain]
    if len(altered) < len(draws):
        # Without a float32 copy: nearly all rows are greedy, and a row has 151,936 logits in Qwen3.
        plain = sorted(set(range(len(draws))).difference(altered))
        for i, (_, token) in zip(plain, most_likely(logits[plain] if altered else logits), strict=True):
            drawn[i] = token
    if altered:
        rows = logits if len(altered) == len(draws) else logits[altered]
        tokens = _sample_altered(rows, [draws[i] for i in altered])
        for i, token in zip(altered, tokens, strict=True):
            drawn[i] = token
    return drawn


def _sample_altered(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """`sample` for rows that are edited or random."""
    rows = adjusted(logits, [draw.edits for draw in draws])
    likely = most_likely(rows)
    drawn = [token for _, token in likely]
    for i, draw in enumerate(draws):
        if drawn[i] == NOT_DRAWN and draw.edits is not None and most_likely(logits[i : i + 1])[0][1] != NOT_DRAWN:
            drawn[i] = NO_CANDIDATE
    random = [i for i, draw in enumerate(draws) if not draw.sampling.is_greedy and drawn[i] >= 0]
    if random:
        temperatures = torch.tensor([draws[i].sampling.temperature for i in random]).unsqueeze(-1)
        # Subtracted before `exp`, so that the largest weight is 1 and nothing overflows.
        highest = torch.tensor([likely[i][0] for i in random]).unsqueeze(-1)
        scaled = ((rows if len(random) == len(draws) else rows[random]) - highest) / temperatures
        weights = torch.exp(scaled)
        sums = piece_sums(weights)
        for n, i in enumerate(random):
            sampling = draws[i].sampling
            number = uniform(sampling.seed, sampling.sample_index, draws[i].position)
            if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
                drawn[i] = _draw_filtered(scaled[n], sampling, float(sums[n, -1]), number)
            else:
                drawn[i] = _draw_any(weights[n], sums[n], number)
    return drawn


def _numbers(row: Tensor) -> list[float]:
    return [float(value) for value in cast("list[float]", row.tolist())]


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, by three rounds of splitmix64 (Steele et al. 2014)."""
    state = 0
    for value in (seed, sample_index, position):
        state = _mixed(state ^ (value & _MASK))
    # A double holds 53 bits, so no state rounds up to 1.0.
    return (state >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


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


def most_likely(rows: Tensor) -> list[tuple[float, int]]:
    """Highest logit of each row and the lowest id that has it; `NOT_DRAWN` if there is a NaN or nothing finite.

    Exact in any type, so rows are not converted. Looked up by piece, because `argmax` over a whole vocabulary takes
    twenty times as long as `amax`. `argmax` promises the first of equal elements.
    """
    num_whole = rows.shape[1] // PIECE
    tops = rows[:, : num_whole * PIECE].view(rows.shape[0], num_whole, PIECE).amax(-1)
    if rows.shape[1] % PIECE:
        tops = torch.cat((tops, rows[:, num_whole * PIECE :].amax(-1, keepdim=True)), -1)
    highest = tops.amax(-1, keepdim=True)
    first = tops.eq(highest).to(torch.uint8).argmax(-1, keepdim=True) * PIECE
    # Past the end of the last piece its last id repeats; a match there is never the first one.
    ids = (first + torch.arange(PIECE)).clamp_(max=rows.shape[1] - 1)
    tokens = first.squeeze(-1) + rows.gather(1, ids).eq(highest).to(torch.uint8).argmax(-1)
    found = zip(_numbers(highest.squeeze(-1)), _numbers(tokens), strict=True)
    return [(value, int(token) if math.isfinite(value) else NOT_DRAWN) for value, token in found]


def _draw_any(weights: Tensor, sums: Tensor, number: float) -> int:
    """Draw from the whole vocabulary: first the piece, then the token in it."""
    target = number * float(sums[-1])
    piece = _first_above(sums, target)
    before = float(sums[piece - 1]) if piece else 0.0
    inside = weights[piece * PIECE : (piece + 1) * PIECE].to(torch.float64).cumsum(0)
    return piece * PIECE + _first_above(inside, target - before)


def _draw_filtered(scaled: Tensor, sampling: Sampling, total: float, number: float) -> int:
    lowest = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    for window in _WINDOWS:
        ids = torch.nonzero(scaled >= max(-window, lowest)).squeeze(-1)
        # Stable, and `ids` ascend: equal logits stay in the order of their ids.
        order = scaled[ids].sort(descending=True, stable=True)
        sums = torch.exp(order.values).to(torch.float64).cumsum(0)
        num_kept = _num_kept(sums, sampling, total, whole=-window <= lowest or math.isinf(window))
        if num_kept:
            return int(ids[order.indices[_first_above(sums[:num_kept], number * float(sums[num_kept - 1]))]])
    raise AssertionError("the last window is the whole vocabulary")


def _num_kept(sums: Tensor, sampling: Sampling, total: float, *, whole: bool) -> int:
    """How many of the candidates pass top_k and top_p; 0 if more candidates are needed to tell.

    `sums` are cumulative weights, most likely first; `total` is the weight of all tokens; `whole` says that no token
    that passes min_p is missing.
    """
    num_kept = sums.shape[0]
    if sampling.top_k > 0:
        if num_kept < sampling.top_k and not whole:
            return 0
        num_kept = min(sampling.top_k, num_kept)
        base = float(sums[num_kept - 1])
    elif sampling.min_p > 0:
        if not whole:
            return 0
        base = float(sums[-1])
    else:
        base = total
        if not whole and float(sums[-1]) < sampling.top_p * base:
            return 0
    if sampling.top_p < 1:
        num_kept = min(num_kept, _first_above(sums, sampling.top_p * base, inclusive=True) + 1)
    return num_kept


def _first_above(sums: Tensor, target: float, *, inclusive: bool = False) -> int:
    """Index of the first sum above `target` (`inclusive`: or equal); if rounding leaves none, that of the highest."""
    found = int(torch.searchsorted(sums, torch.tensor(target, dtype=sums.dtype), right=not inclusive))
    return found if found < sums.shape[0] else int(torch.searchsorted(sums, sums[-1]))
