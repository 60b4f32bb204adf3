"""The device's runner, on CPU tensors, agrees with the CPU's: another schedule of one network, on the same pages.

That both agree with transformers is shown by `test_parity.py`.
"""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nodes.model_spec import resolve_model
from nodes.protocol import Adopt, StepPlan
from nodes.request import Sampling
from nodes.worker.core import AdoptArrived, RunStep, SendResult, StepArrived, StepDone, WorkerCore
from nodes.worker.executor.steps_ahead import StepsAhead
from nodes.worker.ops.torch.runner import DeviceRunner
from nodes.worker.steps.columns import Limits
from nodes.worker.steps.step import POISONED, RunnableStep
from tests.nodes.step_plans import Row as PlannedRow
from tests.nodes.step_plans import plan_of
from tests.nodes.worker.cuda.device_running import device_runner, replaying_runner
from tests.nodes.worker.torch_running import GREEDY, Row, logits_by_chunks, make_runner, step, with_rows

MODELS = [
    "random:tiny-llama", "random:tiny-qwen2", "random:tiny-qwen3", "random:tiny-mistral", "random:tiny-qwen2-sliding",
]  # fmt: skip
MODEL = "random:tiny-qwen3"
IDS = torch.randint(0, 1000, (150,), generator=torch.Generator().manual_seed(1)).tolist()
SAMPLED = Sampling(temperature=1.5, seed=9, top_p=0.95)


@pytest.mark.parametrize("model", MODELS)
def test_logits_agree_with_the_cpu_network(model: str) -> None:
    sizes, pages = [16, 48, 33, 1, 22, 29, 1], list(range(1, 11))
    expected = logits_by_chunks(make_runner(model, "float32"), IDS, pages, sizes)
    whole = logits_by_chunks(device_runner(model, "float32"), IDS, pages, [150])
    assert torch.allclose(whole[0], expected[-1], atol=1e-5, rtol=0)
    rough = logits_by_chunks(device_runner(model, "bfloat16"), IDS, pages, sizes)
    assert rough.dtype == torch.bfloat16
    assert torch.allclose(rough.float(), expected, atol=0.15, rtol=0.05)


def test_tiles_of_fixed_rows_change_nothing_but_the_last_bits() -> None:
    expected = logits_by_chunks(device_runner(MODEL, "float32"), IDS, list(range(1, 11)), [149, 1])
    runner = device_runner(MODEL, "float32", deterministic=True)
    assert torch.allclose(logits_by_chunks(runner, IDS, list(range(1, 11)), [149, 1]), expected, atol=1e-4, rtol=0)
    assert runner.numerics.endswith("/fixed")


def mixed_step(base: int) -> RunnableStep:
    """Chunks, single rows and rows that draw nothing, in no order, on pages from `base` on."""
    return step(
        Row(32, IDS[32:60], [base, base + 1, base + 2, base + 3], SAMPLED, prompt=60),
        Row(47, IDS[47:48], [base + 4, base + 5, base + 6, base + 7], GREEDY, prompt=20),
        Row(0, IDS[:30], [base + 8, base + 9], None, prompt=60),
        Row(40, IDS[40:41], [base + 10, base + 11, base + 12], SAMPLED, prompt=20),
        Row(0, IDS[:1], [base + 13], GREEDY, prompt=1),
    )


def fill(runner: DeviceRunner, base: int) -> None:
    for first, count in ((0, 32), (4, 47), (10, 40)):
        pages = [base + first + i for i in range(4)][: -(-count // 16)]
        runner.run(step(Row(0, IDS[:count], pages, None, prompt=150)))


def test_a_mixed_step_draws_what_each_row_draws_alone_and_what_the_cpu_draws() -> None:
    runner, other = device_runner(MODEL), make_runner(MODEL)
    for each in (runner, other):
        fill(each, 1)
    plan = mixed_step(1)
    drawn = runner.run(plan)
    assert drawn.errors == []
    assert drawn.token_ids[2] == -1
    assert list(drawn.token_ids) == list(other.run(plan).token_ids)
    fill(runner, 50)
    alone = [runner.run(with_rows(mixed_step(50), [row])).token_ids[0] for row in mixed_step(50).rows]
    assert alone == drawn.token_ids


def test_a_step_run_again_writes_the_same_bits() -> None:
    runner = device_runner(MODEL)
    fill(runner, 1)
    first = runner.run(mixed_step(1)).token_ids
    pages = runner._attention.pool.pages.clone()
    assert runner.run(mixed_step(1)).token_ids == first
    assert torch.equal(runner._attention.pool.pages.view(torch.int32), pages.view(torch.int32))


def decode_step(tokens: list[int], positions: list[int], *, from_rows: list[int] | None = None) -> RunnableStep:
    rows = [
        Row(position, [token], list(range(1 + 8 * i, 9 + 8 * i)), SAMPLED if i % 2 else GREEDY, prompt=10 + i)
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True))
    ]
    plan = step(*rows)
    if from_rows is None:
        return plan
    found = [row._replace(from_row=source) for row, source in zip(plan.rows, from_rows, strict=True)]
    return with_rows(plan, found)


