"""On CPU tensors the device's sampler draws what the CPU's does, token for token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.request import Sampling
from nodes.worker.ops.torch.sampler import sample_on_device
from nodes.worker.sampler import NOT_DRAWN, Draw, sample

GREEDY = Sampling(temperature=0.0)


def assert_same(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    before = logits.clone()
    drawn = sample_on_device(logits, draws).tolist()
    assert drawn == sample(logits, draws)
    assert torch.equal(
        logits,
        before,
    ) or bool(before.isnan().any()), "the model's logits stay as they are"
    return drawn


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0, 50.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 1000, 1024, 1025, 5000]),
        top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1 - 1e-12, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 1e-9, 1e-40, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        sample_index=st.integers(0, 5),
        logit_bias=st.sampled_from([None, None, None, {3: 2.5, 0: -100.0, 9_999_999: 3.0}, {1: 0.1, 2: 100.0}]),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4000),
    st.lists(st.tuples(samplings(), st.integers(0, 10_000)), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.sampled_from(["plain", "ties", "holes"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_draws_are_those_of_the_other_sampler(
    vocab_size: int,
    requests: list[tuple[Sampling, int]],
    seed: int,
    scale: float,
    kind: str,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(requests), vocab_size, generator=generator) * scale
    if kind == "ties":
        logits = logits.round()
    if kind == "holes":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -math.inf
    assert_same(logits.to(dtype), [Draw(sampling, position) for sampling, position in requests])


def test_a_large_vocabulary() -> None:
    logits = torch.randn(24, 151_936, generator=torch.Generator().manual_seed(3)) * 2
    kinds = [
        GREEDY, Sampling(seed=1), Sampling(seed=2, top_p=0.9), Sampling(seed=3, top_k=50), Sampling(seed=4, min_p=0.02),
        Sampling(seed=5, top_k=40, top_p=0.8), Sampling(seed=6, logit_bias={3: 30.0}), Sampling(seed=7, temperature=9),
        Sampling(seed=8, top_p=0.99), Sampling(seed=9, top_k=3000), Sampling(seed=10, min_p=1e-7, top_p=0.999),
        Sampling(temperature=0.0, logit_bias={77: 40.0}),
    ]  # fmt: skip
    draws = [Draw(kinds[i % len(kinds)], i) for i in range(24)]
    together = assert_same(logits, draws)
    alone = [sample_on_device(logits[i : i + 1], [draws[i]]).item() for i in range(24)]
    assert alone == together, "a draw depends neither on the batch nor on the row"


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=0.1), Sampling(logit_bias={1: 1.0})],
    ids=repr,
)
def test_rows_without_a_finite_highest_logit_are_not_drawn(sampling: Sampling) -> None:
    rows = torch.zeros(5, 2300)
    rows[0, 7] = math.nan
    rows[1, 7] = math.inf
    rows[2] = -math.inf
    rows[4, 1:] = -math.inf
    drawn = assert_same(rows, [Draw(sampling, 3)] * 5)
    assert drawn[:3] == [NOT_DRAWN] * 3
    assert drawn[3] >= 0
    assert drawn[4] == 0


def test_greedy_takes_the_first_of_equal_ones() -> None:
    rows = torch.zeros(3, 20_000)
    rows[0, [700, 7000, 15_000]] = 4.0
    rows[1] = 1.0
    rows[2, -1] = 0.5
    assert assert_same(rows, [Draw(GREEDY, 0)] * 3) == [700, 0, 19_999]
    assert assert_same(rows.bfloat16(), [Draw(GREEDY, 0)] * 3) == [700, 0, 19_999]


def test_a_number_near_one_draws_the_last_token_that_has_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nodes.worker.sampler", "nodes.worker.ops.torch.sampler"):
        monkeypatch.setattr(f"{module}.uniform", lambda *_: 1 - 2.0**-53)
    rows = torch.full((1, 3000), -math.inf)
    rows[0, :1500] = 0.1
    for sampling in (Sampling(), Sampling(top_k=2999), Sampling(top_p=1 - 1e-12), Sampling(top_k=20)):
        assert_same(rows, [Draw(sampling, 0)])
