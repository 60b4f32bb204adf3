"""The library draws and reads what torch does, with the same bits in any batch, by any threads, in every build."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.asks import RowReads
from nodes.asks.edits import RowEdits
from nodes.request import Sampling
from nodes.worker.draw.measuring import measured, payloads
from nodes.worker.draw.sampler import NO_CANDIDATE, NOT_DRAWN, Draw, sample
from nodes.worker.ops.native import load
from nodes.worker.ops.native.builds import Choice, choose_library
from nodes.worker.ops.native.oracle import draws_agree
from tests.nodes.worker.native_builds import NAMES, build_all
from tests.nodes.worker.native_rows import all_builds, check_builds, drawn_by, rows_of_build
from tests.nodes.worker.test_draw_stage import all_edits, unpacked
from tests.nodes.worker.torch_running import GREEDY, make_runner

SPECIAL = st.sampled_from([-math.inf, math.inf, math.nan, 0.0, -0.0, 3e38, -3e38, 1e-45])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[Draw], list[RowReads]]:
    """Of sizes around groups of 64 and pieces of 1,024, with ties and with what is no number."""
    size = draw(st.sampled_from([1, 2, 15, 16, 63, 64, 65, 128, 1000, 1023, 1024, 1025, 2500]))
    count = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(count, size, generator=generator) * draw(st.sampled_from([0.0, 0.5, 3.0, 40.0]))
    if draw(st.booleans()):
        logits = logits.round()
    for value in draw(st.lists(SPECIAL, max_size=3)):
        logits[draw(st.integers(0, count - 1)), draw(st.integers(0, size - 1))] = value
    draws = [Draw(draw(SAMPLINGS), at, draw(st.none() | all_edits())) for at in range(count)]
    ids = st.lists(st.integers(-2, 2600), max_size=3).map(tuple)
    reads = st.builds(RowReads, top=st.integers(0, 20), ids=ids, of=st.sampled_from(["raw", "processed"]))
    return logits, draws, [draw(reads) for _ in range(count)]


@settings(max_examples=200, deadline=None)
@given(rows())
def test_rows_draw_and_read_what_torch_does(case: tuple[torch.Tensor, list[Draw], list[RowReads]]) -> None:
    logits, draws, reads = case
    before = logits.clone()
    check_builds(logits, draws, sample(logits, draws).tolist())
    found = [one.draw(logits, dict(enumerate(draws)), dict(enumerate(reads)), [0] * len(draws)) for one in all_builds()]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the model's logits stay as they are"
    tokens, lines = found[0]
    assert lines is not None
    assert all(other[0] == tokens and torch.equal(other[1], lines) for other in found if other[1] is not None)
    expected = payloads(measured(logits, torch.tensor(tokens).clamp(min=0), draws, reads), reads)
    for token, of, native, by_torch in zip(tokens, reads, payloads(lines, reads), expected, strict=True):
        if token < 0:
            continue
        top = min(of.top, logits.shape[1])
        ours, theirs = unpacked(native, top), unpacked(by_torch, top)
        if math.isnan(theirs[0]):
            # Divided by the temperature, the row overflows.
            assert math.isnan(ours[0])
            continue
        # Logarithms that differ in their last bit can change places.
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-5)
        assert [log for _, log in ours[2]] == pytest.approx([log for _, log in theirs[2]], rel=1e-6, abs=1e-5)
        assert ours[3] == pytest.approx(theirs[3], rel=1e-6, abs=1e-5)
        if native[:4] == by_torch[:4]:
            assert ours[1] == theirs[1]
            assert [one for one, _ in ours[2]] == [one for one, _ in theirs[2]]


def test_a_row_that_has_no_number_or_no_candidate_is_not_drawn_and_not_read() -> None:
    logits = torch.zeros(4, 200)
    logits[0, 199], logits[1, 0], logits[2] = math.nan, math.inf, -math.inf
    nothing = RowEdits()
    nothing.mask = b""
    draws = [Draw(Sampling(), 0)] * 3 + [Draw(Sampling(), 0, nothing)]
    for one in all_builds():
        tokens, lines = one.draw(logits, dict(enumerate(draws)), {i: RowReads(3) for i in range(4)}, [0] * 4)
        assert tokens == [NOT_DRAWN] * 3 + [NO_CANDIDATE]
        assert lines is not None
        assert not lines.any()


def many_rows() -> tuple[torch.Tensor, list[Draw], dict[int, RowReads]]:
    logits = torch.randn(24, 20_000, generator=torch.Generator().manual_seed(5)) * 3
    edits = RowEdits()
    edits.mask, edits.scale, edits.add = np.full(2000, 0xB7, np.uint8).tobytes(), {5: 1.2, 19_999: 2.0}, {64: 0.5}
    samplings = [
        Sampling(), Sampling(temperature=0.7, top_p=0.95), Sampling(top_k=50), Sampling(min_p=0.01), GREEDY,
        Sampling(temperature=2.0, top_p=0.99),
    ] * 4  # fmt: skip
    draws = [Draw(one, at, edits if at % 2 else None) for at, one in enumerate(samplings)]
    return logits, draws, {at: RowReads(at % 21, (1, 2), "processed" if at % 3 else "raw") for at in range(24)}


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_rows_order_threads_or_build(name: str) -> None:
    logits, draws, reads = many_rows()
    first = rows_of_build(NAMES[0]).draw(logits, dict(enumerate(draws)), reads, [0] * 24)
    one = rows_of_build(name)
    try:
        for threads in (1, 2, 3):
            one._functions.kvmesh_set_threads(threads)
            tokens, lines = one.draw(logits, dict(enumerate(draws)), reads, [0] * 24)
            assert tokens == first[0]
            assert lines is not None
            assert first[1] is not None
            assert torch.equal(lines, first[1])
            order = [7, 3, 23, 0, 11]
            some = {at: draws[i] for at, i in enumerate(order)}
            found, few = one.draw(logits[order], some, {at: reads[i] for at, i in enumerate(order)}, [0] * 5)
            assert found == [tokens[i] for i in order]
            assert few is not None
            expected = payloads(lines, [*reads.values()])
            assert payloads(few, [reads[i] for i in order]) == [expected[i] for i in order]
            for at in range(24):
                alone = one.draw(logits[at : at + 1], {0: draws[at]}, {0: reads[at]}, [0])
                assert alone[0] == [tokens[at]]
                assert alone[1] is not None
                assert payloads(alone[1], [reads[at]]) == [expected[at]]
    finally:
        one._functions.kvmesh_set_threads(1)


def test_rows_that_only_read_keep_their_tokens_and_rows_may_lie_apart() -> None:
    wide = torch.randn(3, 3000, generator=torch.Generator().manual_seed(9))
    logits, draws = wide[:, :2500], {1: Draw(Sampling(), 0)}
    likely = sample(logits, [Draw(GREEDY, 0)] * 3).tolist()
    for one in all_builds():
        tokens, lines = one.draw(logits, draws, {2: RowReads(1)}, likely)
        assert tokens == [likely[0], sample(logits[1:2], [draws[1]]).item(), likely[2]]
        assert lines is not None
        _, rank, ((most_likely, _),), _ = unpacked(payloads(lines, [RowReads(1)])[0], 1)
        assert (rank, most_likely) == (1, likely[2])


class WrongDraws:
    """A build that draws nothing, as one might that was translated wrongly."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == "kvmesh_rows" else getattr(self._functions, name)


def test_where_the_librarys_draws_differ_torch_draws_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    build_all()
    sound = choose_library().build
    assert sound is not None
    assert draws_agree(rows_of_build(NAMES[0]))
    runner = make_runner("random:tiny-llama")
    wrong = sound._replace(functions=WrongDraws(sound.functions))
    monkeypatch.setattr(load, "choose_library", lambda _: Choice(wrong, ""))
    told: list[str] = []
    monkeypatch.setattr(load, "_say", told.append)
    other = make_runner("random:tiny-llama")
    assert told[0].startswith(f"torch draws: those of the native kernels ({sound.name}) differ from torch's")
    assert "/native-" in other.numerics
    assert other.numerics != runner.numerics, "workers that draw otherwise do not take over from each other"


def test_drawn_by_the_best_build_as_by_torch_at_a_whole_vocabulary() -> None:
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(3)) * 2
    samplings = [Sampling(), Sampling(top_p=0.9), Sampling(top_k=50), Sampling(min_p=0.02), Sampling(temperature=0.2)]
    draws = [Draw(one, at) for at, one in enumerate([*samplings, GREEDY])]
    assert drawn_by(rows_of_build(NAMES[0]), logits, draws) == sample(logits, draws).tolist()
