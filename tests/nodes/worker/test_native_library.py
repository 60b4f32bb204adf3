"""Which build computes, and what people are told where none does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import resolve_model
from nodes.worker.config import WorkerConfig
from nodes.worker.memory.actions import give_back_heap
from nodes.worker.ops.native import builds, sources
from nodes.worker.ops.native.builds import Choice, choose_library
from nodes.worker.ops.native.oracle import TOLERANCE, disagreement
from nodes.worker.ops.native.probe import Probe, program_results
from nodes.worker.ops.native.sources import BUILDS, DIRECTORY, builds_for
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.ops.torch.load import load_host_runner
from nodes.worker.ops.torch.products import PackedProduct
from nodes.worker.weights.load_progress import LoadProgress, current_load
from tests.nodes.worker.native_builds import NAMES, ROOT, RUNNABLE, build_all, library_of, resident_mb
from tests.nodes.worker.torch_running import Row, make_runner, step


def loaded_with_note() -> tuple[Any, str]:
    """A runner of a small model, and what its load says of the kernels."""
    progress = LoadProgress()
    token = current_load.set(progress)
    try:
        return make_runner("random:tiny-llama"), progress.kernels_note
    finally:
        current_load.reset(token)


def test_where_there_is_a_compiler_the_best_build_loads() -> None:
    """`pip --quiet` hides that an optional extension was not built."""
    build_all()
    choice = choose_library()
    assert choice.build is not None, choice.note
    assert choice.build.name == RUNNABLE[0]
    assert {path.name.split(".")[0] for path in DIRECTORY.glob("*.so")} == {f"_{name}" for name in BUILDS}


def test_a_slow_instruction_for_pairs_is_not_chosen() -> None:
    zen3, zen4 = {"avx2", "fma", "bmi2"}, set(BUILDS["avx512_bf16"].needs)
    assert builds_for(zen3) == ["avx2"]
    assert builds_for(zen4) == ["avx512_bf16", "avx512", "avx2"]
    assert builds_for(zen4 | {"amx_bf16", "amx_tile"}) == ["avx512", "avx2", "avx512_bf16"]
    assert builds_for(zen4 | {"avx512_fp16"}) == ["avx512", "avx2", "avx512_bf16"], "tiles that a hypervisor hides"


def test_without_a_build_torch_computes_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_all()
    assert choose_library("avx2").build is not None
    assert choose_library("torch").build is None
    with monkeypatch.context() as patch:
        patch.setattr(builds, "sources_digest", lambda: "edited")
        assert choose_library("avx2").note.endswith("was built from other sources; run make setup")
    (tmp_path / "_avx2.so").write_bytes(b"not a library")
    monkeypatch.setattr(builds, "path_of", lambda name: tmp_path / f"_{name}.so")
    assert "_avx2.so cannot be loaded (" in choose_library("avx2").note
    (tmp_path / "_avx2.so").unlink()
    assert "was not built; run make setup" in choose_library("avx2").note
    monkeypatch.setattr(builds, "compiler", lambda: None)
    assert choose_library().note == "torch kernels: no compiler; install g++, then make setup"
    runner, note = loaded_with_note()
    assert note == "torch kernels: no compiler; install g++, then make setup"
    assert "/rows4/" in runner.numerics
    assert runner.run(step(Row(0, [1, 2, 3], [1]))).token_ids[0] >= 0


def test_a_cpu_without_the_instructions_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "cpu_flags", lambda: frozenset({"sse2"}))
    assert choose_library().note == "torch kernels: this CPU has no AVX2"
    assert choose_library("avx512_bf16").note == "torch kernels: this CPU has no AVX512_BF16"
    assert choose_library("avx512_bf16").build is None


def test_a_machine_for_which_no_kernels_are_written_gets_torch_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert choose_library() == Choice(None, "")


def test_where_the_kernel_tells_nothing_of_the_cpu_it_has_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert builds.cpu_flags.__wrapped__() == frozenset()


def test_a_build_is_believed_where_its_sources_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    build_all()
    monkeypatch.setattr(sources, "DIRECTORY", Path("/nowhere"))
    assert sources.sources_digest() == ""
    assert choose_library().build is not None


def test_numerics_name_the_instruction_set_and_fall_back_where_bits_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    build_all()
    plan = step(Row(0, list(range(40)), [1, 2, 3]))
    natives = {name: make_runner("random:tiny-qwen3", kernels=name) for name in RUNNABLE}
    assert all(f"/float32/native-{name}/any/" in runner.numerics for name, runner in natives.items())
    assert len({runner.numerics for runner in natives.values()}) == len(RUNNABLE)
    torchs = make_runner("random:tiny-qwen3", kernels="torch")
    for runner in natives.values():
        assert (runner.logits(plan)[0] - torchs.logits(plan)[0]).abs().max() < 1e-4
    compute = NativeSteps.run

    def run(self: NativeSteps, columns: Columns, **options: Any) -> tuple[Any, Any]:
        drawn, logits = compute(self, columns, **options)
        return drawn, logits * (1 + 1e-6 * (len(columns.token_ids) < 16))

    monkeypatch.setattr(NativeSteps, "run", run)
    fallen, note = loaded_with_note()
    assert "depend on the batch" in note
    assert isinstance(next(iter(fallen._network._products.values())), PackedProduct)


def test_a_compiler_that_fails_leaves_an_installation_that_works(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(DIRECTORY, tmp_path / DIRECTORY.relative_to(ROOT), ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    failed = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"CC": "false", "CXX": "false"}, capture_output=True
    )
    assert failed.returncode == 0, failed.stderr.decode()
    assert b"failed" in failed.stderr + failed.stdout
    assert not list(tmp_path.rglob("*.so"))


def test_a_runner_that_is_dropped_gives_its_weights_back() -> None:
    """As the engine drops it for `meshctl release --reload-weights`: 45 MB of embedding, as many of head."""
    build_all()

    spec = msgspec.structs.replace(resolve_model("random:tiny-llama"), vocab_size=100_000)
    config = WorkerConfig(group="g", model=spec.name, agent="a", num_threads=1)
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=9, layout=spec.kv_layout(), incarnation=1))
    give_back_heap()
    before = resident_mb()
    runner = load_host_runner(spec, config, pool)
    assert "/native-" in runner.numerics
    assert resident_mb() - before > 80
    del runner
    give_back_heap()
    assert resident_mb() - before < 20


class WrongFunctions:
    """A build that packs no weights, as one might that was translated wrongly."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == "kvmesh_pack" else getattr(self._functions, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_builds_agree_with_torch(name: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        assert disagreement(library_of(name), dtype) < TOLERANCE[dtype] / 5
        assert disagreement(library_of(name), dtype, "int8") < TOLERANCE[dtype] / 5
        for numbers in ("none", "int8"):
            assert disagreement(library_of(name), dtype, numbers, is_encoder=True) < TOLERANCE[dtype] / 4


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_has_the_same_bits_alone_and_together(name: str) -> None:
    spec, library = resolve_model("random:tiny-bert"), library_of(name)
    probe = Probe(spec, library, spec.kv_layout(), torch.float32, None)
    assert all(is_same for is_same, _ in program_results(probe))


def test_a_build_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    build_all()
    sound = choose_library("avx2").build
    wrong = sound._replace(functions=WrongFunctions(sound.functions))
    monkeypatch.setattr("nodes.worker.ops.native.load.choose_library", lambda _: Choice(wrong, ""))
    runner, note = loaded_with_note()
    assert "give wrong results on this CPU (logits differ by" in note
    assert "/rows4/" in runner.numerics
