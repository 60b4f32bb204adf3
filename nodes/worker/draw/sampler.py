"""Draws tokens from logits, all rows at once, on any device.

A draw depends on nothing but its row's logits, its request and its position.

Randomness is counter-based: one uniform number per draw, from a hash of (seed, sample index, output position), looked
up in the cumulative distribution. The numbers do not depend on logits, so the host makes them and sends them with the
parameters. All is computed by operators whose rows do not depend on each other (`exp` element by element, sums over
pieces of fixed length, cumulative sums in double, one after the other). On a device whose `exp` and sums round
differently a draw can differ if its number falls within a rounding error of the border between two tokens.

The order is vLLM's: edits of the logits (`adjusting.py`), temperature, min_p, top_k, top_p; of equal logits the lower
id comes first.

The native kernels' sampler (`nodes/worker/ops/native`) draws the same tokens, and does so for nearly all rows that are
drawn on a CPU; this one is its oracle there.

Filters need the most likely tokens in order. Rows whose `top_k` bounds them are sorted only that far; the others as far
as `_FIRST_TRY` tokens, and entirely if that did not settle all of them, which takes one answer from the device. A token
is found by its weight and its rank among equal weights, so that the order among equals (lower id first) does not depend
on the device's sorting.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nodes.asks.edits import RowEdits
from nodes.request import Sampling
from nodes.worker.draw.adjusting import PIECE, adjusted, piece_sums
from nodes.worker.ops.torch.batch import placed

NOT_DRAWN: Final = -1
"""Instead of a token: the logits are not finite."""
NO_CANDIDATE: Final = -2
"""The model's logits would do, but edits leave none that is finite."""

_FIRST_TRY: Final = 1024
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


