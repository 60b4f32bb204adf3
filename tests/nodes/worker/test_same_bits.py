"""Logits are bitwise the same however they are computed: whole, in chunks, decoded, cached, alone or in a crowd."""

import functools
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodes.worker.ops.native.builds import choose_library
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.torch import attention
from nodes.worker.ops.torch.load import HostRunner
from tests.nodes.worker.torch_running import Row, logits_by_chunks, make_runner, step

MODELS = [
    "random:tiny-qwen2", "random:tiny-qwen3", "random:tiny-llama", "random:tiny-mistral", "random:tiny-qwen2-sliding",
    "random:tiny-olmo2", "random:tiny-gemma3", "random:tiny-qwen3-moe",
]  # fmt: skip
DTYPES = ["float32", "bfloat16"]
# Torch computes where the native kernels were not built.
CASES = [
    *((model, "auto") for model in MODELS),
    ("random:tiny-qwen2", "torch"),
    ("random:tiny-mistral", "torch"),
    ("random:tiny-qwen3-moe", "torch"),
]
MAX_TOKENS = 150
NUM_SEQUENCES = 16
SCRATCH_PAGES = list(range(1, 11))
NUM_PAGES = 400


@functools.cache
def runner_of(model: str, dtype: str, kernels: str = "auto") -> HostRunner:
    runner = make_runner(model, dtype, NUM_PAGES, kernels=kernels)
    assert ("/any/" if kernels == "auto" and choose_library().build else "/rows4/") in runner.numerics
    return runner


def pages_of(runner: HostRunner) -> torch.Tensor:
    pool = runner._steps._pool if isinstance(runner, NativeRunner) else runner._attention.pool
    return pool.pages


@functools.cache
def tokens_of(sequence: int) -> list[int]:
    """Sequences 2n and 2n+1 share their first 64 tokens."""
    own = torch.randint(0, 1000, (MAX_TOKENS,), generator=torch.Generator().manual_seed(sequence)).tolist()
    shared = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(100 + sequence // 2)).tolist()
    return [*shared, *own[64:]]


@functools.cache
def alone(model: str, dtype: str, sequence: int, length: int, kernels: str = "auto") -> torch.Tensor:
    """The reference: one prefill of everything, nothing else in the batch."""
    return logits_by_chunks(runner_of(model, dtype, kernels), tokens_of(sequence)[:length], SCRATCH_PAGES, [length])[0]


class Job(NamedTuple):
    """One sequence, computed up to each of `ends` in turn; `cached`: its first 64 tokens come from another one."""

    sequence: int
    ends: list[int]
    cached: bool


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    chosen = []
    for sequence in draw(st.sets(st.integers(0, NUM_SEQUENCES - 1), min_size=1)):
        length = draw(st.integers(1, MAX_TOKENS))
        decoded = range(max(length - draw(st.integers(0, 4)), 1), length + 1)
        ends = draw(st.sets(st.integers(1, length), max_size=4)).union(decoded)
        chosen.append(Job(sequence, sorted(ends), draw(st.booleans())))
    return chosen


WHOLE = [(model, kernels, dtype) for model, kernels in CASES for dtype in DTYPES]
# Torch's side in one width for each kind of it, since its kernels for rows of four are the slowest of all here: the
# other widths are slow tests.
LATER = {
    ("random:tiny-qwen2", "torch", "bfloat16"),
    ("random:tiny-mistral", "torch", "float32"),
    ("random:tiny-qwen3-moe", "torch", "float32"),
}
QUICK = [case for case in WHOLE if case not in LATER]


@pytest.mark.parametrize(("model", "kernels", "dtype"), QUICK)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(pending=jobs(), random=st.randoms(use_true_random=False))
def test_any_batch_gives_the_bits_of_each_sequence_alone(
    model: str, kernels: str, dtype: str, pending: list[Job], random: Random
) -> None:
    check_batches(model, kernels, dtype, pending, random)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kernels", "dtype"), WHOLE)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(pending=jobs(), random=st.randoms(use_true_random=False))
def test_many_batches_give_the_bits_of_each_sequence_alone(
    model: str, kernels: str, dtype: str, pending: list[Job], random: Random
) -> None:
    check_batches(model, kernels, dtype, pending, random)


def check_batches(model: str, kernels: str, dtype: str, pending: list[Job], random: Random) -> None:
    runner = runner_of(model, dtype, kernels)
    random = Random(random.getrandbits(32))
    pages = iter(random.sample(range(20, NUM_PAGES), NUM_PAGES - 20))
    tables = {job.sequence: [next(pages) for _ in range(10)] for job in pending}
    done, ends = dict.fromkeys(tables, 0), {job.sequence: list(job.ends) for job in pending}
    for job in pending:
        if job.cached and job.ends[-1] > 64:
            shared = [next(pages) for _ in range(4)]
            runner.run(step(Row(0, tokens_of(job.sequence ^ 1)[:64], shared, None)))
            tables[job.sequence][:4] = shared
            done[job.sequence] = 64
            ends[job.sequence] = [end for end in job.ends if end > 64]
    while ready := [sequence for sequence, left in ends.items() if left]:
        rows, expected = [], []
        for sequence in random.sample(ready, random.randint(1, len(ready))):
            begin, end = done[sequence], ends[sequence].pop(0)
            rows.append(Row(begin, tokens_of(sequence)[begin:end], tables[sequence]))
            expected.append(alone(model, dtype, sequence, end, kernels))
            done[sequence] = end
        logits = runner.logits(step(*rows))
        for row, bits in enumerate(expected):
            assert torch.equal(logits[row], bits), [(begin, begin + len(ids)) for begin, ids, *_ in rows]


@pytest.mark.parametrize(
    ("model", "kernels", "dtype"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(LATER))],
)
def test_chunks_of_every_kind(model: str, kernels: str, dtype: str) -> None:
    runner, tokens = runner_of(model, dtype, kernels), tokens_of(3)
    expected = alone(model, dtype, 3, MAX_TOKENS, kernels)
    for sizes in ([16] * 9 + [6], [64, 64, 22], [37, 37, 37, 37, 2], [1] * MAX_TOKENS, [149, 1], [3, 147]):
        assert torch.equal(logits_by_chunks(runner, tokens, list(range(20, 30)), sizes)[-1], expected), sizes


