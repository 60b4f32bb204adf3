"""A busy process does not interrupt others, and one that is idle again does."""

import os
import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mesh.runtime.interruption import Interruption, set_policy_of_threads
from mesh.runtime.process_usage import ProcessUsage


class Process:
    """Used `cores` in each stretch of time so far."""

    def __init__(self, is_allowed: bool = True) -> None:
        self.now = self.cpu_s = 0.0
        self.policies: list[int] = []
        self._is_allowed = is_allowed
        self.interruption = Interruption(lambda: ProcessUsage(self.cpu_s, None), self._set, lambda: self.now)

    def _set(self, policy: int) -> bool:
        self.policies.append(policy)
        return self._is_allowed

    def use(self, cores: float, for_s: float = 0.5) -> None:
        self.now += for_s
        self.cpu_s += cores * for_s
        assert self.interruption.usage().cpu_s == self.cpu_s


def test_a_process_that_wavers_changes_nothing() -> None:
    process = Process()
    for cores in (0.0, 0.05, 0.059):
        process.use(cores)
    assert process.policies == []
    for cores in (0.07, 0.05, 0.9, 0.041, 0.05):
        process.use(cores)
    assert process.policies == [os.SCHED_BATCH]
    process.use(0.03)
    process.use(0.05)
    assert process.policies == [os.SCHED_BATCH, os.SCHED_OTHER]


def test_a_moment_is_no_measure() -> None:
    process = Process()
    process.use(1.0, 0.01)
    process.use(1.0, 0.01)
    assert process.policies == []
    process.use(0.0, 0.38)
    assert process.policies == [], "0.02 s in 0.4"


def test_where_it_is_forbidden_it_is_tried_once() -> None:
    process = Process(is_allowed=False)
    for cores in (0.9, 0.0, 0.9, 0.0):
        process.use(cores)
    assert process.policies == [os.SCHED_BATCH]


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0.001, 5)), max_size=50))
def test_policies_alternate_and_follow_what_is_used(used: list[tuple[float, float]]) -> None:
    process = Process()
    for cores, for_s in used:
        process.use(cores, for_s)
    assert all(before != after for before, after in pairwise([os.SCHED_OTHER, *process.policies]))
    process.use(0.5)
    process.use(0.5)
    assert process.policies[-1] == os.SCHED_BATCH
    process.use(0.0, 5.0)
    assert process.policies[-1] == os.SCHED_OTHER


def test_all_threads_get_the_policy_and_those_made_later() -> None:
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait)]
    threads[0].start()
    try:
        assert set_policy_of_threads(os.SCHED_BATCH)
        threads.append(threading.Thread(target=ends.wait))
        threads[1].start()
        assert {os.sched_getscheduler(thread.native_id or 0) for thread in threads} == {os.SCHED_BATCH}
    finally:
        assert set_policy_of_threads(os.SCHED_OTHER)
        ends.set()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_somebody_chose_is_left() -> None:
    assert set_policy_of_threads(os.SCHED_BATCH)
    try:
        process = Process()
        process.use(0.0)
        process.use(1.0)
        process.use(0.0)
    finally:
        set_policy_of_threads(os.SCHED_OTHER)
    assert process.policies == []
