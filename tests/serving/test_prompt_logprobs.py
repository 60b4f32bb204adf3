"""Prompts read by real meshes with the bundled model: as likely as transformers says, cached, chunked, over a death."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

TINY = Path(__file__).parents[2] / "nodes" / "bundled" / "tiny"

pytestmark = [pytest.mark.process, pytest.mark.clients]

DISAGGREGATED = ("--model", "tiny", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0", "--chunk", "32")
MIXED = ("--model", "tiny", "--mixed", "1", "--chunk", "32")
HARNESS: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
"""What lm-eval sends for its loglikelihood tasks, whose prompts are lists of ids."""
LONG = [300 + (at * 37 + at // 9) % 700 for at in range(150)]
"""Whole words: parts of characters share a name, and of two the prompt's own is shown."""


# A mesh of the other kind gives the same text (`test_same_text.py`), and is asked in `make test-all`.
@pytest.fixture(params=[DISAGGREGATED, pytest.param(MIXED, marks=pytest.mark.slow)], ids=["disaggregated", "mixed"])
def mesh(request: pytest.FixtureRequest, mesh_of: Any) -> Any:
    return mesh_of(*request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def rows_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Logprobs of the whole vocabulary after each token."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)


def ask(mesh: Any, path: str = "/v1/completions", **fields: Any) -> Any:
    status, answer = mesh.post(path, fields)
    assert status == 200, answer
    return answer


def assert_said(logprobs: dict[str, Any], model: Any, ids: list[int]) -> None:
    rows = rows_of(model, ids)
    expected = [row[token_id].item() for row, token_id in zip(rows, ids[1:], strict=False)]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    for row, own, top in zip(rows, logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=False):
        assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert own in top.values()


def test_what_an_evaluation_harness_asks(mesh: Any, model: Any) -> None:
    prompts = [LONG, LONG[:40], LONG[5:31]]
    first = ask(mesh, prompt=prompts, **HARNESS)["choices"]
    for choice, ids in zip(first, prompts, strict=True):
        assert_said(choice["logprobs"], model, ids)
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
    # The second time all of it is cached, and read again all the same, to the last bit.
    assert ask(mesh, prompt=prompts, **HARNESS)["choices"] == first
    plain = ask(mesh, model="tiny", prompt=LONG, max_tokens=1, temperature=0)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128, "what was read is there for others"


def test_a_text_s_offsets_and_a_chat_s_prompt(mesh: Any, model: Any) -> None:
    (choice,) = ask(mesh, **HARNESS | {"prompt": "The sky is blue, and", "max_tokens": 0})["choices"]
    assert choice["text"] == "The sky is blue, and"
    found = choice["logprobs"]
    assert [
        choice["text"][at:][: len(token)] for at, token in zip(found["text_offset"], found["tokens"], strict=True)
    ] == found["tokens"]
    body = {"messages": [{"role": "user", "content": "What color is the sky?"}], "prompt_logprobs": 3, "n": 2}
    answer = ask(mesh, "/v1/chat/completions", model="tiny", max_tokens=2, return_token_ids=True, **body)
    ids = answer["prompt_token_ids"]
    for at, (one, row) in enumerate(zip(answer["prompt_logprobs"][1:], rows_of(model, ids), strict=False), 1):
        own = one[str(ids[at])]
        assert own["logprob"] == pytest.approx(row[ids[at]].item(), abs=1e-4)
        assert sorted((it["logprob"] for it in one.values()), reverse=True)[:3] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def num_computed(mesh: Any) -> float:
    return sum(n for name, n in mesh.metrics().items() if name.startswith("mesh_scheduler_computed_tokens_total"))


def test_a_worker_s_death_changes_nothing_that_was_read(mesh: Any) -> None:
    prompts = [[300 + (at * (37 + number)) % 700 for at in range(900)] for number in range(6)]
    undisturbed = ask(mesh, prompt=prompts, **HARNESS)["choices"]
    worker = [actor for actor in mesh.ps() if actor["role"] == "worker"][-1]
    with ThreadPoolExecutor(1) as pool:
        # On a machine that others keep busy a look at the figures may come too late; then it is read once more.
        for _ in range(10):
            before = num_computed(mesh)
            answer = pool.submit(ask, mesh, prompt=prompts, **HARNESS)
            while not answer.done() and num_computed(mesh) == before:
                pass
            if not answer.done():
                os.kill(worker["pid"], signal.SIGKILL)
                break
        else:
            pytest.fail("it was always over before a look at it")
        assert answer.result(60)["choices"] == undisturbed
    (now,) = (actor for actor in mesh.ps() if actor["actor_id"] == worker["actor_id"])
    assert now["pid"] != worker["pid"], "it was replaced before the answer"