def prefilled(runner: DeviceRunner, count: int) -> list[int]:
    rows = [Row(0, IDS[i : i + 10 + i], list(range(1 + 8 * i, 9 + 8 * i)), GREEDY, prompt=10 + i) for i in range(count)]
    return list(runner.run(step(*rows)).token_ids)


def text(runner: DeviceRunner, num_sequences: int, num_steps: int) -> list[list[int]]:
    tokens = prefilled(runner, num_sequences)
    output = [tokens]
    for number in range(num_steps):
        positions = [10 + i + number for i in range(num_sequences)]
        output.append(list(runner.run(decode_step(output[-1], positions)).token_ids))
    return output


def test_replayed_steps_draw_the_same_and_pad_on_page_0() -> None:
    plain = device_runner(MODEL, num_pages=100)
    runner, recorder = replaying_runner(MODEL, [1, 2, 4, 8])
    assert recorder.order == [8, 4, 2, 1], "the largest first"
    for count in (5, 1, 8, 3):
        before = recorder.num_replays
        assert text(runner, count, 12) == text(plain, count, 12)
        assert recorder.num_replays == before + 12
    pages = runner._attention.pool.pages
    assert not pages[0, :, :, 0].isnan().any(), "padding rows write page 0"
    assert pages[0, :, :, 1:].isnan().all(), "and of it the first cell only"


def test_rows_that_draw_nothing_may_stand_between_others_in_a_replayed_step() -> None:
    (runner, recorder), plain = replaying_runner(MODEL, [4]), device_runner(MODEL)
    plan = decode_step(prefilled(runner, 4), [10, 11, 12, 13])
    assert prefilled(plain, 4)
    plan = with_rows(plan, (row._replace(draws=0) if row.row in (0, 2) else row for row in plan.rows))
    drawn = list(runner.run(plan).token_ids)
    assert recorder.num_replays == 1
    assert drawn == list(plain.run(plan).token_ids)
    assert [token >= 0 for token in drawn] == [False, True, False, True]


def test_what_no_bucket_holds_is_computed_without() -> None:
    runner, recorder = replaying_runner(MODEL, [1, 2])
    assert text(runner, 3, 2) == text(device_runner(MODEL), 3, 2)
    assert recorder.num_replays == 0


@pytest.mark.parametrize("replays", [False, True])
def test_steps_launched_ahead_take_their_input_from_the_device(replays: bool) -> None:
    runner = replaying_runner(MODEL, [1, 2, 4, 8])[0] if replays else device_runner(MODEL)
    expected = text(device_runner(MODEL), 5, 8)
    tokens = prefilled(runner, 5)
    launched = runner.launch(decode_step(tokens, [10 + i for i in range(5)]))
    output = [tokens]
    for number in range(1, 9):
        ahead = None
        if number < 8:
            # Rows change places: each says which row of the step before it follows.
            plan = decode_step([-1] * 5, [10 + i + number for i in range(5)], from_rows=list(range(5)))
            ahead = runner.launch(plan)
        output.append(list(runner.finish(launched).token_ids))
        launched = ahead
    assert output == expected


def test_rows_may_follow_others_in_any_order() -> None:
    runner, other = device_runner(MODEL), device_runner(MODEL)
    tokens = prefilled(runner, 4)
    prefilled(other, 4)
    first = runner.launch(decode_step(tokens, [10, 11, 12, 13]))
    drawn = list(other.run(decode_step(tokens, [10, 11, 12, 13])).token_ids)
    plan = decode_step([-1, drawn[1], -1, -1], [11, 12, 13, 14], from_rows=[0, -1, 2, 3])
    order = [2, 0, 3, 1]
    ahead = runner.launch(with_rows(plan, (plan.rows[i] for i in order)))
    assert list(runner.finish(first).token_ids) == drawn
    expected = other.run(decode_step(drawn, [11, 12, 13, 14])).token_ids
    assert list(runner.finish(ahead).token_ids) == [expected[i] for i in order]


