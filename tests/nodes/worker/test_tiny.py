"""The bundled model: the runner writes what transformers writes, and a second worker goes on where one stopped."""

from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.model_spec import resolve_model
from nodes.model_spec.vocabulary import load_tokenizer
from nodes.request import Sampling
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.ops.torch.load import HostRunner
from nodes.worker.steps.step import POISONED, RunnableStep, StepOutcome
from tests.nodes.worker.torch_running import Row, asking, make_runner, step, with_rows

SPEC = resolve_model("tiny")
PROMPTS = [
    "What is 12 plus 30?",
    "Give me JSON with the name Ada and the age 36.",
    "What is the capital of France?",
    "Count from 3 to 9.",
    "Spell the word river backwards.",
]
NUM_TOKENS = 60


def encode(prompt: str) -> list[int]:
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return load_tokenizer(SPEC).encode(text, add_special_tokens=False).ids


def write(runner: HostRunner, prompt: list[int], output: list[int], count: int, sampling: Sampling) -> list[int]:
    """Go on from `output` up to `count` tokens or the end: one prefill of everything so far, then decode."""
    output, pages = list(output), list(range(1, 12))
    start, ids = 0, prompt + output
    while len(output) < count and not (output and output[-1] in SPEC.eos_token_ids):
        planned = step(Row(start, ids, pages, sampling, len(prompt)))
        if sampling.looks_back:
            (row,) = planned.rows
            planned = with_rows(planned, [row._replace(history=array("i", prompt + output))])
        output.append(runner.run(planned).token_ids[0])
        start, ids = start + len(ids), output[-1:]
    return output


def penalised(penalty: float) -> Sampling:
    return asking(*([RepetitionPenalty(penalty)] if penalty != 1 else []), temperature=0.0)


@pytest.fixture(scope="module")
def runner() -> HostRunner:
    return make_runner("tiny")


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_text_is_that_of_transformers(runner: HostRunner, penalty: float) -> None:
    reference = AutoModelForCausalLM.from_pretrained(SPEC.path, dtype=torch.float32)
    tokenizer = load_tokenizer(SPEC)
    texts = set()
    for prompt in map(encode, PROMPTS):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=penalty,
        )
        written = write(
            runner,
            prompt,
            [],
            NUM_TOKENS,
            penalised(penalty),
        )
        assert written == expected[0, len(prompt) :].tolist()
        texts.add(tokenizer.decode(written))
    assert len(texts) == len(PROMPTS)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(seed=5), Sampling(seed=6, top_p=0.9)], ids=repr
)
def test_text_goes_on_the_same_after_any_token(runner: HostRunner, sampling: Sampling) -> None:
    prompt = encode(PROMPTS[1])
    undisturbed = write(runner, prompt, [], 24, sampling)
    other = make_runner("tiny")
    for position in range(len(undisturbed)):
        assert write(other, prompt, undisturbed[:position], 24, sampling) == undisturbed


def test_a_prompt_that_cannot_be_computed_leaves_its_worker_alive(
    runner: HostRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page 0 takes the token by which a device shows that it still computes."""
    compute = runner.run

    def picky(planned: RunnableStep) -> StepOutcome:
        if len(planned.token_ids) > 1:
            raise RuntimeError("of two tokens")
        return compute(planned)

    monkeypatch.setattr(runner, "run", picky)
    outcome = run_isolated(runner, step(Row(0, [5, 6], [1], prompt=2)))
    assert [error.code for error in outcome.errors] == [POISONED]
    assert "of two tokens" in outcome.failure
