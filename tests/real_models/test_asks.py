"""What clients ask of a published model's draws: logprobs are those of transformers, answers JSON of their schemas."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.nodes.asks.grammars import schema_of
from tests.nodes.asks.schemas import check, drawn
from tests.real_models.folders import folder_of
from tests.real_models.texts import PROMPTS
from tests.serving.conftest import RunningMesh, start_mesh

pytestmark = [pytest.mark.real_models, pytest.mark.process, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
LAYOUTS = {"apart": (), "mixed": ("--mixed", "1")}
OPTIONS = ("--dtype", "float32", "--context-length", "4096", "--kv-memory", "512MiB")
NUM_SCHEMAS = 200
MAX_TOKENS = 400
AT_ONCE = 8


@pytest.fixture(scope="module", params=LAYOUTS)
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    log = tmp_path_factory.mktemp("mesh") / "up.log"
    with start_mesh(log, "--model", str(folder_of(MODEL)), *OPTIONS, *LAYOUTS[request.param]) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(folder_of(MODEL), dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_and_answers_are_as_likely_as_transformers_says(
    mesh: RunningMesh, model: Any, temperature: float
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder_of(MODEL))
    # By ids: parts of characters share a name.
    fields: Any = {"echo": True, "logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True}
    for prompt in PROMPTS.values():
        ids = tokenizer(prompt)["input_ids"][:400]
        body = {"prompt": ids, "max_tokens": 24, "temperature": temperature, "seed": 7, **fields}
        status, answer = mesh.post("/v1/completions", body)
        assert status == 200, answer
        [choice] = answer["choices"]
        ids += choice["token_ids"]
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
        first, *found = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert found == pytest.approx([float(row[own]) for row, own in zip(rows, ids[1:], strict=True)], abs=1e-4)
        for row, top in zip(rows, choice["logprobs"]["top_logprobs"][1:], strict=True):
            likely = {int(name.removeprefix("token_id:")): logprob for name, logprob in top.items()}
            assert list(likely.values()) == pytest.approx([float(row[one]) for one in likely], abs=1e-4)
            assert sorted(likely.values())[-5:] == pytest.approx(row.topk(5).values.tolist()[::-1], abs=1e-4)


def said(mesh: RunningMesh, number: int, schema: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason: every other one greedy."""
    content = f"Answer with JSON of this schema: {json.dumps(schema)}"
    body = {
        "messages": [{"role": "user", "content": content}], "response_format": schema_of(schema, strict=True),
        "max_tokens": MAX_TOKENS, "temperature": number % 2, "seed": number,
    }  # fmt: skip
    status, answer = mesh.post("/v1/chat/completions", body)
    assert status == 200, (answer, schema)
    [choice] = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("mesh", ["mixed"], indirect=True)
def test_answers_are_json_of_their_schemas(mesh: RunningMesh) -> None:
    schemas = drawn(NUM_SCHEMAS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda numbered: said(mesh, *numbered), enumerate(schemas)))
    ended = [(schema, text) for schema, (text, reason) in zip(schemas, answers, strict=True) if reason == "stop"]
    for schema, text in ended:
        try:
            check(schema, text)
        except (jsonschema.ValidationError, ValueError) as error:
            pytest.fail(f"{text!r} of {schema}: {error}")
    assert len(ended) >= 0.95 * NUM_SCHEMAS
