"""What the benchmarks for a GPU compute without one: limits, idle times, the workload and its steps."""

import importlib
from pathlib import Path

import pytest

from benchmarks.gpu.gaps import idle_times
from benchmarks.gpu.loaded import GREEDY, decode_steps, load, prefill_steps, run_ahead, unload
from benchmarks.gpu.roofline import Roofline
from benchmarks.gpu.throughput import Batcher, run_alone, workload
from nodes.model_spec import resolve_model

MODULES = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks/gpu").glob("[a-z]*.py"))
H200 = Roofline(4.3e12, 790e12)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("figures", "loaded", "served")])
def test_every_benchmark_can_be_started(name):
    assert callable(importlib.import_module(f"benchmarks.gpu.{name}").main)


@pytest.mark.parametrize(
    ("model", "decode", "prefill"),
    [
        ("random:qwen3-0.6b", (3_280, 27_800, 35_200), (791_000, 585_000)),
        ("random:qwen3-8b", (281, 6_890, 20_500), (55_700, 52_300)),
    ],
)
def test_limits_are_those_worked_out_by_hand(model, decode, prefill):
    spec = resolve_model(model)
    found = [H200.decode_tokens_s(spec, batch, 1024) for batch in (1, 32, 256)]
    assert found == pytest.approx(decode, rel=0.02)
    found = [H200.prefill_tokens_s(spec, num_tokens) for num_tokens in (1024, 4096)]
    assert found == pytest.approx(prefill, rel=0.1)


def test_idle_times_of_overlapping_work():
    idle = idle_times([(30.0, 40.0), (10.0, 20.0), (12.0, 15.0), (19.0, 24.0), (41.0, 50.0)])
    assert idle == (40.0, 33.0, [6.0, 1.0])
    assert idle_times([]) == (0.0, 0.0, [])


def test_the_workload_is_nano_vllms():
    requests = workload()
    assert (len(requests), sum(count for _, count in requests)) == (256, 133_966)
    assert max(max(prompt) for prompt, _ in requests) == 10_000


def test_the_batcher_gives_every_sequence_its_rows():
    layout = resolve_model("random:tiny-qwen3").kv_layout()
    requests = workload(9, 150)
    batcher = Batcher(requests, layout, 64)
    prefilled, drawn, pages = [0] * 9, [0] * 9, {}
    before = []
    while (step := batcher.next_step()) is not None:
        assert sum(row.num_tokens for row in step.rows) <= 64
        numbers = []
        ends = [*step.rows.page_offsets[1:], len(step.page_ids)]
        for row, last in zip(step.rows, ends, strict=True):
            page_ids = tuple(step.page_ids[row.page_offset : last])
            number = pages.setdefault(page_ids, len(pages))
            numbers.append(number)
            assert row.end <= len(page_ids) * layout.page_size
            if row.from_row >= 0:
                assert before[row.from_row] == number, "its input is what it drew in the step before"
            else:
                assert row.start == prefilled[number]
                prefilled[number] = row.end
            drawn[number] += row.sampling is not None
        before = numbers
    assert prefilled == [len(prompt) for prompt, _ in requests]
    assert drawn == [count for _, count in requests]
    taken = [page for page_ids in pages for page in page_ids]
    assert len(set(taken)) == len(taken)
    assert 0 not in taken


def test_steps_run_on_any_device_and_draw_every_token():
    loaded = load("random:tiny-qwen3", 600, 64, "cpu")
    decode = decode_steps(loaded.layout, 3, 40, 6, GREEDY)
    prefill = prefill_steps(loaded.layout, 70, 32)
    assert [row.num_tokens for step in prefill for row in step.rows] == [32, 32, 6]
    assert sum(1 for _ in run_ahead(loaded.runner, decode)) == 6
    assert sum(1 for _ in run_ahead(loaded.runner, prefill)) == 3
    _, num_steps = run_alone(loaded, workload(3, 30), 32)
    assert num_steps > 20
    unload(loaded)
