"""A group of ranks computes what one worker computes: logits, pages, and the same tokens at every rank."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore.transfer.plan import held_heads
from nodes.model_spec import ModelSpec, resolve_model
from nodes.models.registry import parameters
from nodes.models.tensor_parallel import Part, fitting_tp_sizes
from nodes.worker.cuda import nccl_collectives
from nodes.worker.cuda.buckets import Buckets
from nodes.worker.cuda.graphs import DecodeGraphs
from nodes.worker.cuda.nccl_collectives import NcclCollectivesMaker
from nodes.worker.errors import CollectiveFailed, WeightsUnfit
from nodes.worker.executor.isolation import run_isolated
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.device_memory import weight_bytes
from nodes.worker.weights.loader import SafetensorsWeights
from nodes.worker.weights.random_weights import RandomWeights
from tests.nodes.worker.cuda.device_running import Repeater
from tests.nodes.worker.cuda.rank_running import IDS, MODEL, PAGES, SAMPLED, FakeNccl, decoded, in_ranks, rank_runner
from tests.nodes.worker.test_parity import LLAMA3, PLAIN, save_model
from tests.nodes.worker.torch_running import GREEDY, Row, logits_by_chunks, step, with_rows

SIZES = [16, 48, 33, 1, 22, 29, 1]
SOON_S = 20.0
CPU = torch.device("cpu")
# Heads, and with eight ranks the vocabulary (300), do not go up evenly everywhere.
KINDS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "llama-biases-untied": (
        "llama",
        {"heads": (8, 2), "hidden": 64, "rope": LLAMA3, "attention_bias": True, "mlp_bias": True, "tied": False},
        (2, 4, 8),
    ),
    "qwen2-tied": ("qwen2", {"heads": (4, 4), "hidden": 64, "rope": PLAIN}, (2, 4)),
    "mistral-window": ("mistral", {"heads": (4, 2), "hidden": 64, "rope": PLAIN, "sliding_window": 37}, (2, 4)),
    "qwen3-one-kv-head": ("qwen3", {"heads": (4, 1), "hidden": 64, "head_dim": 32, "rope": PLAIN}, (2, 4)),
}
CASES = [(name, size) for name, (_, _, sizes) in KINDS.items() for size in sizes]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Models on disk, and what transformers computes with them."""
    found = {}
    for name, (kind, options, _) in KINDS.items():
        path = tmp_path_factory.mktemp(name) / "model"
        reference = save_model(path, kind, **options)
        with torch.no_grad():
            found[name] = path, reference(torch.tensor([IDS])).logits[0][torch.tensor(SIZES).cumsum(0) - 1]
    return found


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_agree_with_one_rank_and_are_the_same_at_all(saved: Any, name: str, size: int) -> None:
    """Chunks and single rows over pages, weights from safetensors of which each rank reads its part."""
    path, reference = saved[name]
    alone = logits_by_chunks(rank_runner(path, None), IDS, PAGES, SIZES)
    assert alone.std() > 0.3, "logits all alike would agree with anything"
    found = in_ranks(size, lambda group: logits_by_chunks(rank_runner(path, group), IDS, PAGES, SIZES))
    assert torch.allclose(found[0], alone, atol=1e-5, rtol=0)
    assert torch.allclose(found[0], reference, atol=1e-4, rtol=0)
    assert all(torch.equal(other, found[0]) for other in found[1:]), "ranks would draw different tokens"


class SlicesOnly:
    """A safetensors file of which no tensor can be read whole."""

    def __init__(self, file: Any) -> None:
        self.get_slice = file.get_slice


def test_no_more_of_a_file_is_read_than_the_part(saved: Any) -> None:
    spec = resolve_model(str(saved["llama-biases-untied"][0]))
    source = SafetensorsWeights(spec, torch.float32)
    cuts = {name: spec.shard(0, 2).part_of(parameter.cut) for name, parameter in parameters(spec).items()}
    source._files = {name: SlicesOnly(file) if cuts[name] else file for name, file in source._files.items()}
    assert sum(isinstance(file, SlicesOnly) for file in source._files.values()) == 2 + 3 * (7 + 3 + 2)
    network = in_ranks(2, lambda group: DeviceNetwork(spec, source, TorchKernels(), CPU, collectives=group))[0]
    assert network.weight_bytes == weight_bytes(spec, "float32", 2)
    source._shapes = source._shapes | {"lm_head.weight": (299, 64)}
    with pytest.raises(WeightsUnfit, match=r"'lm_head.weight' in .* has shape \[300, 64\], config.json asks for"):
        in_ranks(2, lambda group: DeviceNetwork(spec, source, TorchKernels(), CPU, collectives=group))


