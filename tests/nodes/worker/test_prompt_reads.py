"""Prompts that are read: every backend says of each prompt token what its own logits say, in any chunks and tiles."""

import struct
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nodes.asks import DrawnModel, open_asks
from nodes.asks.prompt_logprobs import PromptLogprobs
from nodes.model_spec import resolve_model
from nodes.protocol import RowError
from nodes.protocol.steps import Open
from nodes.worker.draw.prompt import PromptReads
from nodes.worker.draw.reads import echoed
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.steps.columns import NO_ROWS
from nodes.worker.steps.sequence_table import OpenSequence, SequenceTable
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep, StepOutcome
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.cuda.rank_running import in_ranks
from tests.nodes.worker.native_builds import build_all
from tests.nodes.worker.test_native_ranks import rank_of
from tests.nodes.worker.torch_running import asking, make_runner

MODEL = "random:tiny-qwen3"
PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(53)]
OTHER = [(11 * at + 5) % 250 for at in range(21)]
MAKERS = [make_runner, lambda model: make_runner(model, kernels="torch"), device_runner]


def reading(prompt: Sequence[int], top: int = 2) -> OpenSequence:
    sampling = asking(PromptLogprobs(top), temperature=0.0)
    opened = open_asks(sampling.asks, DrawnModel(1 << 16))
    return OpenSequence(Open(0, 1, len(prompt), sampling, token_ids=list(prompt)), *opened)


