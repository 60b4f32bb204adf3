"""torch's sampler and that of every native build: the same tokens. `test_sampling_edges.py` has the property of it."""

import math

import pytest
import torch

from nodes.asks.logit_bias import LogitBias
from nodes.request import Sampling
from nodes.worker.draw.sampler import NOT_DRAWN, Draw, sample
from tests.nodes.worker.native_rows import check_builds
from tests.nodes.worker.torch_running import asking, drawing_of

GREEDY = Sampling(temperature=0.0)


def assert_same(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    before = logits.clone()
    drawn = sample(logits, draws).tolist()
    check_builds(logits.float(), draws, drawn)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the model's logits stay as they are"
    return drawn


def test_a_large_vocabulary() -> None:
    logits = torch.randn(24, 151_936, generator=torch.Generator().manual_seed(3)) * 2
    kinds = [
        GREEDY, Sampling(seed=1), Sampling(seed=2, top_p=0.9), Sampling(seed=3, top_k=50), Sampling(seed=4, min_p=0.02),
        Sampling(seed=5, top_k=40, top_p=0.8), asking(LogitBias({3: 30.0}), seed=6), Sampling(seed=7, temperature=9),
        Sampling(seed=8, top_p=0.99), Sampling(seed=9, top_k=3000), Sampling(seed=10, min_p=1e-7, top_p=0.999),
        asking(LogitBias({77: 40.0}), temperature=0.0),
    ]  # fmt: skip
    draws = [drawing_of(kinds[i % len(kinds)], i) for i in range(24)]
    together = assert_same(logits, draws)
    alone = [sample(logits[i : i + 1], [draws[i]]).item() for i in range(24)]
    assert alone == together, "a draw depends neither on the batch nor on the row"


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=0.1), asking(LogitBias({1: 1.0}))],
    ids=repr,
)
def test_rows_without_a_finite_highest_logit_are_not_drawn(sampling: Sampling) -> None:
    rows = torch.zeros(5, 2300)
    rows[0, 7] = math.nan
    rows[1, 7] = math.inf
    rows[2] = -math.inf
    rows[4, 1:] = -math.inf
    drawn = assert_same(rows, [drawing_of(sampling, 3)] * 5)
    assert drawn[:3] == [NOT_DRAWN] * 3
    assert drawn[3] >= 0
    assert drawn[4] == 0


def test_greedy_takes_the_first_of_equal_ones() -> None:
    rows = torch.zeros(3, 151_936)
    rows[0, [700, 70_000, 150_000]] = 4.0
    rows[1] = 1.0
    rows[2, -1] = 0.5
    assert assert_same(rows, [drawing_of(GREEDY, 0)] * 3) == [700, 0, 151_935]
    assert assert_same(rows.bfloat16(), [drawing_of(GREEDY, 0)] * 3) == [700, 0, 151_935]
    assert assert_same(rows, [drawing_of(asking(LogitBias({9: 10.0, 10: 10.0}), temperature=0.0), 0)] * 3) == [
        9,
        9,
        9,
    ]
    assert assert_same(rows, [drawing_of(asking(LogitBias({151_936: 9.0}), temperature=0.0), 0)] * 3) == [
        700,
        0,
        151_935,
    ]


def test_a_number_near_one_draws_the_last_token_that_has_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nodes.worker.draw.sampler", "nodes.worker.ops.native.rows"):
        monkeypatch.setattr(f"{module}.uniform", lambda *_: 1 - 2.0**-53)
    rows = torch.full((1, 3000), -math.inf)
    rows[0, :1500] = 0.1
    for sampling in (Sampling(), Sampling(top_k=2999), Sampling(top_p=1 - 1e-12)):
        assert assert_same(rows, [drawing_of(sampling, 0)]) == [1499]
    assert_same(rows, [drawing_of(Sampling(top_k=20), 0)])
