"""Recorded programs: what torch computes, the same bits in any mix of rows, draws, what cannot be recorded."""

import functools
from array import array
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodes.model_spec import ModelSpec, resolve_model
from nodes.models.decoder import Decoder
from nodes.models.ops import Ops, Value
from nodes.models.registry import model_of
from nodes.worker.ops.native.builds import Library
from nodes.worker.ops.native.program import ProgramUnfit
from nodes.worker.ops.native.runner import columns_of
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.ops.native.weights import pack_weights
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.steps import step as runnable
from nodes.worker.steps.step import RunnableStep
from nodes.worker.weights.part_weights import PartWeights
from nodes.worker.weights.quantization import QuantizedWeights, quantized_names
from tests.nodes.worker.native_builds import WIDE
from tests.nodes.worker.spans import Span, planned
from tests.nodes.worker.torch_running import GREEDY, sequence_of

LENIENT = list(HealthCheck)
LENGTH = 90
PAGES_EACH = 6
NUM_COPIES = 6
TOKENS = np.random.default_rng(3).integers(0, 1000, LENGTH, dtype=np.int32)


class Parallel(Decoder):
    """Both halves of a layer read one norm, which is then nobody's own."""

    def _run_layer(self, ops: Ops[Value], layer: Any, x: Value) -> Value:
        normed = ops.norm(x, layer.attention_norm)
        x = ops.linear(ops.attend(ops.linear(normed, layer.qkv), layer.attention), layer.output, add=x)
        return ops.linear(ops.gated(normed, layer.gated), layer.down, add=x)


ODD = {"parallel": Parallel}
SPECS = {
    **{name: resolve_model(f"random:tiny-{name}") for name in ("qwen2", "qwen3", "llama", "mistral", "qwen2-sliding")},
    # Norms behind what is added, GELU; products of hidden states that no norm has rounded, norms over all heads.
    "gemma3": msgspec.structs.replace(resolve_model("random:tiny-gemma3"), mlp_bias=True),
    "olmo2": msgspec.structs.replace(resolve_model("random:tiny-olmo2"), num_heads=7, num_kv_heads=1, head_dim=10),
    # More experts than a vector has lanes, and widths that end in the middle of one.
    "experts": msgspec.structs.replace(
        resolve_model("random:tiny-qwen3-moe"), intermediate_size=40, num_experts=21, mlp_bias=True
    ),
    "parallel": msgspec.structs.replace(resolve_model("random:tiny-mistral"), name="parallel"),
}


def decoder_of(spec: ModelSpec) -> Decoder:
    return ODD.get(spec.name, model_of(spec).__class__)(spec)


