"""Several steps at once: only while nothing else is to be done, and with the outcome of one at a time."""

import math
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.runtime.effects import Told
from nodes.asks import asked
from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.protocol import StepPlan, StepResult, StepResults
from nodes.protocol.steps import MAX_STEPS
from nodes.scheduler.batch.step_pace import StepPace
from nodes.scheduler.config import ConfigError, SchedulerConfig
from tests.nodes.scheduler.scheduler_world import EDGE, EOS, PAGE, World, prompt, started

HORIZON_S = 0.01
TO_WORKER = ("m", "w-m")


def planning(**more: Any) -> World:
    """A world whose worker has shown that its steps take no time, and sends what it sends in plans."""
    world = started(**{"plan_horizon_s": HORIZON_S, "num_pages": {"m": 200}, **more})
    first = world.submit(prompt(5, 900), "m", max_tokens=4, ignore_eos=True)
    world.settle()
    assert first.finish
    return world


def plans(world: World, name: str = "m") -> list[StepPlan]:
    """On their way to the worker."""
    return [one.message for one in world.links.get((name, f"w-{name}"), ()) if isinstance(one.message, StepPlan)]


def decoding(world: World, *, num: int = 1, max_tokens: int = 100, **more: Any) -> list[Any]:
    """Requests that decode: their prompts are computed, and two plans are on their way to the worker."""
    requests = [
        world.submit(prompt(5, base), "m", max_tokens=max_tokens, ignore_eos=True, **more) for base in range(num)
    ]
    for _ in range(20):
        world.flush(TO_WORKER)
        if [one.num_steps for one in plans(world)] == [MAX_STEPS] * 2 and all(one.output_ids for one in requests):
            return requests
        world.deliver(TO_WORKER)
    raise AssertionError("they do not decode")


def test_a_batch_that_decodes_gets_as_many_steps_as_the_horizon_has_room_for() -> None:
    world = planning()
    decoding(world, num=3)
    first, second = plans(world)
    assert (first.num_steps, second.num_steps) == (MAX_STEPS, MAX_STEPS)
    assert second.step == first.step + MAX_STEPS
    assert world.cores["m"].pipeline.num_inflight == 2 * MAX_STEPS
    assert not world.cores["m"].pipeline.can_send
    world.settle()
    world.check()


@pytest.mark.parametrize("horizon_s", [0.0, HORIZON_S])
def test_the_output_is_what_it_is_step_by_step(horizon_s: float) -> None:
    world = planning(plan_horizon_s=horizon_s)
    requests = [world.submit(prompt(5, base), "m", max_tokens=41, ignore_eos=True) for base in range(5)]
    for base, (stop, most) in enumerate([([], 1), ([], 2), (list(range(2, 400)), 60), ([EOS], 30)]):
        requests.append(world.submit(prompt(9, 50 + base), "m", max_tokens=most, stop_token_ids=stop))
    world.settle()
    # By content: what each token must be is the world's own word.
    world.check()
    assert all(one.finish for one in requests)


def test_one_at_a_time_if_anything_else_is_to_be_done() -> None:
    world = planning(max_running=1)
    core = world.cores["m"]
    (one,) = decoding(world)
    assert core._num_consecutive() == MAX_STEPS
    waiting = world.submit(prompt(5, 2), "m", max_tokens=4, ignore_eos=True)
    world.flush(TO_WORKER)
    assert len(core.books.queue) == 1
    assert core._num_consecutive() == 1
    world.cancel(waiting)
    world.flush(TO_WORKER)
    assert core._num_consecutive() == MAX_STEPS
    world.cancel(one)
    world.settle()
    assert core._num_consecutive() == 1, "nothing runs"


def test_one_at_a_time_beside_a_prompt() -> None:
    world = planning()
    decoding(world)
    core = world.cores["m"]
    world.submit(prompt(60, 2), "m", max_tokens=4, ignore_eos=True)
    world.flush(TO_WORKER)
    assert core.books.running.prefilling
    assert core._num_consecutive() == 1
    world.settle()
    world.check()


def test_one_at_a_time_while_a_prefill_is_elsewhere() -> None:
    world = started(plan_horizon_s=HORIZON_S, num_pages={"m": 200, "p": 60})
    core = world.cores["m"]
    decoding(world)
    core.pipeline.pace.observe(1, 1, 0.0)
    assert core._num_consecutive() == MAX_STEPS
    world.submit(prompt(30, 2), "m", prefill="p", max_tokens=4, ignore_eos=True)
    world.flush("w-m", "w-p")
    assert len(core.books.loans) == 1
    assert core._num_consecutive() == 1
    world.settle()
    world.check()


def test_no_row_of_a_plan_comes_to_its_limit_before_the_last_step() -> None:
    world = planning()
    one, two = decoding(world, num=2, max_tokens=40)
    core = world.cores["m"]
    first = next(iter(core.books.running.decoding.values()))
    for left, most in ((9, 8), (8, 8), (5, 5), (2, 2), (1, 1), (0, 1)):
        first.max_length = first.length + left
        assert core._num_consecutive() == most
    first.max_length = first.num_prompt_tokens + 40
    world.settle()
    assert [len(each.output_ids) for each in (one, two)] == [40, 40]
    world.check()