class _Random(NamedTuple):
    """Parameters of the random rows, `[rows]` each; float64, except `temperature` and `lowest`, which are float32."""

    temperature: Tensor
    lowest: Tensor
    top_p: Tensor
    top_k: Tensor
    number: Tensor

    def rows(self, which: Tensor) -> "_Random":
        """The parameters of some rows only."""
        return _Random(*(field.index_select(0, which) for field in self))


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row of `logits` (`[rows, vocab]`), int64 on its device; negative: there is none, as above.

    Waits for nothing unless a row is filtered by `top_p` or `min_p` without a `top_k` of at most `_FIRST_TRY`.
    """
    altered = [i for i, draw in enumerate(draws) if not draw.is_plain]
    if not altered:
        return most_likely(logits)[1]
    if len(altered) == len(draws):
        return _sample_altered(logits, draws)
    plain = sorted(set(range(len(draws))).difference(altered))
    drawn = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    for indices in (plain, altered):
        rows = _indices(indices, logits.device)
        part = logits.index_select(0, rows)
        tokens = most_likely(part)[1] if indices is plain else _sample_altered(part, [draws[i] for i in altered])
        drawn.index_copy_(0, rows, tokens)
    return drawn


def _sample_altered(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`sample` for rows that are edited or random."""
    rows = adjusted(logits, [draw.edits for draw in draws])
    highest, drawn = most_likely(rows)
    if any(draw.edits is not None for draw in draws):
        drawn = torch.where((drawn == NOT_DRAWN) & torch.isfinite(logits.amax(-1)), NO_CANDIDATE, drawn)
    random = [i for i, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if not random:
        return drawn
    if len(random) < len(draws):
        which = _indices(random, rows.device)
        rows, highest, tokens = (
            rows.index_select(0, which),
            highest.index_select(0, which),
            drawn.index_select(0, which),
        )
    else:
        which, tokens = None, drawn
    found = _draw(rows, highest, [draws[i] for i in random])
    found = torch.where(tokens < 0, tokens, found)
    return found if which is None else drawn.index_copy_(0, which, found)


def _draw(rows: Tensor, highest: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids of random rows; for those without a finite logit, any id in the vocabulary or its padding."""
    parameters = _parameters(draws, rows.device)
    scaled = (rows - highest.unsqueeze(-1)) / parameters.temperature.unsqueeze(-1)
    weights = torch.exp(scaled)
    sums = piece_sums(weights)
    groups: dict[str, list[int]] = {"any": [], "bounded": [], "filtered": []}
    for i, sampling in enumerate(draw.sampling for draw in draws):
        is_filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        bounded = 0 < sampling.top_k <= _FIRST_TRY
        groups["bounded" if bounded else "filtered" if is_filtered else "any"].append(i)
    drawn = torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
    for name, indices in groups.items():
        if not indices:
            continue
        most = max(draws[i].sampling.top_k for i in indices) if name == "bounded" else _FIRST_TRY
        if len(indices) == len(draws):
            # As a rule all are alike: without choosing rows the host has five operations less, 75 us of a step.
            return _draw_alike(name, scaled, weights, sums, parameters, most)
        which = _indices(indices, rows.device)
        some_scaled, some_weights, some_sums = (one.index_select(0, which) for one in (scaled, weights, sums))
        found = _draw_alike(name, some_scaled, some_weights, some_sums, parameters.rows(which), most)
        drawn.index_copy_(0, which, found)
    return drawn


def _draw_alike(name: str, scaled: Tensor, weights: Tensor, sums: Tensor, parameters: _Random, most: int) -> Tensor:
    """`_draw` for rows of one of its groups."""
    if name == "any":
        return _draw_any(weights, sums, parameters.number)
    return _draw_filtered(scaled, parameters, sums[:, -1], most, name == "bounded")


def _draw_any(weights: Tensor, sums: Tensor, number: Tensor) -> Tensor:
    """Draw from the whole vocabulary: first the piece, then the token in it."""
    num_rows, num_pieces = sums.shape
    every = torch.full((num_rows,), num_pieces, device=sums.device)
    target = number * sums[:, -1]
    piece = _first_above(sums, target, every)
    before = torch.where(piece > 0, sums.gather(1, (piece - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    columns = piece.unsqueeze(1) * PIECE + torch.arange(PIECE, device=sums.device)
    inside = weights.gather(1, columns).to(torch.float64).cumsum(-1)
    every = every.fill_(PIECE)
    return piece * PIECE + _first_above(inside, target - before, every)


def _draw_filtered(scaled: Tensor, parameters: _Random, total: Tensor, most: int, bounded: bool) -> Tensor:
    """Draw from the tokens that pass; `total` is the weight of all. `bounded`: `most` candidates do for all rows."""
    size = scaled.shape[1]
    width = min(most, size)
    top = scaled.topk(width, dim=-1).values
    sums = torch.exp(top).to(torch.float64).cumsum(-1)
    passing = (top >= parameters.lowest.unsqueeze(1)).sum(-1).clamp(min=1)
    has_top_k, has_min_p = parameters.top_k > 0, parameters.lowest > -math.inf
    kept = torch.where(has_top_k, torch.minimum(parameters.top_k.to(torch.int64), passing), passing)
    base = torch.where(has_top_k | has_min_p, _at(sums, kept - 1), total)
    if not bounded and width < size:
        whole = top[:, -1] < parameters.lowest
        settled = whole | ~(has_top_k | has_min_p) & (sums[:, -1] >= parameters.top_p * base)
        if not bool(settled.all()):
            return _draw_filtered(scaled, parameters, total, size, bounded=True)
    nucleus = _first_above(sums, parameters.top_p * base, passing, inclusive=True) + 1
    kept = torch.where(parameters.top_p < 1, torch.minimum(kept, nucleus), kept)
    index = _first_above(sums, parameters.number * _at(sums, kept - 1), kept)
    value = _at(top, index).unsqueeze(1)
    rank = index - (top > value).sum(-1)
    is_nth = scaled.eq(value).cumsum(-1, dtype=torch.int32).eq((rank + 1).unsqueeze(1))
    return is_nth.to(torch.uint8).argmax(-1)


def _first_above(sums: Tensor, target: Tensor, count: Tensor, *, inclusive: bool = False) -> Tensor:
    """Per row: index of the first of `count` sums above `target` (`inclusive`: or equal); if none, of the highest."""
    found = torch.searchsorted(sums, target.unsqueeze(1), right=not inclusive).squeeze(1)
    highest = torch.searchsorted(sums, _at(sums, count - 1).unsqueeze(1)).squeeze(1)
    # NaN sorts behind everything: rows that have one are not drawn, but must not index out of range.
    return torch.where(found < count, found, highest).clamp(max=sums.shape[1] - 1)


def _at(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index.unsqueeze(1)).squeeze(1)


def most_likely(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Highest logit of each row, and the lowest id that has it; `NOT_DRAWN` if there is a NaN or nothing finite."""
    # `max` promises the first of equal elements, on every device, and treats NaN as the highest.
    highest, tokens = rows.max(-1)
    # Two kernels; `isfinite` is four, 70 us of the host's time for each step.
    return highest, torch.where(highest.abs() < math.inf, tokens, NOT_DRAWN)


def _parameters(draws: Sequence[Draw], device: torch.device) -> _Random:
    fields = [
        (
            one.sampling.temperature,
            math.log(one.sampling.min_p) if one.sampling.min_p > 0 else -math.inf,
            one.sampling.top_p,
            one.sampling.top_k,
            uniform(one.sampling.seed, one.sampling.sample_index, one.position),
        )
        for one in draws
    ]
    table = placed(np.array(fields, dtype=np.float64).T, device)
    temperature, lowest, top_p, top_k, number = table.unbind(0)
    return _Random(temperature.to(torch.float32), lowest.to(torch.float32), top_p, top_k, number)


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return placed(np.array(values, dtype=np.int64), device)


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
