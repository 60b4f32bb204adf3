"""Weights from files and from seeds, and what a worker says when it cannot start."""

import asyncio
import weakref
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from mesh.calls.persistent_ask import PersistentAsk
from nodes.model_spec import ModelSpec, ModelUnsupported, resolve_model
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.registry import model_of
from nodes.models.tensor_parallel import Part
from nodes.sizes import size_text
from nodes.worker import numerics
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import BackendMissing, WeightsUnfit, WorkerError
from nodes.worker.executor.echo import EchoRunner
from nodes.worker.executor.engine import Engine
from nodes.worker.executor.runners import make_runner as make_any_runner
from nodes.worker.ops.native import load
from nodes.worker.ops.torch import load as host_load
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.load import load_host_runner
from nodes.worker.ops.torch.products import PackedProduct, PlainProduct, make_product
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import PoolView
from nodes.worker.steps.step import Runner
from nodes.worker.weights.load_progress import LoadProgress, current_load
from nodes.worker.weights.loader import SafetensorsWeights
from nodes.worker.weights.opening import open_weights
from nodes.worker.weights.random_weights import RandomWeights
from tests.nodes.worker.cuda.rank_running import in_ranks, rank_runner
from tests.nodes.worker.torch_running import Row, make_runner, step

SPEC = resolve_model("random:tiny-llama")


def saved(directory: Path, **changed: torch.Tensor) -> ModelSpec:
    weights = RandomWeights(SPEC, torch.float32)
    tensors = {name: weights.tensor(name) for name in expected_shapes(SPEC)} | changed
    save_file(tensors, directory / "model.safetensors")
    return msgspec.structs.replace(SPEC, weight_files=(str(directory / "model.safetensors"),))


def test_files_give_the_tensors_that_were_saved(tmp_path: Path) -> None:
    source = SafetensorsWeights(saved(tmp_path), torch.bfloat16)
    tensor = source.tensor("model.layers.1.mlp.up_proj.weight")
    expected = RandomWeights(SPEC, torch.float32).tensor("model.layers.1.mlp.up_proj.weight")
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, expected.bfloat16())


def test_unfit_files_are_typed_errors(tmp_path: Path) -> None:
    spec = saved(tmp_path, **{"model.norm.weight": torch.ones(3)})
    source = SafetensorsWeights(spec, torch.float32)
    with pytest.raises(WeightsUnfit, match=r"'model.norm.weight'.* shape \[3\].*\[112\]"):
        source.tensor("model.norm.weight")
    with pytest.raises(WeightsUnfit, match="no tensor 'other'"):
        source.tensor("other")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsUnfit, match="Download the model again") as caught:
        SafetensorsWeights(spec, torch.float32)
    assert isinstance(caught.value, WorkerError)
    assert not caught.value.retryable
    path.unlink()
    with pytest.raises(WeightsUnfit, match=r"model\.safetensors"):
        SafetensorsWeights(spec, torch.float32)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_named(tmp_path: Path, number: float) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    damaged = torch.full((112, 288), 3e38)
    large = SafetensorsWeights(saved(tmp_path, **{name: damaged.clone()}), torch.float32)
    assert torch.equal(large.tensor(name), damaged), "large numbers, whose sum overflows, are numbers"
    damaged[7, 9] = number
    source = SafetensorsWeights(saved(tmp_path, **{name: damaged}), torch.bfloat16)
    with pytest.raises(WeightsUnfit, match=f"'{name}' .* not finite"):
        source.tensor(name)
    with pytest.raises(WeightsUnfit, match="not finite"):
        source.part(name, Part(1, 0, 144))
    source.part(name, Part(1, 144, 288))


def test_a_tensor_that_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    class Torn:
        def get_tensor(self, name: str) -> torch.Tensor:
            raise SafetensorError(f"{name} ends early")

    source = SafetensorsWeights(saved(tmp_path), torch.float32)
    source._files["model.norm.weight"] = Torn()
    with pytest.raises(WeightsUnfit, match="ends early"):
        source.tensor("model.norm.weight")