def test_no_plan_where_pages_are_not_free() -> None:
    world = planning(num_pages={"m": 12})
    decoding(world, max_tokens=38)
    core = world.cores["m"]
    assert core._num_consecutive() == MAX_STEPS
    (one,) = core.books.running.decoding.values()
    with patch.object(type(one), "reserve", lambda *_: False):
        one.capacity = one.num_scheduled + 3
        assert core._num_consecutive() == 1
    one.capacity = len(one.page_ids) * PAGE
    world.settle()
    world.check()


def test_what_looks_back_goes_step_by_step() -> None:
    world = planning()
    decoding(world)
    core = world.cores["m"]
    (one,) = core.books.running.decoding.values()
    spec = one.spec
    sampling = msgspec.structs.replace(spec.sampling, asks=asked([RepetitionPenalty(penalty=1.5)]))
    one.spec = msgspec.structs.replace(spec, sampling=sampling)
    assert core._num_consecutive() == 1
    one.spec = spec
    world.settle()
    world.check()


def test_a_suspect_is_alone_in_every_step() -> None:
    world = planning()
    decoding(world, num=2)
    core = world.cores["m"]
    for sequence in core.books.running.decoding.values():
        sequence.num_deaths = 0
    for _ in range(2):
        world.restart_worker("m")
        world.flush(TO_WORKER)
    while core.deaths.next_suspect() is not None:
        assert {one.num_steps for one in plans(world)} <= {1}
        world.deliver(TO_WORKER)
        world.flush(TO_WORKER)
    world.settle()
    world.check()


def test_whoever_comes_waits_for_what_was_sent_and_for_no_more() -> None:
    world = planning()
    decoding(world)
    late = world.submit(prompt(5, 70), "m", max_tokens=4, ignore_eos=True)
    world.flush(TO_WORKER)
    assert [one.num_steps for one in plans(world)] == [MAX_STEPS] * 2
    world.deliver(TO_WORKER)
    world.flush(TO_WORKER)
    assert [one.num_steps for one in plans(world)] == [MAX_STEPS, 1], "it is in the first step after those"
    world.deliver(TO_WORKER)
    world.deliver(TO_WORKER)
    world.flush(TO_WORKER)
    assert late.output_ids
    world.settle()
    world.check()


def test_results_of_one_message_are_one_piece_of_each_stream() -> None:
    world = planning()
    (one,) = decoding(world)
    worker, core = world.workers["w-m"], world.cores["m"]
    results: list[StepResult] = []
    worker.told = lambda result: results.append(result) or []
    world.deliver(TO_WORKER)
    assert len(results) == MAX_STEPS
    before = len(one.output_ids)
    sender = next(iter(core.pipeline.ranks.addresses()))
    world.event("m", Told(sender, StepResults(results=results)))
    batches = [packet.message for packet in world.links["m", EDGE]]
    told = [batch for batch in batches if getattr(batch, "streams", None)]
    assert [(len(batch.streams), batch.counts) for batch in told] == [(1, [MAX_STEPS])]
    del worker.told
    world.settle()
    assert len(one.output_ids) > before + MAX_STEPS
    world.check()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_results_that_are_lost_repeated_or_late_change_nothing(data: st.DataObject) -> None:
    world = planning()
    requests = decoding(world, num=2, max_tokens=40)
    for _ in range(data.draw(st.integers(1, 12))):
        link = data.draw(st.sampled_from([("m", "w-m"), ("w-m", "m")]))
        if world.links.get(link):
            data.draw(st.sampled_from([world.deliver, world.drop, world.repeat]))(link)
        if data.draw(st.integers(0, 9)) == 0:
            world.restart_worker("m")
    world.settle()
    assert all(one.finish for one in requests)
    world.check()


@pytest.mark.parametrize("wrong", [-0.1, 10.1, math.nan, math.inf])
def test_a_horizon_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="plan_horizon_s"):
        SchedulerConfig(group="m", worker="w", agent="a", context_length=9, plan_horizon_s=wrong)


def test_ten_seconds_are_at_most_eight_steps() -> None:
    world = planning(plan_horizon_s=10.0)
    decoding(world)
    assert {one.num_steps for one in plans(world)} == {MAX_STEPS}
    world.settle()
    world.check()


def test_how_many_steps_there_is_time_for() -> None:
    pace = StepPace(0.0, 16)
    assert pace.steps_within(1.0, 3, 8) == 1, "nothing is known"
    pace.observe(3, 3, 0.001)
    assert [pace.steps_within(seconds, 3, 8) for seconds in (0.0, 0.0005, 0.0035, 0.1)] == [1, 1, 3, 8]
    assert pace.steps_within(1.0, 4, 8) == 1, "of another size nothing is"
    for wrong in (math.nan, math.inf, -1.0):
        pace.observe(3, 3, wrong)
    assert pace.steps_within(0.0035, 3, 8) == 3
    pace.observe(3, 3, 1.0)
    assert pace.steps_within(0.1, 3, 8) == 1, "one that hung is believed at once, and forgotten slowly"
    for _ in range(30):
        pace.observe(3, 3, 0.0)
    assert pace.steps_within(0.01, 3, 8) == 8
    pace.observe(3, 40, 5.0)
    assert pace.steps_within(0.01, 3, 8) == 8, "steps with prompts are others"