SPECS = st.builds(
    lambda architecture, kv, group, inner, vocab, biases, tied: msgspec.structs.replace(
        resolve_model(MODEL), architecture=architecture, num_heads=kv * group, num_kv_heads=kv, head_dim=8,
        hidden_size=24, intermediate_size=inner, vocab_size=vocab, num_layers=2, context_length=64,
        qkv_bias=biases, o_bias=biases, mlp_bias=biases, tie_word_embeddings=tied,
    ),
    st.sampled_from(["llama", "qwen2", "qwen3"]), st.integers(1, 4), st.integers(1, 4), st.sampled_from([12, 24, 60]),
    st.integers(1, 70), st.booleans(), st.booleans(),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(SPECS, st.integers(2, 6), st.booleans())
def test_models_of_any_shape(spec: ModelSpec, size: int, deterministic: bool) -> None:
    """With vocabularies smaller than the group, biases everywhere, heads dealt out and repeated."""
    assume(size in fitting_tp_sizes(spec))
    ids = [token % spec.vocab_size for token in IDS[:30]]

    def logits(group: Collectives | None) -> torch.Tensor:
        return logits_by_chunks(rank_runner(spec, group, deterministic=deterministic), ids, PAGES, [17, 12, 1])

    alone = logits(None)
    found = in_ranks(size, logits)
    assert torch.allclose(found[0], alone, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize(("name", "size"), CASES)
def test_each_rank_keeps_its_heads_of_the_pages(saved: Any, name: str, size: int) -> None:
    path, _ = saved[name]
    spec = resolve_model(str(path))

    def pages(group: Collectives | None) -> torch.Tensor:
        runner = rank_runner(path, group)
        runner.run(step(Row(0, IDS[:100], PAGES[:7], GREEDY, prompt=100)))
        return runner._attention.pool.pages[PAGES[0] : PAGES[6]].clone()

    whole = pages(None)
    for rank, part in enumerate(in_ranks(size, pages)):
        heads = held_heads(rank, size, spec.num_kv_heads)
        assert torch.allclose(part, whole[..., heads.start : heads.stop, :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_ranks_draw_the_same_tokens(dtype: str, deterministic: bool) -> None:
    alone = decoded(rank_runner(MODEL, None, dtype, deterministic=deterministic))
    found = in_ranks(2, lambda group: decoded(rank_runner(MODEL, group, dtype, deterministic=deterministic)))
    assert found[0] == found[1]
    again = in_ranks(2, lambda group: decoded(rank_runner(MODEL, group, dtype, deterministic=deterministic)))
    assert again == found
    assert len({token for pair in found[0] for token in pair}) > 8
    if dtype == "float32":
        assert found[0] == alone


def test_sums_in_the_order_of_ranks_do_not_depend_on_the_number_of_rows() -> None:
    def last(group: Collectives) -> torch.Tensor:
        runner = rank_runner(MODEL, group, deterministic=True)
        return torch.stack([logits_by_chunks(runner, IDS, PAGES, sizes)[-1] for sizes in ([150], [149, 1], [64, 86])])

    for found in in_ranks(2, last):
        assert torch.allclose(found[1], found[0], atol=1e-5, rtol=0)
    with_group = in_ranks(2, lambda group: rank_runner(MODEL, group, deterministic=True).numerics)
    assert with_group[0] == with_group[1]
    assert "/tp2/" in with_group[0]


def test_each_rank_holds_its_share_of_the_weights() -> None:
    alone = rank_runner(MODEL, None)._network
    parts = in_ranks(2, lambda group: rank_runner(MODEL, group)._network.weight_bytes)
    spec = resolve_model(MODEL)
    norms = 4 * (spec.hidden_size * (2 * spec.num_layers + 1) + 2 * spec.num_layers * spec.head_dim)
    replicated = norms + 4 * spec.context_length * spec.head_dim
    assert parts == [replicated + (alone.weight_bytes - replicated) // 2] * 2


@pytest.mark.parametrize("shape", ["llama-biases-untied", MODEL])
def test_parts_of_weights_are_those_of_the_whole(saved: Any, shape: str) -> None:
    spec = resolve_model(str(saved[shape][0]) if shape in saved else shape)
    source = (RandomWeights if spec.source == "random" else SafetensorsWeights)(spec, torch.float32)
    for size in (1, 2, 3):
        for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
            whole, dim = source.tensor(name), int("down" in name)
            each = -(-whole.shape[dim] // size)
            if dim and whole.shape[dim] % size:
                continue
            parts = [source.part(name, Part(dim, rank * each, (rank + 1) * each)) for rank in range(size)]
            together = torch.cat(parts, dim)
            assert torch.equal(together[: whole.shape[0]], whole)
            assert not together[whole.shape[0] :].any()
    beyond = source.part("model.embed_tokens.weight", Part(0, spec.vocab_size + 8, spec.vocab_size + 10))
    assert beyond.shape == (2, spec.hidden_size)
    assert not beyond.any()


def test_captured_steps_draw_what_eager_ones_draw() -> None:
    """Graphs are captured by all ranks in the same order, and replayed with the collectives in them."""

    def replayed(group: Collectives) -> tuple[list[list[int]], int]:
        eager = rank_runner(MODEL, group)
        recorder = Repeater()
        with torch.inference_mode():
            graphs = DecodeGraphs(eager._network, eager._attention, Buckets([1, 2]), recorder, 400)
        runner = DeviceRunner(eager._network, eager._attention, 16, 256, "test", graphs)
        return decoded(runner), recorder.num_replays

    expected = decoded(rank_runner(MODEL, None))
    assert in_ranks(2, replayed) == [(expected, 12)] * 2


def test_steps_launched_ahead_take_their_input_from_where_each_rank_left_it() -> None:
    def ahead(group: Collectives) -> list[list[int]]:
        runner = rank_runner(MODEL, group)
        launched = runner.launch(step(Row(0, IDS[:20], PAGES[:3], SAMPLED, prompt=20)))
        output = []
        for number in range(8):
            plan = step(Row(20 + number, [-1], PAGES[:3], SAMPLED, prompt=20))
            following = runner.launch(with_rows(plan, [plan.rows[0]._replace(from_row=0)]))
            output.append(list(runner.finish(launched).token_ids))
            launched = following
        return output

    runner = rank_runner(MODEL, None)
    expected = [list(runner.run(step(Row(0, IDS[:20], PAGES[:3], SAMPLED, prompt=20))).token_ids)]
    for number in range(7):
        expected.append(list(runner.run(step(Row(20 + number, expected[-1], PAGES[:3], SAMPLED, prompt=20))).token_ids))
    assert in_ranks(2, ahead) == [expected] * 2


def test_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through the calls that a device would get; bfloat16, whose number CuPy has no name for."""
    library = FakeNccl()
    monkeypatch.setattr(nccl_collectives, "_nccl", lambda: library)
    monkeypatch.setattr(nccl_collectives, "_set_device", lambda device: None)
    monkeypatch.setattr(nccl_collectives, "_stream", lambda device: 77)
    expected = in_ranks(2, lambda group: decoded(rank_runner(MODEL, group, "bfloat16"), 3))
    found = in_ranks(
        2, lambda group: decoded(rank_runner(MODEL, group, "bfloat16"), 3), NcclCollectivesMaker(10.0), "cuda:0"
    )
    assert found == expected
    assert library.calls[0] == library.calls[1]
    spec = resolve_model(MODEL)
    sums = ["allReduce"] * (1 + 2 * spec.num_layers)
    # The first step draws nothing, the second does.
    assert [name for name, _, _ in library.calls[0]][: 2 * len(sums) + 1] == [*sums, *sums, "allGather"]
    assert {stream for _, _, stream in library.calls[0]} == {77}


def test_a_result_that_an_abort_cut_short_is_not_told() -> None:
    """On a device an abort ends what hangs, and the event behind the step comes as if all were well."""

    def work(group: Collectives) -> str:
        runner = rank_runner(MODEL, group)
        launched = runner.launch(step(Row(0, IDS[:20], PAGES[:2], GREEDY, prompt=20)))
        both.wait(SOON_S)
        group.abort()
        with pytest.raises(CollectiveFailed) as caught:
            runner.finish(launched)
        return str(caught.value)

    both = threading.Barrier(2)
    assert in_ranks(2, work) == ["the group was aborted"] * 2


def test_what_fails_at_one_rank_ends_the_step_at_all_and_is_no_rows_fault() -> None:
    def work(group: Collectives) -> str:
        runner = rank_runner(MODEL, group)
        plan = step(Row(0, IDS[:20], PAGES[:2], GREEDY, prompt=20), Row(0, IDS[:5], PAGES[2:3], GREEDY, prompt=5))
        assert len(run_isolated(runner, plan).token_ids) == 2
        if group.rank == 1:
            runner._attention = None  # so that planning raises, before the others are met
        try:
            run_isolated(runner, plan)
        except CollectiveFailed as error:
            return str(error)
        return "nothing"

    first, second = in_ranks(2, work)
    assert first == "rank 1 is gone", first
    assert "step 1 failed at rank 1: AttributeError" in second
