"""What is read of prompts and draws is transformers' `log_softmax`, of random small models of four architectures."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from nodes.asks import DrawnModel, Logprobs, open_asks
from nodes.asks.logprobs import Likelihoods
from nodes.asks.prompt_logprobs import PromptLogprobs
from nodes.protocol.steps import Open
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.steps.sequence_table import OpenSequence
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.native_builds import build_all
from tests.nodes.worker.test_parity import CASES, save_model
from tests.nodes.worker.test_prompt_reads import Part, assert_said, step_of
from tests.nodes.worker.torch_running import asking, make_runner

KINDS = ("llama-gqa2-tied-linear-biases", "mistral-gqa2-window", "qwen2-gqa7-tied", "qwen3-gqa2-head-dim-apart")
BACKENDS = {"native": make_runner, "torch": lambda model: make_runner(model, kernels="torch"), "device": device_runner}
PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(60)]
NUM_DRAWN, TOP, NAMED = 24, 5, (3, 299)
"""The prompt and what follows are longer than the window of the model that has one."""


def drawn_by(runner: Any, temperature: float) -> tuple[bytes, list[int], list[bytes]]:
    """What was read of the prompt, in two chunks; tokens; what was read beside each."""
    asks = asking(PromptLogprobs(TOP), Logprobs(TOP, [*NAMED]), temperature=temperature, seed=5)
    opened = open_asks(asks.asks, DrawnModel(300))
    one = OpenSequence(Open(0, 1, len(PROMPT), asks, token_ids=PROMPT), *opened)
    ids, extras = [*PROMPT], []
    first = run_isolated(runner, step_of(Part(one, ids, 1, 0, 32)))
    last = run_isolated(runner, step_of(Part(one, ids, 1, 32)))
    of_prompt, outcome = first.prompt_extras[0] + last.prompt_extras[0], last
    while True:
        assert not outcome.failure
        assert not outcome.errors
        ids.append(outcome.token_ids[0])
        extras.append(outcome.extras[0])
        if len(extras) == NUM_DRAWN:
            return of_prompt, ids[len(PROMPT) :], extras
        outcome = run_isolated(runner, step_of(Part(one, ids, 1, len(ids) - 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    build_all()
    name, options = CASES[kind]
    model = save_model(tmp_path / "model", name, **options)
    for backend, make in BACKENDS.items():
        of_prompt, drawn, extras = drawn_by(make(tmp_path / "model"), 0.0 if backend == "torch" else 0.9)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + drawn])).logits[0]
        assert_said(of_prompt, TOP, logits[: len(PROMPT)], PROMPT)
        rows = torch.log_softmax(logits[len(PROMPT) - 1 : -1].double(), -1)
        assert rows.std() > 0.3, "tokens all alike would agree with anything"
        layout = Likelihoods(open_asks(asking(Logprobs(TOP, [*NAMED])).asks, DrawnModel(300)).reads)
        for row, token_id, extra in zip(rows, drawn, extras, strict=True):
            logprob, rank, _ = layout.read_ranked(extra)
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert abs(rank - 1 - int((row > row[token_id]).sum())) <= int(((row - row[token_id]).abs() < 1e-4).sum())
            pairs = struct.unpack("<" + "if" * TOP + f"{len(NAMED)}f", extra[8:])
            assert pairs[1 : 2 * TOP : 2] == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)
            assert pairs[1 : 2 * TOP : 2] == pytest.approx([float(row[at]) for at in pairs[: 2 * TOP : 2]], abs=1e-4)
            assert pairs[2 * TOP :] == pytest.approx([float(row[at]) for at in NAMED], abs=1e-4)
