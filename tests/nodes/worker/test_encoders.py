"""Encoders: the states of transformers, and the same bits whatever is beside a sequence."""

import functools
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from nodes.asks import DrawnModel
from nodes.model_spec import TensorParallelUnfit, resolve_model
from nodes.protocol.steps import Open
from nodes.worker.ops.native.builds import choose_library
from nodes.worker.ops.native.runner import NativeRunner
from nodes.worker.ops.torch.load import HostRunner
from nodes.worker.steps.sequence_table import OpenSequence, SequenceTable
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep, StepOutcome
from tests.nodes.worker.cuda.device_running import device_runner
from tests.nodes.worker.encoder_running import VOCABULARY, encoded, expected_states, save_encoder
from tests.nodes.worker.torch_running import GREEDY, Row, make_runner, step

MAKERS = {"native": make_runner, "torch": partial(make_runner, kernels="torch"), "device": device_runner}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-odd-heads": ("bert", {"hidden_size": 55, "num_attention_heads": 5, "intermediate_size": 33}),
    "bert-one-layer-of-tanh-gelu-and-one-type": (
        "bert", {"num_hidden_layers": 1, "hidden_act": "gelu_new", "type_vocab_size": 1}
    ),
    "bert-wide-heads-of-relu": (
        "bert", {"hidden_size": 160, "num_attention_heads": 2, "hidden_act": "relu", "type_vocab_size": 3}
    ),
    "bert-far-means": ("bert", {"num_hidden_layers": 3, "layer_norm_eps": 1e-5, "hidden_act": "silu"}),
    "roberta": ("roberta", {"max_position_embeddings": 180, "pad_token_id": 5, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {"hidden_size": 36, "num_attention_heads": 3, "type_vocab_size": 1}),
}  # fmt: skip
BERTS = ["random:tiny-bert", "random:tiny-xlm-roberta"]


def drawn_ids(length: int, seed: int = 1) -> list[int]:
    """Of no special tokens: RoBERTa counts no positions of padding."""
    return torch.randint(10, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_states_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, fields = CASES[name]
    reference = save_encoder(tmp_path, kind, **fields)
    inputs = [drawn_ids(length, length) for length in (1, 64, 65, 150, 7)]
    seconds = [0, 30, 0, 149, 6] if fields.get("type_vocab_size", 2) > 1 else [0] * 5
    expected = [expected_states(reference, ids, second) for ids, second in zip(inputs, seconds, strict=True)]
    assert expected[3].std() > 0.3, "states all alike would agree with anything"
    for make in MAKERS.values():
        for found, right in zip(encoded(make(tmp_path), *inputs, seconds=seconds), expected, strict=True):
            assert torch.allclose(found, right, atol=1e-4, rtol=0)
        rough = encoded(make(tmp_path, "bfloat16"), *inputs, seconds=seconds)
        for found, right in zip(rough, expected, strict=True):
            assert not torch.equal(found, right)
            assert torch.nn.functional.cosine_similarity(found, right).min() > 0.995


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    heads=st.integers(1, 5),
    head_dim=st.integers(1, 70),
    inner=st.integers(1, 90),
    types=st.integers(1, 4),
    layers=st.integers(1, 3),
    length=st.integers(1, 140),
    second=st.integers(0, 140),
    activation=st.sampled_from(["gelu", "relu", "gelu_pytorch_tanh"]),
)
def test_any_shape(
    tmp_path_factory: pytest.TempPathFactory, heads: int, head_dim: int, inner: int, types: int, layers: int,
    length: int, second: int, activation: str,
) -> None:  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    reference = save_encoder(
        directory, num_attention_heads=heads, hidden_size=heads * head_dim, intermediate_size=inner,
        type_vocab_size=types, num_hidden_layers=layers, hidden_act=activation, layer_norm_eps=1e-3,
    )  # fmt: skip
    second = second if types > 1 and second < length else 0
    expected = expected_states(reference, drawn_ids(length), second)
    for make in (make_runner, partial(make_runner, kernels="torch")):
        [found] = encoded(make(directory), drawn_ids(length), seconds=[second])
        assert torch.allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [AutoModelForMaskedLM, AutoModelForSequenceClassification])
def test_a_checkpoint_with_a_head(tmp_path: Path, make: Any) -> None:
    reference = save_encoder(tmp_path, make=make)
    [found] = encoded(make_runner(tmp_path), drawn_ids(40))
    assert torch.allclose(found, expected_states(reference, drawn_ids(40)), atol=1e-4, rtol=0)


@functools.cache
def runner_of(model: str, dtype: str, kernels: str) -> HostRunner:
    runner = make_runner(model, dtype, 120, kernels=kernels)
    assert ("/any/" if kernels == "auto" and choose_library().build else "/rows4/") in runner.numerics
    return runner