@pytest.mark.parametrize("page_size", [8, 64])
def test_page_size_does_not_matter(page_size: int) -> None:
    other = make_runner(MODELS[0], "float32", 60, page_size)
    pages = list(range(1, MAX_TOKENS // page_size + 2))
    whole = logits_by_chunks(other, tokens_of(3), pages, [100, 49, 1])
    assert torch.equal(whole[-1], alone(MODELS[0], "float32", 3, MAX_TOKENS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype: str) -> None:
    try:
        two = make_runner(MODELS[0], dtype, num_threads=2)
        whole = logits_by_chunks(two, tokens_of(3), SCRATCH_PAGES, [100, 49, 1])
        assert two.numerics == runner_of(MODELS[0], dtype).numerics
    finally:
        torch.set_num_threads(1)
    assert torch.equal(whole[-1], alone(MODELS[0], dtype, 3, MAX_TOKENS))


def test_what_other_owners_left_in_a_page_does_not_matter() -> None:
    runner, tokens = runner_of(MODELS[0], "float32"), tokens_of(3)
    pages = list(range(30, 40))
    with torch.inference_mode():
        pages_of(runner)[pages] = float("nan")
    logits = logits_by_chunks(runner, tokens, pages, [20, 1, 43, 80, *([1] * 6)])
    assert torch.equal(logits[-1], alone(MODELS[0], "float32", 3, MAX_TOKENS))


def test_a_step_run_again_writes_the_same_bytes() -> None:
    runner = runner_of(MODELS[1], "bfloat16")
    pool = pages_of(runner)
    plan = step(Row(0, tokens_of(1)[:40], [50, 51, 52]), Row(0, tokens_of(2)[:9], [53]))
    first, before = runner.run(plan), pool[50:54].clone()
    assert runner.run(plan) == first
    assert torch.equal(pool[50:54], before)


def test_not_a_number_fails_its_own_row_only() -> None:
    runner = runner_of(MODELS[0], "float32")
    runner.run(step(Row(0, tokens_of(1)[:20], [60, 61]), Row(0, tokens_of(2)[:20], [62, 63])))
    with torch.inference_mode():
        pages_of(runner)[60] = float("inf")
    outcome = runner.run(step(Row(20, [5], [60, 61]), Row(20, [5], [62, 63]), Row(0, [6, 7], [64], None)))
    assert [(error.row, error.code) for error in outcome.errors] == [(0, "poisoned_request")]
    assert outcome.token_ids[0] == -1
    assert outcome.token_ids[1] >= 0
    assert outcome.token_ids[2] == -1


@pytest.mark.parametrize("model", MODELS)
def test_bounds_on_memory_do_not_matter(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of few rows, and a batch of decoding sequences in several runs."""
    monkeypatch.setattr(attention, "_MOST_SCORES", 10_000)
    runner = runner_of(model, "float32", "torch")
    ends = [150, 149, 66, 65, 64, 20, 3, 1]
    tables = [list(range(20 + 10 * n, 30 + 10 * n)) for n in range(len(ends))]
    prefills = [Row(0, tokens_of(n)[: end - 1], tables[n], None) for n, end in enumerate(ends) if end > 1]
    runner.run(step(*prefills))
    logits = runner.logits(step(*(Row(end - 1, tokens_of(n)[end - 1 : end], tables[n]) for n, end in enumerate(ends))))
    for n, end in enumerate(ends):
        assert torch.equal(logits[n], alone(model, "float32", n, end, "torch"))