class Part:
    """Tokens `start .. end - 1` of a prompt on its own pages, in a step."""

    def __init__(self, one: OpenSequence, ids: Sequence[int], first_page: int, start: int = 0, end: int = 0) -> None:
        self.one, self.ids, self.start, self.end = one, ids, start, end or len(ids)
        self.pages = range(first_page, first_page + -(-self.end // 16))


def step_of(*parts: Part) -> RunnableStep:
    tokens, pages, rows = array("i"), array("i"), list[RunnableRow]()
    for number, part in enumerate(parts):
        draws = int(part.end >= len(part.ids))
        count = part.end - part.start
        rows.append(RunnableRow(number, part.one, part.start, count, len(tokens), len(pages), draws))
        tokens.extend(part.ids[part.start : part.end])
        pages.extend(part.pages)
    return RunnableStep(1, Rows.of(rows), tokens, pages)


def payloads(data: bytes, top: int) -> list[tuple[float, int, list[tuple[int, float]]]]:
    layout = struct.Struct("<fi" + "if" * top)
    found = [layout.unpack_from(data, at) for at in range(0, len(data), layout.size)]
    return [(one[0], one[1], list(zip(one[2::2], one[3::2], strict=True))) for one in found]


def assert_said(data: bytes, top: int, logits: torch.Tensor, prompt: Sequence[int]) -> None:
    """`logits`: of every position of the prompt."""
    logs = torch.log_softmax(logits.double(), -1)
    found = payloads(data, top)
    assert len(found) == len(prompt) - 1
    for before, (logprob, rank, likely) in enumerate(found):
        own = logs[before, prompt[before + 1]]
        assert logprob == pytest.approx(float(own), abs=1e-4)
        assert abs(rank - 1 - int((logs[before] > own).sum())) <= int(((logs[before] - own).abs() < 1e-5).sum())
        best = logs[before].topk(top)
        assert [value for _, value in likely] == pytest.approx(best.values.tolist(), abs=1e-4)


def reference(runner: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Logits after each token, by a row that ends there."""
    plain = asking(temperature=0.0)
    one = OpenSequence(Open(0, 1, 1, plain))
    return torch.stack(
        [runner.logits(step_of(Part(one, prompt[:end], 100)))[0].float() for end in range(1, len(prompt) + 1)]
    )


@pytest.mark.parametrize("make", MAKERS)
def test_a_prompt_in_chunks_beside_others_is_read_as_its_logits_say(make: Any) -> None:
    build_all()
    runner = make(MODEL)
    expected, of_other = reference(runner, PROMPT), reference(runner, OTHER)
    one, other, plain = reading(PROMPT), reading(OTHER, 20), OpenSequence(Open(0, 1, 1, asking(temperature=0.0)))
    first = run_isolated(runner, step_of(Part(plain, [5, 6], 90), Part(one, PROMPT, 1, 0, 32), Part(other, OTHER, 20)))
    assert [len(extra) for extra in first.prompt_extras] == [0, 32 * 24, 20 * 168]
    assert first.token_ids[1] == -1
    assert first.token_ids[2] == int(of_other[-1].argmax())
    decoding = Part(plain, [5, 6, 7], 90, 2)
    last = run_isolated(runner, step_of(Part(one, PROMPT, 1, 32), decoding))
    assert not first.failure
    assert not last.failure
    assert last.token_ids[0] == int(expected[-1].argmax())
    assert_said(first.prompt_extras[1] + last.prompt_extras[0], 2, expected, PROMPT)
    assert_said(first.prompt_extras[2], 20, of_other, OTHER)
    # The same bits in one chunk: what is known of a prompt does not depend on how it was cut.
    whole = run_isolated(runner, step_of(Part(one, PROMPT, 40)))
    assert whole.prompt_extras == [first.prompt_extras[1] + last.prompt_extras[0]]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_every_rank_reads_the_same(kernels: str) -> None:
    build_all()

    def of_rank(group: Collectives) -> StepOutcome:
        return run_isolated(rank_of(MODEL, group, kernels=kernels), step_of(Part(reading(PROMPT), PROMPT, 1)))

    zero, one = in_ranks(2, of_rank)
    assert zero == one
    assert not zero.failure
    assert_said(zero.prompt_extras[0], 2, reference(make_runner(MODEL, kernels=kernels), PROMPT), PROMPT)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_bundled_models_prompts_are_as_likely_as_transformers_says(kernels: str) -> None:
    build_all()
    spec = resolve_model("tiny")
    prompt = [(at * 37) % (spec.vocab_size - 8) for at in range(40)]
    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    outcome = run_isolated(make_runner("tiny", kernels=kernels), step_of(Part(reading(prompt, 5), prompt, 1)))
    assert_said(outcome.prompt_extras[0], 5, expected, prompt)


def test_only_positions_before_a_prompt_token_are_read() -> None:
    one = reading([1, 2, 3, 4])
    parts = [Part(one, [1, 2, 3, 4], 1, 3), Part(one, [1, 2, 3, 4], 1, 0, 2), Part(one, [1, 2, 3, 4, 5, 6], 1, 2)]
    found = PromptReads(step_of(*parts).rows)
    assert found.num == 3
    assert found.places([0, 10, 20]).tolist() == [10, 11, 20]


def test_rows_that_fail_read_nothing() -> None:
    reads = PromptReads(step_of(Part(reading([1, 2, 3]), [1, 2, 3], 1), Part(reading([4, 5]), [4, 5], 2)).rows)
    reads.take(torch.randn(3, 2048), 0)
    outcome = StepOutcome([-1, 7], [RowError(0, "poisoned_request", "")])
    assert [len(extra) for extra in reads.beside(outcome, reads.lines()).prompt_extras] == [0, 24]


def test_a_prompt_to_be_read_is_given_whole() -> None:
    table = SequenceTable(DrawnModel(300))
    sampling = asking(PromptLogprobs(0))
    assert isinstance(table.apply([Open(0, 1, 3, sampling, token_ids=[5, 6])], NO_ROWS), str)
    assert table.apply([Open(0, 1, 3, sampling, token_ids=[5, 6, 7])], NO_ROWS) == []


def test_what_echo_says_shows_a_wrong_place_or_token() -> None:
    reads = reading([1, 2], 3).prompt_reads
    assert reads is not None
    assert len({echoed(at, before, 9, reads) for at in (1, 2) for before in (5, 7)}) == 4
    assert payloads(echoed(4096, 0, 9, reads), 3)[0] == (-1.0, 1, [(9, -1.0), (0, -9999.0), (1, -9999.0)])
