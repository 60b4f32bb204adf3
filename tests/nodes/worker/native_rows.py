"""The library's draws beside torch's: equal, but for numbers within a rounding of the border between two tokens."""

import functools
from collections.abc import Sequence
from unittest.mock import patch

import torch
from msgspec.structs import replace

from nodes.asks import RowReads
from nodes.worker.draw import sampler
from nodes.worker.draw.sampler import Draw, sample, uniform
from nodes.worker.ops.native.rows import NativeRows
from tests.nodes.worker.native_builds import NAMES, library_of

BORDER = 1e-6
"""Of a row's whole weight. An `exp` that is rounded otherwise moves a border by 1e-8."""


@functools.cache
def rows_of_build(name: str) -> NativeRows:
    return NativeRows(library_of(name))


def all_builds() -> list[NativeRows]:
    return [rows_of_build(name) for name in NAMES]


def drawn_by(rows: NativeRows, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    return rows.draw(logits.float(), dict(enumerate(draws)), {}, [0] * len(draws))[0]


def read_by(
    rows: NativeRows, logits: torch.Tensor, tokens: Sequence[int], draws: Sequence[Draw], reads: Sequence[RowReads]
) -> torch.Tensor:
    """Lines of rows that have drawn `tokens`: for rows that were changed they are drawn again."""
    altered = {at: draw for at, draw in enumerate(draws) if not draw.is_plain}
    found, lines = rows.draw(logits.float(), altered, dict(enumerate(reads)), tokens)
    assert lines is not None
    assert found == list(tokens)
    return lines


def is_at_border(logits: torch.Tensor, draw: Draw, token: int) -> bool:
    """Whether torch draws it from the row with a number, or a `top_p`, that is nearly the same."""
    number = uniform(draw.sampling.seed, draw.sampling.sample_index, draw.position)
    for top_p in (draw.sampling.top_p, draw.sampling.top_p - BORDER, draw.sampling.top_p + BORDER):
        for other in (number, number - BORDER, number + BORDER):
            with patch.object(sampler, "uniform", lambda *_, other=other: min(max(other, 0.0), 1 - 2.0**-53)):
                near = draw._replace(sampling=replace(draw.sampling, top_p=min(max(top_p, 0.0), 1.0)))
                if sample(logits.unsqueeze(0), [near]).tolist() == [token]:
                    return True
    return False


def check_builds(logits: torch.Tensor, draws: Sequence[Draw], expected: Sequence[int]) -> int:
    """All builds draw the same, and what torch has drawn; returns how many draws are others, at a border."""
    found, *others = [drawn_by(rows, logits, draws) for rows in all_builds()]
    assert others == [found] * len(others)
    differing = [at for at, token in enumerate(found) if token != expected[at]]
    for at in differing:
        assert is_at_border(logits[at], draws[at], found[at]), (draws[at], found[at], expected[at])
    return len(differing)