@functools.cache
def alone(model: str, dtype: str, kernels: str, length: int, second: int) -> torch.Tensor:
    [states] = encoded(runner_of(model, dtype, kernels), drawn_ids(length, length), seconds=[second])
    return states.clone()


def set_threads(runner: HostRunner, count: int) -> None:
    build = choose_library().build
    if isinstance(runner, NativeRunner) and build is not None:
        build.set_threads(count)
    else:
        torch.set_num_threads(count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "kernels"), [*((model, "auto") for model in BERTS), (BERTS[0], "torch")])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_batch_gives_the_bits_of_each_alone(model: str, kernels: str, dtype: str, data: st.DataObject) -> None:
    runner = runner_of(model, dtype, kernels)
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    seconds = [data.draw(st.integers(0, length - 1)) for length in lengths]
    inputs = [drawn_ids(length, length) for length in lengths]
    expected = [alone(model, dtype, kernels, *one) for one in zip(lengths, seconds, strict=True)]
    set_threads(runner, data.draw(st.integers(1, 3)))
    try:
        found = encoded(runner, *inputs, seconds=seconds, first_page=data.draw(st.integers(1, 40)))
    finally:
        set_threads(runner, 1)
    for states, right in zip(found, expected, strict=True):
        assert torch.equal(states, right), (lengths, seconds)


def test_an_input_in_two_parts_or_longer_than_the_context_is_not_computed() -> None:
    for kernels in ("auto", "torch"):
        runner = runner_of(BERTS[0], "float32", kernels)
        with pytest.raises(ValueError, match="has 512 positions, but a sequence has 513"):
            runner.run(step(Row(0, drawn_ids(513), range(1, 34), None)))
        with pytest.raises(ValueError, match="is an encoder, but a sequence is continued at position 16"):
            runner.run(step(Row(0, [5], [1], None), Row(16, [5], [2, 3], None)))


def vector_of(runner: HostRunner, sequence: OpenSequence, ids: list[int], draws: int = 0) -> StepOutcome:
    rows = Rows.of([RunnableRow(0, sequence, 0, len(ids), 0, 0, draws)])
    return runner.run(RunnableStep(1, rows, array("i", ids), array("i", range(1, 11))))


@pytest.mark.parametrize("maker", MAKERS)
def test_vectors_of_a_pair(tmp_path: Path, maker: str) -> None:
    reference, ids = save_encoder(tmp_path), drawn_ids(90)
    runner, states = MAKERS[maker](tmp_path), expected_states(reference, ids, 40)
    for kind, right in (("mean", states.mean(0)), ("cls", states[0]), ("last", states[-1])):
        sequence = OpenSequence(Open(0, 1, len(ids), GREEDY, kind=kind, second_from=40))
        [vector] = vector_of(runner, sequence, ids).vectors
        assert torch.allclose(torch.frombuffer(bytearray(vector), dtype=torch.float32), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "second"), [("bert", 40), ("roberta", 0), ("xlm-roberta", 0)])
def test_logits_of_classes_are_those_of_transformers(tmp_path: Path, kind: str, second: int) -> None:
    fields = {"num_labels": 3} | ({} if second else {"type_vocab_size": 1})
    reference, ids = save_encoder(tmp_path, kind, AutoModelForSequenceClassification, **fields), drawn_ids(90)
    types = (torch.arange(90) >= (second or 90)).long()
    with torch.no_grad():
        right = reference(torch.tensor([ids]), token_type_ids=types[None]).logits[0]
    sequence = OpenSequence(Open(0, 1, len(ids), GREEDY, kind="cls", second_from=second))
    [vector] = vector_of(make_runner(tmp_path), sequence, ids).vectors
    assert torch.allclose(torch.frombuffer(bytearray(vector), dtype=torch.float32), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("maker", MAKERS)
def test_an_encoder_asked_for_tokens_answers_why_there_are_none(maker: str) -> None:
    spec = resolve_model(BERTS[0])
    sequence = SequenceTable(DrawnModel(spec.vocab_size, (), spec))._opened(Open(0, 1, 3, GREEDY))
    outcome = vector_of(MAKERS[maker](BERTS[0]), sequence, [5, 6, 7], draws=1)
    [error] = outcome.errors
    assert (error.code, error.message) == (
        "unsupported_ask",
        "this worker's model has no head, and draws no tokens",
    )


def test_ranks_do_not_share_an_encoder() -> None:
    with pytest.raises(TensorParallelUnfit, match=r"an encoder, which one worker computes\. Use .* size of 1\."):
        resolve_model(BERTS[0]).shard(0, 2)


def test_a_context_shorter_than_what_the_numerics_are_tried_with(tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, max_position_embeddings=20)
    ids = drawn_ids(20)
    [states] = encoded(make_runner(tmp_path), ids)
    assert torch.allclose(states, expected_states(reference, ids), atol=1e-4)
