"""The FlashInfer backend calls what it should with what it should, and its results land where torch's do."""

import importlib.util
import inspect

import pytest
import torch

from nodes.model_spec import resolve_model
from nodes.models.parts import Activation
from nodes.worker.cuda.buckets import Buckets
from nodes.worker.cuda.flashinfer_backend import FlashInferAttention, FlashInferKernels, load_flashinfer
from nodes.worker.cuda.flashinfer_plans import HeadsLoader
from nodes.worker.cuda.graphs import DecodeGraphs, padding_batch
from nodes.worker.errors import BackendMissing
from nodes.worker.ops.torch.batch import unpack
from nodes.worker.ops.torch.few_rows import FewRows
from nodes.worker.ops.torch.kernels import TorchKernels
from nodes.worker.ops.torch.kinds import kinds_of
from nodes.worker.ops.torch.network import DeviceNetwork
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.weights.random_weights import RandomWeights
from tests.nodes.worker.cuda import fake_flashinfer
from tests.nodes.worker.cuda.device_running import Repeater, device_runner, host_pool
from tests.nodes.worker.cuda.test_device_runner import IDS, fill, mixed_step, text
from tests.nodes.worker.torch_running import logits_by_chunks

MODELS = ["random:tiny-qwen2", "random:tiny-qwen3", "random:tiny-mistral", "random:tiny-qwen2-sliding"]


def fake_runner(
    model: str,
    sizes: list[int] | None = None,
    *,
    deterministic: bool = False,
    heads: HeadsLoader | None = None,
    few_rows: FewRows | None = None,
) -> DeviceRunner:
    spec = resolve_model(model)
    view = host_pool(model, "bfloat16")
    with torch.inference_mode():
        attention = FlashInferAttention(
            fake_flashinfer,
            view,
            spec.num_heads,
            512,
            kinds_of(spec),
            deterministic=deterministic,
            heads=heads,
        )
        kernels, weights = FlashInferKernels(fake_flashinfer), RandomWeights(spec, torch.bfloat16)
        network = DeviceNetwork(spec, weights, kernels, torch.device("cpu"), few_rows=few_rows)
        graphs = DecodeGraphs(network, attention, Buckets(sizes), Repeater(), 400) if sizes else None
    return DeviceRunner(network, attention, 16, 512, "test", graphs)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((model, {"deterministic": deterministic}) for model in MODELS for deterministic in (False, True)),
    ],
)
def test_logits_are_those_of_the_torch_backend(model: str, options: dict[str, bool]) -> None:
    sizes = [16, 48, 33, 1, 22, 29, 1]
    expected = logits_by_chunks(device_runner(model, "bfloat16"), IDS, list(range(1, 11)), sizes)
    found = logits_by_chunks(fake_runner(model, **options), IDS, list(range(1, 11)), sizes)
    assert torch.allclose(found.float(), expected.float(), atol=0.02, rtol=0.02)


def test_a_mixed_step_gives_each_row_its_own() -> None:
    model = "random:tiny-qwen3"
    expected, found = device_runner(model, "bfloat16"), fake_runner(model)
    for runner in (expected, found):
        fill(runner, 1)
    rows, others = expected.logits(mixed_step(1)), found.logits(mixed_step(1))
    assert rows.keys() == others.keys()
    assert all(torch.allclose(rows[i].float(), others[i].float(), atol=0.02, rtol=0.02) for i in rows)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_go_through_the_kernel_of_their_activation(activation: Activation) -> None:
    gate_up = torch.randn(3, 64, dtype=torch.bfloat16)
    found = FlashInferKernels(fake_flashinfer).gated(gate_up, activation)
    assert torch.equal(found, TorchKernels().gated(gate_up, activation))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("model", ["random:tiny-qwen3", "random:tiny-qwen2-sliding"])
def test_replayed_steps_draw_the_same(model: str, deterministic: bool) -> None:
    plain = fake_runner(model, deterministic=deterministic)
    replaying = fake_runner(model, [1, 2, 4, 8], deterministic=deterministic)
    for count in (5, 1, 8):
        assert text(replaying, count, 6) == text(plain, count, 6)


def plans_of(runner: DeviceRunner, size: int) -> list[list[str]]:
    return [wrapper.plans for wrapper in runner._graphs._captured[size].attention._captured.wrappers.values()]


