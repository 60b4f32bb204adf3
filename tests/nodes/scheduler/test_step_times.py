"""When a step hangs, by what steps took."""

import math

from hypothesis import given
from hypothesis import strategies as st

from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.worker_link.step_times import DEADLINE_FACTOR, StepTimes

CONFIG = SchedulerConfig(group="m", worker="w", agent="a", context_length=99)


def test_a_chunk_of_2048_tokens_has_half_a_minute_once_steps_were_measured_and_not_17() -> None:
    times = StepTimes(CONFIG)
    assert times.timeout_s(1, 2048, 128) == 30 + 0.5 * 2048, "nothing is known of this host yet"
    times.observe(1, 256, 16, 0.2)
    assert times.timeout_s(1, 2048, 128) == 30.0
    times.observe(1, 2048, 128, 0.9)
    assert times.timeout_s(1, 2048, 128) == 30.0


def test_a_slow_host_has_more_and_forgets_what_was_slow_once() -> None:
    times = StepTimes(CONFIG)
    times.observe(1, 2048, 128, 60.0)
    assert times.timeout_s(1, 2048, 128) == DEADLINE_FACTOR * 60.0
    assert times.timeout_s(1, 16, 1) == 30 + 0.5 * 16, "less work takes no longer, and has no more than unmeasured"
    for _ in range(1000):
        times.observe(1, 2048, 128, 2.0)
    assert times.timeout_s(1, 2048, 128) == 30.0


def test_a_long_context_counts_as_work() -> None:
    times = StepTimes(CONFIG)
    times.observe(1, 256, 16, 5.0)
    short, long = times.timeout_s(1, 256, 16), times.timeout_s(1, 256, 128_000 // 16)
    assert short == DEADLINE_FACTOR * 5.0
    assert long == 30 + 0.5 * 256 > short
    times.observe(8, 8, 8 * 8000, 7.0)
    assert times.timeout_s(8, 8, 8 * 8000) == DEADLINE_FACTOR * 7.0


sizes = st.tuples(st.integers(0, 300), st.integers(0, 4096), st.integers(0, 100_000))


@given(st.lists(st.tuples(sizes, st.floats())), sizes)
def test_a_deadline_is_never_below_the_least_nor_without_end(
    took: list[tuple[tuple[int, int, int], float]], size: tuple[int, int, int]
) -> None:
    times = StepTimes(CONFIG)
    for one, elapsed_s in took:
        times.observe(*one, elapsed_s if elapsed_s < 1e6 else math.inf)
    assert CONFIG.step_deadline_s <= times.timeout_s(*size) < 1e9
