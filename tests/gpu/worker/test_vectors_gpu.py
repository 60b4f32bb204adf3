"""Vectors on a GPU: what transformers computes in float32, in any chunks, beside rows that draw; encoders too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from nodes.models.pooling import POOLS, Pooling
from nodes.worker.executor.isolation import run_isolated
from tests.gpu.worker.gpu_running import BACKENDS, GPU, build
from tests.nodes.worker.test_parity import CASES, save_model
from tests.nodes.worker.test_vectors import OTHER, PROMPT, joined, numbers, part, pooled_by
from tests.nodes.worker.torch_running import GREEDY, Row, step

pytestmark = GPU


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> tuple[Path, Any, Any]:
    """A small Qwen3, and the last hidden states of `PROMPT` by transformers in float32 and in bfloat16."""
    directory = tmp_path_factory.mktemp("model")
    kind, options = CASES["qwen3-gqa2-head-dim-apart"]
    save_model(directory, kind, **(options | {"head_dim": 64}))
    ids, found = torch.tensor([PROMPT]).cuda(), []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModel.from_pretrained(directory, dtype=dtype).cuda()
        with torch.inference_mode():
            found.append(model(ids).last_hidden_state[0].float().cpu().numpy())
    return directory, *found


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("attention", BACKENDS)
def test_vectors_are_as_near_to_float32_as_transformers(attention: str, pool: str, checkpoint: Any) -> None:
    directory, exact, theirs = checkpoint
    runner = build(directory, attention, pooling=Pooling(pool=pool)).runner

    def pooled(states: Any) -> Any:
        return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pool]

    whole = run_isolated(runner, part(pooled_by(pool), PROMPT, 1))
    assert (whole.errors, list(whole.token_ids)) == ([], [-1])
    allowed = np.abs(pooled(theirs) - pooled(exact)).max()
    assert np.abs(numbers(whole.vectors[0]) - pooled(exact)).max() < 3 * allowed + 1e-3
    # In chunks, beside a row that draws and another vector.
    one = pooled_by(pool)
    run_isolated(runner, part(one, PROMPT, 20, 0, 16))
    drawing = step(Row(0, [5, 6, 7], [90], GREEDY))
    beside = run_isolated(runner, joined(drawing, part(one, PROMPT, 20, 16, 48), part(pooled_by("mean"), OTHER, 40)))
    assert beside.token_ids[0] >= 0
    last = run_isolated(runner, part(one, PROMPT, 20, 48))
    np.testing.assert_allclose(numbers(last.vectors[0]), numbers(whole.vectors[0]), atol=4 * allowed + 1e-3)


def test_an_encoder_gives_the_vectors_of_the_cpu(tmp_path: Path) -> None:
    built = build("random:tiny-bert", "auto", dtype="float32", pooling=Pooling(pool="mean"))
    host = build("random:tiny-bert", "torch", dtype="float32", pooling=Pooling(pool="mean"), device="cpu")
    found, expected = (run_isolated(one.runner, part(pooled_by("mean"), PROMPT, 1)).vectors[0] for one in (built, host))
    np.testing.assert_allclose(numbers(found), numbers(expected), atol=2e-3, rtol=2e-3)
