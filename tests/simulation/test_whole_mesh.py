"""Thousands of seeds of faults and deaths: every request ends exactly once with the right text, and nothing is held."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation import hosts
from tests.simulation.scenario import run_seed

FIRST_SEED, NUM_SEEDS = 2, 32
"""A third of a second of a core each, a quarter of them over hosts. Each of FAULTS occurs in them, most of them often:
every planted bug has seeds of its own too, and `make test-all` runs the rest.
"""
NUM_SEEDS_OF_ALL = 10_000
LIMIT_S = 3600
FAULTS = {
    "dropped", "duplicated", "slowed", "reordered", "reset", "cut", "held", "silent_down", "hang", "died in a store",
    "stalled", "died in a step", "died in a copy",
    "died: worker", "died: scheduler", "died: kv", "died: detokenizer", "died: tokenizer", "died: registry",
    "died: gateway", "died: lost pools", "steps of ranks",
    "host cut", "host pause", "host death", "host join", "host drain", "host slander", "remade", "refused",
    "pages by tcp",
    "asks: logprobs", "asks: bad words", "asks: ids", "asks: penalties", "asks: grammar", "old workers",
}  # fmt: skip


def run_seeds(first: int, count: int) -> Counter[str]:
    """Run seeds on all cores; returns how often each fault came. Fails with what failed, and the command to replay."""
    cores = os.cpu_count() or 1
    share = -(-count // cores)
    parts = [(at, min(share, first + count - at)) for at in range(first, first + count, share)]
    command = [sys.executable, "-m", "tests.simulation", "--json"]
    running = [
        subprocess.Popen(
            [*command, "--first", str(at), "--seeds", str(num)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for at, num in parts
    ]  # fmt: skip
    faults: Counter[str] = Counter()
    failures: list[str] = []
    for process in running:
        output, errors = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            failures.append(errors)
        else:
            faults += Counter(json.loads(output))
    assert not failures, "\n".join(failures)[-20_000:]
    return faults


@pytest.mark.timeout(LIMIT_S)
def test_every_request_ends_once_with_its_text() -> None:
    faults = run_seeds(FIRST_SEED, NUM_SEEDS)
    print(f"{NUM_SEEDS} seeds: {dict(faults)}")
    assert set(faults) >= FAULTS, "the world was too kind to show anything"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_every_request_ends_once_with_its_text_for_longer() -> None:
    behind = FIRST_SEED + NUM_SEEDS
    faults = run_seeds(0, FIRST_SEED) + run_seeds(behind, NUM_SEEDS_OF_ALL - behind)
    print(f"{NUM_SEEDS_OF_ALL - NUM_SEEDS} seeds: {dict(faults)}")


def test_a_seed_repeats_itself() -> None:
    assert run_seed(3) == run_seed(3)
    assert hosts.run_seed(7) == hosts.run_seed(7)