def test_without_onednn_plain_products_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make_runner("random:tiny-qwen3", kernels="torch")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = make_runner("random:tiny-qwen3", kernels="torch")
    assert "/plain/" in plain.numerics
    plan = step(Row(0, list(range(40)), [1, 2, 3]))
    assert torch.allclose(plain.logits(plan)[0], packed.logits(plan)[0], atol=1e-4)


def test_random_weights_are_seeded_and_rows_differ() -> None:
    spec = msgspec.structs.replace(SPEC, vocab_size=20_000)
    first, again = (RandomWeights(spec, torch.float32).tensor("lm_head.weight") for _ in range(2))
    other = RandomWeights(msgspec.structs.replace(spec, seed=1), torch.float32).tensor("lm_head.weight")
    assert first.shape == (20_000, 112)
    assert first.numel() > 2 * 1_048_573
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.unique(first, dim=0).shape[0] == 20_000
    assert first.std() == pytest.approx(0.02, rel=0.01)
    assert abs(RandomWeights(spec, torch.float32).tensor("model.norm.weight").mean() - 1) < 0.01


def test_tiles_give_every_row_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(50, 40, generator=generator), torch.randn(50, generator=generator)
    x = torch.randn(37, 40, generator=generator)
    tiled, plain, packed = PlainProduct(weight, bias, 16), PlainProduct(weight, bias), make_product(weight, bias)
    assert isinstance(packed, PackedProduct)
    assert isinstance(make_product(weight, bias, 16), PlainProduct)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    for product in (tiled, plain, packed):
        assert torch.allclose(product(x), expected, atol=1e-4)
    for begin, end in ((0, 1), (3, 8), (20, 37)):
        assert torch.equal(tiled(x[begin:end]), tiled(x)[begin:end])


def test_where_row_counts_matter_linears_run_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose products depend on the number of rows, as float32 does for single rows."""
    compute = PackedProduct.__call__
    monkeypatch.setattr(PackedProduct, "__call__", lambda self, x: compute(self, x) * (1 + 1e-6 * (x.shape[0] < 16)))
    tiled = make_runner("random:tiny-llama", kernels="torch")
    assert "/plain/tile16/" in tiled.numerics
    ids = list(range(40))
    whole = tiled.logits(step(Row(0, ids, [1, 2, 3])))[0]
    tiled.run(step(Row(0, ids[:39], [4, 5, 6], None)))
    assert torch.equal(tiled.logits(step(Row(39, ids[39:], [4, 5, 6])))[0], whole)


def test_weights_are_not_held_twice_where_another_form_of_them_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.nn.Module]] = []
    num_alive: list[int] = []

    class Counted(host_load.DeviceNetwork):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            num_alive.append(sum(one() is not None for one in held))
            held.append(weakref.ref(self))
            super().__init__(*arguments, **more)

    monkeypatch.setattr(numerics, "_compare", lambda _, rows: (False, rows))
    monkeypatch.setattr(host_load, "DeviceNetwork", Counted)
    make_runner("random:tiny-llama", kernels="torch")
    assert num_alive == [0, 0, 0], "two that are tried, and the model's"


def test_a_second_load_computes_with_as_many_threads_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels leave torch one, which is not what torch would take by itself."""
    taken: list[int] = []
    check_numerics = numerics.check_numerics

    def check(*arguments: Any, **more: Any) -> numerics.Numerics:
        taken.append(arguments[4])
        return check_numerics(*arguments, **more)

    for module in (load, numerics):
        monkeypatch.setattr(module, "check_numerics", check)
    host_load.default_threads.cache_clear()
    torch.set_num_threads(3)
    try:
        for kernels in ("auto", "auto", "torch"):
            make_runner("random:tiny-qwen3", num_threads=0, kernels=kernels)
    finally:
        host_load.default_threads.cache_clear()
        torch.set_num_threads(1)
    assert taken == [3, 3, 3]