class RandomWeights:
    """Of any decoder, also of those that no registry knows."""

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        self._parameters, self._dtype = model.parameters, dtype

    def tensor(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        seed = sum(map(ord, name))
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        return (parameter.mean + 0.05 * drawn).to(self._dtype)


class Case(NamedTuple):
    """A model, its random weights, and its pages, every bit of which is `byte`."""

    spec: ModelSpec
    model: Decoder
    weights: Any
    pool: PoolView


def case_of(name: str, computed_in: str, byte: bytes) -> Case:
    dtype, _, quantization = computed_in.partition("/")
    spec = SPECS[name].quantized(quantization or "none")
    model, layout = decoder_of(spec), spec.kv_layout(dtype)
    pool = PoolView(bytearray(byte * (1 + NUM_COPIES * PAGES_EACH) * layout.page_bytes), layout)
    return Case(spec, model, RandomWeights(model, TORCH_DTYPES[dtype]), pool)


def program_of(library: Library, name: str, computed_in: str) -> NativeSteps:
    """Over pages full of what others left, and that is NaN."""
    spec, model, weights, pool = case_of(name, computed_in, b"\xff")
    packed = pack_weights(model, PartWeights(model, weights, spec.shard()), library, quantized_names(spec))
    return NativeSteps(spec, library, packed, model, pool)


@functools.cache
def logits_by_torch(name: str, computed_in: str) -> torch.Tensor:
    """Of every position; the same for all builds."""
    spec, model, weights, pool = case_of(name, computed_in, b"\0")
    attention = TorchAttention(pool, spec.num_heads, kinds_of(spec))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("nodes.worker.ops.torch.network.model_of", lambda _: model)
        network = DeviceNetwork(spec, QuantizedWeights(weights, spec), TorchKernels(), torch.device("cpu"))
        pages = np.arange(1, 1 + PAGES_EACH, dtype=np.int32)
        _, arrays = planned(attention, pool.layout.page_size, [Span(0, LENGTH, pages)], TOKENS.tolist())
        return network.forward(arrays.token_ids, arrays.positions, attention, None).float()


class Rows(NamedTuple):
    """Positions `begin .. end-1` of one copy of the sequence."""

    copy: int
    begin: int
    end: int


def run(steps: NativeSteps, *rows: Rows) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of the last position of each."""
    counts = [one.end - one.begin for one in rows]
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    table = [
        (one.begin, count, one.copy * PAGES_EACH, first) for one, count, first in zip(rows, counts, firsts, strict=True)
    ]
    drawn, logits = steps.run(
        Columns(
            np.concatenate([TOKENS[one.begin : one.end] for one in rows]),
            np.array(table, dtype=np.int32).ravel(),
            np.arange(1, 1 + NUM_COPIES * PAGES_EACH, dtype=np.int32),
            np.cumsum(counts, dtype=np.int32) - 1,
        )
    )
    return drawn.tolist(), logits


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_torchs_and_the_same_bits_in_any_mix(library: Library, name: str) -> None:
    if library.name == WIDE and name not in ("llama", "gemma3"):
        pytest.skip("it is slow, and two show its logic")
    rounded = ("float32/int8", "bfloat16/int8") if name in ("qwen2", "gemma3", "experts") else ()
    for dtype in ("float32", "bfloat16", *rounded):
        expected = logits_by_torch(name, dtype)
        with torch.inference_mode():
            library.set_threads(1)
            steps = program_of(library, name, dtype)
            alone = {end: run(steps, Rows(0, 0, end)) for end in range(1, LENGTH + 1, 4 if dtype == "float32" else 9)}
        deviation = float(expected.std())
        for end, (drawn, logits) in alone.items():
            error = float((logits[0] - expected[end - 1]).abs().max())
            assert error <= (1e-4 if "float32" in dtype else 0.1 * deviation), (dtype, end, error, deviation)
            assert drawn == [int(logits[0].argmax())]
        check_mixes(library, steps, {end: logits[0] for end, (_, logits) in alone.items()})


def check_mixes(library: Library, steps: NativeSteps, alone: dict[int, torch.Tensor]) -> None:
    """Copies of one sequence, each cut anywhere, go on together in any mix, with any number of threads."""

    @settings(max_examples=5, deadline=None, suppress_health_check=LENIENT, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        library.set_threads(data.draw(st.integers(1, 3)))
        ends = st.sets(st.sampled_from(sorted(alone)), min_size=1, max_size=6)
        left = {copy: sorted(data.draw(ends)) for copy in range(data.draw(st.integers(1, NUM_COPIES)))}
        done = dict.fromkeys(left, 0)
        while ready := [copy for copy, ends in left.items() if ends]:
            chosen = sorted(data.draw(st.sets(st.sampled_from(ready), min_size=1)))
            rows = [Rows(copy, done[copy], left[copy].pop(0)) for copy in chosen]
            _, logits = run(steps, *rows)
            done |= {one.copy: one.end for one in rows}
            assert all(torch.equal(found, alone[one.end]) for found, one in zip(logits, rows, strict=True)), rows

    check()


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_draws_take_the_lowest_of_equals_and_nothing_that_is_not_finite(
    library: Library, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_weight = RandomWeights.tensor

    def tensor(self: RandomWeights, name: str) -> torch.Tensor:
        weight = drawn_weight(self, name)
        return torch.full_like(weight, 0.25) if name == "lm_head.weight" else weight

    monkeypatch.setattr(RandomWeights, "tensor", tensor)
    steps = program_of(library, name, "float32")
    drawn, logits = run(steps, Rows(0, 0, 3), Rows(1, 0, 5))
    assert drawn == [0, 0]
    assert bool((logits == logits[:, :1]).all())
    steps._weights.embedding[int(TOKENS[1])] = float("inf")
    drawn, logits = run(steps, Rows(0, 0, 1), Rows(1, 0, 2), Rows(2, 0, 1))
    assert drawn == [0, -1, 0]
    assert logits.isfinite().all(1).tolist() == [True, False, True]


def test_a_pool_elsewhere_gives_the_same_and_an_unmapped_one_nothing(library: Library) -> None:
    steps = program_of(library, "qwen3", "bfloat16")
    _, before = run(steps, Rows(0, 0, 40))
    pool = steps._pool
    other = PoolView(bytearray((1 + NUM_COPIES * PAGES_EACH) * pool.layout.page_bytes), pool.layout)
    steps.unmap()
    with pytest.raises(AssertionError, match="unmapped"):
        run(steps, Rows(0, 0, 40))
    steps.remap(other)
    untouched = pool.pages.clone()
    _, after = run(steps, Rows(0, 0, 40))
    assert torch.equal(before, after)
    assert torch.equal(pool.pages.view(torch.int16), untouched.view(torch.int16))


def test_what_cannot_be_recorded_is_said(library: Library) -> None:
    steps, backwards = program_of(library, "qwen2", "bfloat16"), decoder_of(SPECS["qwen2"])
    backwards.layers = list(reversed(backwards.layers))
    with pytest.raises(ProgramUnfit, match=r"layer 3 attends as number 1"):
        NativeSteps(SPECS["qwen2"], library, steps._weights, backwards, steps._pool)


def test_columns_hold_the_rows_that_are_left_of_a_step() -> None:
    rows = runnable.Rows([sequence_of(GREEDY)] * 3, [4, 0, 0], [2, 1, 1], [0, 2, 3], [0, 1, 2]).picked([0, 2])
    columns = columns_of(RunnableStep(1, rows, array("i", [5, 6, 7, 8]), array("i", [1, 2, 3])), [1])
    assert columns.token_ids.tolist() == [5, 6, 8]
    assert columns.spans.tolist() == [4, 2, 0, 0, 0, 1, 2, 2]
    assert columns.sampled.tolist() == [2]
