"""Vectors: every backend pools what transformers computes, the same bits in any chunks, beside anything, run twice."""

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from nodes.models.pooling import POOLS, Pooling
from nodes.protocol import RowError
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep, StepOutcome
from nodes.worker.vectors.pooling import VectorRows
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.cuda.rank_running import in_ranks
from tests.nodes.worker.native_builds import build_all
from tests.nodes.worker.test_native_ranks import rank_of
from tests.nodes.worker.test_parity import CASES, save_model
from tests.nodes.worker.torch_running import GREEDY, Row, make_runner, step

PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(53)]
OTHER = [(11 * at + 5) % 250 for at in range(21)]
MAKERS = [make_runner, lambda *args, **kw: make_runner(*args, kernels="torch", **kw), device_runner]


def pooled_by(kind: str, prompt: list[int] = PROMPT, pooled: bytes = b"", num_pooled: int = 0) -> OpenSequence:
    return OpenSequence(Open(0, 1, len(prompt), Sampling(), kind=kind, pooled=pooled, num_pooled=num_pooled))


def part(one: OpenSequence, prompt: list[int], first_page: int, start: int = 0, end: int = 0) -> RunnableStep:
    """Tokens `start .. end - 1` of a prompt on its own pages."""
    end = end or len(prompt)
    pages = array("i", range(first_page, first_page + -(-end // 16)))
    rows = Rows.of([RunnableRow(0, one, start, end - start, 0, 0, 0)])
    return RunnableStep(1, rows, array("i", prompt[start:end]), pages)


def joined(*steps: RunnableStep) -> RunnableStep:
    """The rows of all as one step."""
    tokens, pages, rows = array("i"), array("i"), list[RunnableRow]()
    for one in steps:
        for row in one.rows:
            at = {"token_offset": len(tokens) + row.token_offset, "page_offset": len(pages) + row.page_offset}
            rows.append(row._replace(row=len(rows), **at))
        tokens.extend(one.token_ids)
        pages.extend(one.page_ids)
    return RunnableStep(1, Rows.of(rows), tokens, pages)


def numbers(vector: bytes) -> Any:
    return np.frombuffer(vector, "<f4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> tuple[Path, Any]:
    """A folder with a small Qwen3, and the last hidden states of `PROMPT` by transformers, `[positions, hidden]`."""
    build_all()
    directory = tmp_path_factory.mktemp("model")
    kind, options = CASES["qwen3-gqa2-head-dim-apart"]
    save_model(directory, kind, **options)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return directory, model(torch.tensor([PROMPT])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("make", MAKERS)
def test_vectors_are_transformers_in_any_chunks_and_beside_others(make: Any, pool: str, checkpoint: Any) -> None:
    directory, states = checkpoint
    runner = make(directory, pooling=Pooling(pool=pool))
    expected = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pool]
    whole = run_isolated(runner, part(pooled_by(pool), PROMPT, 1))
    assert (whole.errors, list(whole.token_ids)) == ([], [-1])
    np.testing.assert_allclose(numbers(whole.vectors[0]), expected, atol=1e-4, rtol=1e-4)
    # In three chunks, beside a row that draws and another vector; the second chunk is run twice.
    one, other = pooled_by(pool), pooled_by("mean", OTHER)
    drawing = step(Row(0, [5, 6, 7], [90], GREEDY))
    run_isolated(runner, part(one, PROMPT, 20, 0, 16))
    beside = joined(drawing, part(one, PROMPT, 20, 16, 48), part(other, OTHER, 40))
    middle = run_isolated(runner, beside)
    assert middle.token_ids[0] >= 0
    assert list(middle.token_ids[1:]) == [-1, -1]
    assert run_isolated(runner, beside) == middle
    alone = run_isolated(runner, part(pooled_by("mean", OTHER), OTHER, 60))
    assert alone.vectors[0] == middle.vectors[2]
    assert run_isolated(runner, part(one, PROMPT, 20, 48)).vectors == whole.vectors
    # And by a worker that knows only what the scheduler was told.
    after = pooled_by(pool, pooled=middle.vectors[1], num_pooled=48)
    assert run_isolated(runner, part(after, PROMPT, 20, 48)).vectors == whole.vectors


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_every_rank_makes_the_same_vector(kernels: str, checkpoint: Any) -> None:
    directory, states = checkpoint

    def of_rank(group: Collectives) -> StepOutcome:
        runner = rank_of(directory, group, kernels=kernels, pooling=Pooling(pool="mean"))
        return run_isolated(runner, part(pooled_by("mean"), PROMPT, 1))

    zero, one = in_ranks(2, of_rank)
    assert zero == one
    np.testing.assert_allclose(numbers(zero.vectors[0]), states.mean(0), atol=1e-4, rtol=1e-4)


def states_of(step: RunnableStep, states: Any) -> Any:
    """The states that the rows of one sequence read."""
    vectors = VectorRows(step.rows)
    first = step.rows.starts[0]
    return vectors, states[[first + at for at in vectors.places([0])]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_vector_does_not_depend_on_how_its_prompt_is_cut(data: Any) -> None:
    length = data.draw(st.integers(1, 200))
    width, kind = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(POOLS))
    states = np.random.default_rng(length).standard_normal((length, width)).astype(np.float32)
    prompt = list(range(length))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=5))})
    one = pooled_by(kind, prompt)
    for start, end in pairwise(cuts):
        vectors, read = states_of(part(one, prompt, 1, start, end), states)
        made = vectors.beside(StepOutcome([-1]), read).vectors[0]
        if end < length and data.draw(st.booleans()):
            one = pooled_by(kind, prompt, made, end)
    vectors, read = states_of(part(pooled_by(kind, prompt), prompt, 1), states)
    assert vectors.beside(StepOutcome([-1]), read).vectors[0] == made
    total = np.zeros(width, np.float32)
    for state in states:
        total = total + state
    expected = {"last": states[-1], "cls": states[0], "mean": total / np.float32(length)}[kind]
    assert numbers(made).tobytes() == expected.tobytes()


def test_what_was_not_pooled_here_is_missing_and_infinite_vectors_fail_alone() -> None:
    one = pooled_by("mean", [1, 2, 3])
    states = np.ones((3, 2), np.float32)
    vectors = VectorRows(part(one, [1, 2, 3], 1, 2).rows)
    [error] = vectors.beside(StepOutcome([-1]), states[:1]).errors
    assert (error.code, error.retryable) == ("missing_input", True)
    vectors = VectorRows(part(one, [1, 2, 3], 1).rows)
    outcome = vectors.beside(StepOutcome([-1]), states * np.inf)
    assert outcome.errors == [RowError(0, "poisoned_request", "the model's vector is not finite", retryable=False)]
    assert outcome.vectors == [b""]
