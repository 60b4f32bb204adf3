"""The edges of sampling, in all samplers: they draw the same, and what can be said of the draw beforehand holds."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import RepetitionPenaltyLogitsProcessor

from nodes.asks import asked
from nodes.asks.logit_bias import LogitBias
from nodes.asks.min_tokens import MinTokens
from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.request import LOWEST_TEMPERATURE, Sampling
from nodes.worker.draw.sampler import NO_CANDIDATE, NOT_DRAWN, Draw, sample
from tests.nodes.worker.native_rows import check_builds
from tests.nodes.worker.torch_running import asking, drawing_of

# Below, at and above what float32 holds as a normal, a subnormal and any number at all.
TEMPERATURES = (
    0.0,
    5e-324,
    1e-60,
    1e-46,
    1.4e-45,
    1e-40,
    LOWEST_TEMPERATURE,
    1.2e-38,
    1e-30,
    1e-6,
    0.01,
    0.3,
    1.0,
    2.0,
    50.0,
)
BIASES = (None, None, {3: 2.5, 1: 0.1}, {0: 100.0}, {1: -100.0}, {0: -100.0, 1: 100.0, 2: 100.0}, {2**31 - 1: 100.0})


def drawn_by_all(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    drawn, before = sample(logits, draws).tolist(), logits.clone()
    check_builds(logits, draws, drawn)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the model's logits stay as they are"
    return drawn


class Wanted(NamedTuple):
    """Sampling, and what changes its logits."""

    plain: Sampling
    logit_bias: dict[int, float] | None
    min_tokens: int
    masked: list[int]
    repetition_penalty: float

    def sampling(self) -> Sampling:
        asks = [
            *([LogitBias(self.logit_bias)] if self.logit_bias else []),
            *([MinTokens(self.min_tokens, self.masked)] if self.min_tokens else []),
            *([RepetitionPenalty(self.repetition_penalty)] if self.repetition_penalty != 1 else []),
        ]
        return replace(self.plain, asks=asked(asks))


def samplings() -> st.SearchStrategy[Wanted]:
    plain = st.builds(
        Sampling,
        temperature=st.sampled_from(TEMPERATURES),
        top_p=st.sampled_from([0.0, 5e-324, 1e-300, 1e-45, 1e-7, 0.1, 0.5, 0.9, 0.999999, 1 - 2.0**-53, 1.0, 1.0]),
        top_k=st.sampled_from([0, 0, 0, 1, 2, 7, 40, 1000, 1024, 1025, 2**31 - 1]),
        min_p=st.sampled_from([0.0, 0.0, 0.0, 5e-324, 1e-300, 1e-40, 1e-7, 0.05, 1 - 2.0**-53, 1.0]),
        seed=st.integers(-(2**63), 2**64 - 1),
        sample_index=st.integers(0, 5),
    )
    return st.builds(
        Wanted,
        plain,
        logit_bias=st.sampled_from(BIASES),
        min_tokens=st.sampled_from([0, 0, 1, 5, 2**31 - 1]),
        masked=st.sampled_from([[], [0], [0, 1, 2], [3, 2**31 - 1], list(range(64))]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 0.01, 0.9, 1.1, 10.0]),
    )


HISTORIES = st.lists(st.one_of(st.integers(0, 20), st.integers(-1, 2**31 - 1)), max_size=12)


def biased(logits: list[float], sampling: Wanted, position: int, history: list[int]) -> list[float]:
    """What is drawn from, in float32, written down without regard to speed."""
    values = torch.tensor(logits, dtype=torch.float32)
    for token, bias in (sampling.logit_bias or {}).items():
        if token < len(logits):
            values[token] += bias
    if position < sampling.min_tokens:
        for token in sampling.masked:
            if token < len(logits):
                values[token] = -math.inf
    seen = [token for token in history if 0 <= token < len(logits)]
    if seen and sampling.repetition_penalty != 1:
        oracle = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        return oracle(torch.tensor([seen]), values.unsqueeze(0))[0].tolist()
    return values.tolist()


@settings(max_examples=250, deadline=None)
@given(
    st.one_of(st.integers(1, 1500), st.integers(1, 4000)),
    st.lists(st.tuples(samplings(), st.integers(0, 8) | st.integers(0, 10_000), HISTORIES), min_size=1, max_size=8),
    st.integers(0, 2**32),
    st.sampled_from([1e-3, 0.1, 1.0, 10.0, 40.0, 1e30]),
    st.sampled_from(["plain", "ties", "rounded", "holes", "equal"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_samplers_draw_the_same_and_what_the_edges_leave(
    vocab_size: int,
    requests: list[tuple[Wanted, int, list[int]]],
    seed: int,
    scale: float,
    kind: str,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(requests), vocab_size, generator=generator) * scale
    if kind == "ties":
        logits = logits.clamp(-scale, scale)
    if kind == "rounded":
        logits = logits.round()
    if kind == "holes":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -math.inf
    if kind == "equal":
        logits[:] = scale
    logits = logits.to(dtype)
    drawn = drawn_by_all(logits, [drawing_of(wanted.sampling(), *rest) for wanted, *rest in requests])
    for row, (wanted, position, history), token in zip(logits.tolist(), requests, drawn, strict=True):
        values, sampling = biased(row, wanted, position, history), wanted.plain
        highest = max(values)
        if highest == -math.inf:
            assert token == (NO_CANDIDATE if max(row) > -math.inf else NOT_DRAWN)
            continue
        assert values[token] > -math.inf, "nothing that is masked or has no weight is drawn"
        if sampling.temperature < LOWEST_TEMPERATURE or sampling.top_k == 1 or sampling.top_p < 1e-40:
            assert token == values.index(highest), "the lowest id of the most likely"
        elif sampling.min_p == 1.0 or sampling.temperature < 1e-30:
            # At 1e-30 what float32 tells apart is more than e^87 times as likely, but for logits next to each other.
            assert values[token] == pytest.approx(highest, rel=1e-6, abs=1e-28)


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-40])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy_beside_any_neighbour(temperature: float) -> None:
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(2))
    logits[1, [70, 3000]] = 9.0
    tiny, plain = Sampling(temperature=temperature, seed=3), Sampling(seed=4)
    drawn = drawn_by_all(logits, [drawing_of(plain, 0), drawing_of(tiny, 0), drawing_of(plain, 1)])
    assert drawn[1] == 70
    assert [drawn[0], drawn[2]] == drawn_by_all(logits[[0, 2]], [drawing_of(plain, 0), drawing_of(plain, 1)])


def test_a_bias_of_100_forces_a_token_and_of_minus_100_bans_it() -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)).expand(50, -1) * 5
    forced, banned = asking(LogitBias({7: 100.0}), seed=1), asking(LogitBias(dict.fromkeys(range(2999), -100.0)))
    assert set(drawn_by_all(logits, [drawing_of(forced, i) for i in range(50)])) == {7}
    assert set(drawn_by_all(logits, [drawing_of(banned, i) for i in range(50)])) == {2999}


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=5), Sampling(top_p=0.9)])
def test_masked_ids_are_not_drawn_before_min_tokens_and_are_from_then_on(sampling: Sampling) -> None:
    logits = torch.zeros(6, 300)
    logits[:, [4, 9]] = 60.0
    masking = replace(sampling, asks=asked([MinTokens(3, [4, 9]), LogitBias({4: 100.0, 20: 50.0})]))
    assert drawn_by_all(logits, [drawing_of(masking, position) for position in range(6)]) == [20, 20, 20, 4, 4, 4]
    everything = asking(MinTokens(1, list(range(300))), temperature=sampling.temperature)
    assert drawn_by_all(logits, [drawing_of(everything, position) for position in range(6)])[0] == NO_CANDIDATE
