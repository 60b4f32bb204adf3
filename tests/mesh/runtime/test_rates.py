"""How fast totals rise, and what a process uses."""

import os
import time
from pathlib import Path

import pytest

from mesh.runtime.process_usage import process_age_s, process_usage
from mesh.runtime.rates import Rates


def test_the_mean_of_the_last_ten_seconds() -> None:
    rates = Rates()
    assert rates.per_second(0.0, {"a": 5.0}) == {"a": 0.0}
    for second in range(21):
        # Two a second, and ten from the tenth on.
        rates.sample(second, {"a": 2.0 * second if second < 10 else 20.0 + 10.0 * (second - 10)})
    assert rates.per_second(20.0, {"a": 120.0}) == {"a": 10.0}
    assert rates.per_second(25.0, {"a": 120.0}) == {"a": 100.0 / 15}, "nothing was sampled since"


def test_a_young_actor_has_the_mean_of_its_life_and_new_totals_count_from_nothing() -> None:
    rates = Rates()
    rates.sample(100.0, {})
    assert rates.per_second(104.0, {"late": 8.0}) == {"late": 2.0}
    assert rates.per_second(100.0, {"late": 8.0}) == {"late": 0.0}


def test_what_a_process_uses_rises_with_what_it_does() -> None:
    before = process_usage()
    ends = time.process_time() + 0.02
    while time.process_time() < ends:
        pass
    block = bytearray(b"x" * (32 << 20))
    after = process_usage()
    assert after.cpu_s - before.cpu_s >= 0.02
    assert after.memory_bytes - before.memory_bytes > len(block) // 2


def test_a_process_is_as_old_as_its_fork() -> None:
    begins = time.monotonic()
    before = process_age_s()
    readable, writable = os.pipe()
    if not (child := os.fork()):
        os.write(writable, f"{process_age_s():.2f}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(readable) as told:
        os.close(writable)
        age_s = float(told.read())
    took_s = time.monotonic() - begins
    assert age_s <= took_s + 0.02, "and not as old as its parent"
    assert before <= process_age_s() <= before + took_s + 0.02


def test_without_a_descriptor_a_process_still_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", fail)
    usage = process_usage()
    assert usage.cpu_s > 0.0
    assert usage.memory_bytes is None
    assert process_age_s() == 0.0