def test_a_row_that_overflows_fails_alone_and_takes_its_successors_along(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(MODEL)
    tokens = prefilled(runner, 3)
    forward = runner._network.forward
    broken = True

    def overflowing(*args: object, **options: object) -> torch.Tensor:
        logits = forward(*args, **options)
        if broken:
            logits[1] = math.nan
        return logits

    monkeypatch.setattr(runner._network, "forward", overflowing)
    first = runner.launch(decode_step(tokens, [10, 11, 12]))
    broken = False
    second = runner.launch(decode_step([-1] * 3, [11, 12, 13], from_rows=[0, 1, 2]))
    outcome = runner.finish(first)
    assert outcome.token_ids[1] == -1
    assert [(error.row, error.code) for error in outcome.errors] == [(1, POISONED)]
    third = runner.launch(decode_step([-1] * 3, [12, 13, 14], from_rows=[0, 1, 2]))
    for launched in (second, third):
        outcome = runner.finish(launched)
        assert outcome.token_ids[1] == -1
        assert min(outcome.token_ids[0], outcome.token_ids[2]) >= 0
        assert [(error.row, error.code) for error in outcome.errors] == [(1, "missing_input")]


def test_an_error_of_a_step_is_the_workers_own_where_no_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(MODEL)
    tokens = prefilled(runner, 2)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner._network, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.run(decode_step(tokens, [10, 11]))


def test_a_step_that_only_prefills_draws_nothing() -> None:
    runner = device_runner(MODEL)
    outcome = runner.run(step(Row(0, IDS[:20], [1, 2], None, prompt=40)))
    assert list(outcome.token_ids) == [-1]
    assert outcome.errors == []


def test_the_worker_keeps_the_runner_one_step_ahead_and_draws_the_same() -> None:
    """Core, threads and runner together, as the actor joins them: a scheduler that never waits for tokens."""
    expected = text(device_runner(MODEL), 3, 12)
    runner = replaying_runner(MODEL, [1, 2, 4])[0]
    spec = resolve_model(MODEL)
    core = WorkerCore(Limits(200, 16, spec.vocab_size, spec.context_length, 256), depth=2)
    core.handle(AdoptArrived(Adopt(scheduler_epoch=1), None))
    output: dict[int, list[int]] = {}
    begun: list[int] = []

    async def main() -> None:
        thread = ThreadPoolExecutor(1)
        ahead = StepsAhead(runner, thread)

        async def run(runnable: RunnableStep) -> None:
            perform(core.handle(StepDone(await ahead.run(runnable), 0.0)))

        def perform(commands: list[Any]) -> None:
            for command in commands:
                if isinstance(command, RunStep):
                    begun.append(len(output))
                    tasks.append(asyncio.create_task(run(command.runnable)))
                elif isinstance(command, SendResult):
                    assert command.result.errors == []
                    output[command.result.step] = command.result.token_ids

        tasks: list[asyncio.Task[None]] = []
        for number in range(13):
            perform(core.handle(StepArrived("s", *planned(number))))
            await asyncio.sleep(0)
        while len(output) < 13:
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        ahead.stop()
        thread.shutdown()

    asyncio.run(main())
    assert [output[step] for step in sorted(output)] == expected
    assert begun[:3] == [0, 0, 1], "two at a time"


def planned(number: int) -> tuple[StepPlan, list[bytes]]:
    """Step `number` (0: the prefill) of `text` for three sequences, as a scheduler sends it."""
    rows: list[PlannedRow] = []
    for i in range(3):
        one = PlannedRow(i, IDS[i : i + 10 + i], range(1 + 8 * i, 9 + 8 * i), 0, 10 + i, GREEDY, i)
        if number:
            # The second step opens again: prompts are greedy, what follows is not.
            sampling, opens = SAMPLED if i % 2 else GREEDY, number == 1
            pages, first_page = (one.pages, 0) if opens else ((), 8)
            one = PlannedRow(i, [-1], pages, 9 + i + number, 10 + i, sampling, i, first_page, opens)
        rows.append(one)
    return plan_of(number + 1, rows)
