"""Numerics name what computes, weights what with: the one does not tell the other, and both hold while it runs."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import PoolHandle
from nodes.model_spec import WeightsChanged, resolve_model
from nodes.model_spec.presets import RANDOM_MODELS
from nodes.model_spec.weight_index import read_header
from nodes.worker.config import WorkerConfig
from nodes.worker.errors import LayoutMismatch
from nodes.worker.executor import runners
from nodes.worker.numerics import drawn_model
from nodes.worker.ops.torch import load as host_load
from nodes.worker.pool.taking import take_pool
from tests.nodes.checkpoints import LLAMA, write_model
from tests.nodes.worker.torch_running import Row, make_runner, step

KERNELS = ["auto", "torch"]


def written(folder: Path, seed: int, **config: Any) -> Path:
    """A small Llama with weights of a seed."""
    file = write_model(folder, LLAMA | config) / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(one.shape, generator=generator) * 0.3 for name, one in load_file(file).items()}
    save_file(drawn, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("kernels", KERNELS)
def test_numerics_are_the_same_whatever_the_weights_are(tmp_path: Path, kernels: str) -> None:
    names = [str(written(tmp_path / str(seed), seed)) for seed in (1, 2)]
    first, other = (make_runner(name, kernels=kernels) for name in names)
    assert first.numerics == other.numerics
    assert resolve_model(names[0]).fingerprint != resolve_model(names[1]).fingerprint
    rows = step(Row(0, list(range(40)), [1, 2, 3]))
    assert not torch.equal(first.logits(rows)[0], other.logits(rows)[0])
    wider = make_runner(str(written(tmp_path / "wider", 1, intermediate_size=48)), kernels=kernels)
    assert wider.numerics != first.numerics, "another shape"


KINDS = {
    "tiny-llama": 1, "tiny-gemma3": 2, "tiny-qwen2-sliding": 2, "mistral-7b": 1, "qwen3-30b-a3b": 1, "tiny-bert": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_kinds"), KINDS.items())
def test_one_layer_of_each_kind_is_drawn(name: str, num_kinds: int) -> None:
    spec = RANDOM_MODELS[name]
    drawn = drawn_model(spec, 128)
    assert (drawn.num_layers, drawn.source) == (num_kinds, "random")
    assert {*drawn.layer_windows} == {*spec.layer_windows}
    assert drawn.vocab_size == 128 + spec.vocab_size % 64
    assert drawn_model(spec).vocab_size == spec.vocab_size
    some = msgspec.structs.replace(RANDOM_MODELS["tiny-qwen3-moe"], dense_layers=(0, 2), dense_size=96)
    assert drawn_model(some).dense_layers == (0,)
    assert drawn_model(some).num_layers == 2


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_runs_does_not_change_with_its_file(tmp_path: Path, kernels: str, dtype: str) -> None:
    folder = written(tmp_path / "m", 1)
    file = folder / "model.safetensors"
    save_file({name: one.to(getattr(torch, dtype)) for name, one in load_file(file).items()}, file)
    runner = make_runner(str(folder), dtype, kernels=kernels)
    rows = step(Row(0, list(range(40)), [1, 2, 3]))
    before = runner.logits(rows)[0].clone()
    num_bytes = max(entry.data_offsets[1] for entry in read_header(file).values())
    with file.open("r+b") as opened:
        opened.seek(-num_bytes, os.SEEK_END)
        opened.write(bytes(num_bytes))
    assert torch.equal(runner.logits(rows)[0], before)


def test_weights_that_change_while_they_are_loaded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "m", 1)
    load_host_runner = host_load.load_host_runner

    def load_late(*arguments: Any) -> Any:
        written(folder, 2)
        return load_host_runner(*arguments)

    monkeypatch.setattr(host_load, "load_host_runner", load_late)
    spec = resolve_model(str(folder))
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=8, layout=spec.kv_layout(), incarnation=1))
    config = WorkerConfig(group="g", model=str(folder), agent="a")
    with pytest.raises(WeightsChanged, match="were changed while they were loaded"):
        runners.make_runner(spec, config, pool)


def test_a_pool_that_was_made_for_other_weights_is_refused(tmp_path: Path) -> None:
    """As after a restart of a worker whose files have become others."""
    folder = written(tmp_path / "m", 1)
    before = resolve_model(str(folder))
    config = WorkerConfig(group="g", model=str(folder), agent="a", weights=before.weights)
    handle = PoolHandle(group="g", agent="a", path="", num_pages=8, layout=before.kv_layout(), incarnation=1)
    written(folder, 2)
    with pytest.raises(LayoutMismatch, match=r"for other weights .* start the mesh again to serve these"):
        take_pool(HeapHost(), config, config.spec(), handle)
    other = msgspec.structs.replace(handle, layout=before.kv_layout(page_size=32))
    with pytest.raises(LayoutMismatch, match="Give agent, scheduler and worker of a group the same model"):
        take_pool(HeapHost(), config, config.spec(), other)