@pytest.mark.parametrize("model", ["random:tiny-mistral", "random:tiny-qwen2-sliding", "random:tiny-qwen3"])
def test_captured_steps_are_planned_without_a_maximum_in_python(model: str) -> None:
    """Where tensor cores decode; the other kernel's plan takes none. Only when a sequence gets another page."""
    plain, replaying = fake_runner(model), fake_runner(model, [1, 2, 4, 8])
    assert text(replaying, 3, 25) == text(plain, 3, 25)
    # Captured; the first step; and three sequences of 10, 11 and 12 tokens that reach 17, and 33.
    full, fast = ["full"] * 8, ["full"] + ["fast"] * 7
    expected = {"random:tiny-mistral": [fast], "random:tiny-qwen2-sliding": [full, fast], "random:tiny-qwen3": [full]}
    assert plans_of(replaying, 4) == expected[model]


def test_a_schedule_that_another_bucket_has_overwritten_is_made_again() -> None:
    """All buckets share the memory of their schedules, so page counts alone do not say whose lies there."""
    view = host_pool("random:tiny-mistral", "bfloat16")
    attention = FlashInferAttention(fake_flashinfer, view, 4, 16, deterministic=False)
    arrays = unpack(torch.zeros(6 * 2 + 8, dtype=torch.int32), 2, 2)
    one, other = (attention.for_bucket(2, arrays) for _ in range(2))
    for bucket in (one, one, other, one):
        bucket.plan(padding_batch(2), arrays._replace(indices=arrays.indices[:2]))
    (wrapper,) = one._captured.wrappers.values()
    assert wrapper.plans == ["full", "fast"], "not when nobody else came in between"


def test_without_the_fast_plan_every_plan_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = "random:tiny-mistral"
    monkeypatch.delattr(fake_flashinfer, "fast_decode_plan")
    plain, replaying = fake_runner(model), fake_runner(model, [4])
    assert text(replaying, 3, 25) == text(plain, 3, 25)
    # The first step has as many pages as the captured padding: its schedule stays.
    assert plans_of(replaying, 4) == [["full"] * 7]


def test_each_kind_of_layer_has_its_plan_and_its_schedule() -> None:
    """What one kind's plan left on the device must still be there when a layer of the other kind has run."""
    bucket = fake_runner("random:tiny-qwen2-sliding", [2])._graphs._captured[2].attention
    wrappers = list(bucket._captured.wrappers.values())
    assert [wrapper.window_left for wrapper in wrappers] == [-1, 39], "a window of 40 positions has 39 on the left"
    schedules = {wrapper.int_workspace.data_ptr() for wrapper in wrappers}
    assert len(schedules) == 2
    assert len({wrapper.float_workspace.data_ptr() for wrapper in wrappers}) == 1


def test_shapes_without_kernels_are_refused() -> None:
    view = host_pool("random:tiny-qwen3", "float32")
    with pytest.raises(BackendMissing, match="heads of size 64 in float32"):
        FlashInferAttention(fake_flashinfer, view, 4, 16, deterministic=False)


@pytest.mark.skipif(bool(importlib.util.find_spec("flashinfer")), reason="flashinfer is installed")
def test_its_absence_is_told() -> None:
    with pytest.raises(BackendMissing, match="extra cuda12 or cuda13"):
        load_flashinfer()


@pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="needs flashinfer")
def test_the_fake_has_the_real_names() -> None:
    real = load_flashinfer()
    functions = inspect.getmembers(fake_flashinfer, inspect.isfunction)
    fakes = {name: f for name, f in functions if f.__module__ == fake_flashinfer.__name__ and not name.startswith("_")}
    for name, wrapper in inspect.getmembers(fake_flashinfer, inspect.isclass):
        members = inspect.getmembers(wrapper, inspect.isfunction) if name.startswith("Batch") else []
        fakes |= {f"{name}.{member}": function for member, function in members if member not in ("attend", "keep")}
    for name, fake in fakes.items():
        target = real
        for part in name.split("."):
            target = getattr(target, part)
        parameters = inspect.signature(inspect.unwrap(target)).parameters
        # From 0.6.18 on some are taken as `**` and checked by FlashInfer itself.
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            assert set(inspect.signature(fake).parameters) <= set(parameters), name