def test_where_nothing_helps_the_numerics_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_compare", lambda compute, rows: (False, numerics.rows_of(compute(rows))))
    assert "/varies/" in make_runner("random:tiny-llama", kernels="torch").numerics


def test_fingerprints_name_dtype_and_rule() -> None:
    name = make_runner("random:tiny-llama", kernels="torch").numerics
    assert name.startswith(f"torch-{torch.__version__}/")
    assert "/float32/packed/rows4/" in name
    assert make_runner("random:tiny-llama", kernels="torch").numerics == name
    assert make_runner("random:tiny-llama", "bfloat16", kernels="torch").numerics != name


def test_what_nothing_computes_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="'mamba'"):
        model_of(msgspec.structs.replace(SPEC, architecture="mamba"))
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=24)
    with pytest.raises(BackendMissing, match="page size 24"):
        TorchAttention(PoolView(bytearray(4 * layout.page_bytes), layout), 1)


def test_the_runner_is_chosen_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: str) -> object:
        spec = resolve_model(model)
        pool = HeapHost().create("g", PoolInfo(group="g", num_pages=9, layout=spec.kv_layout(), incarnation=1))
        return make_any_runner(spec, WorkerConfig(group="g", model=model, agent="a"), pool)

    assert isinstance(make("echo"), EchoRunner)
    assert isinstance(make("random:tiny-llama"), host_load.HostRunner)


def loading(load: Callable[[], object]) -> list[str]:
    """What a load says after each tensor, without repetition."""
    said: list[str] = []

    class Heard(LoadProgress):
        def loaded(self, name: str, num_bytes: int) -> None:
            super().loaded(name, num_bytes)
            said.append(str(self))

    def with_progress() -> None:
        current_load.set(Heard())
        load()

    copy_context().run(with_progress)
    return list(dict.fromkeys(said))


def test_a_load_says_how_many_layers_and_bytes_are_in(tmp_path: Path) -> None:
    assert str(LoadProgress()) == ""
    weights = open_weights(SPEC, torch.float32)
    num_bytes = sum(weights.tensor(name).nbytes for name in expected_shapes(SPEC))
    said = loading(lambda: make_runner("random:tiny-llama"))
    total = size_text(num_bytes)
    assert said[0] == f"loading 0/3 layers, 0.5 of {total}"
    assert f"loading 1/3 layers, 1.0 of {total}" in said
    assert said[-1] == f"loaded 3/3 layers, {total}; getting ready to compute"
    assert not [text for text in said[:-1] if "loaded" in text]


def test_ranks_count_their_own_part_to_its_end() -> None:
    def load(group: Collectives) -> list[str]:
        return loading(lambda: rank_runner("random:tiny-qwen3", group))

    for said in in_ranks(2, load):
        assert said[-1].startswith("loaded 3/3 layers, ")


def test_an_engine_tells_of_a_load_as_long_as_it_runs() -> None:
    said: list[str] = []

    def make(spec: ModelSpec, config: WorkerConfig, pool: PagePool, collectives: Collectives | None = None) -> Runner:
        made = load_host_runner(spec, config, pool)
        said.append(str(engine.progress))
        return made

    info = PoolInfo(group="g", num_pages=9, layout=SPEC.kv_layout(), incarnation=1)
    engine = Engine(WorkerConfig(group="g", model=SPEC.name, agent="a"), make, None)
    context: Any = None
    asyncio.run(engine.load(context, PersistentAsk(1.0), SPEC, HeapHost().create("g", info)))
    assert said[0].startswith("loaded 3/3 layers, ")
    assert engine.progress is None


def test_what_ends_an_answer_is_what_the_plan_has_found() -> None:
    # The tokenizer's files may name an end that no config does; a worker's own specification is without it.
    config = WorkerConfig(group="g", model="tiny", agent="a")
    assert config.spec().eos_token_ids == resolve_model("tiny").eos_token_ids
    assert msgspec.structs.replace(config, end_token_ids=(2, 0, 7)).spec().eos_token_ids == (2, 0, 7)
