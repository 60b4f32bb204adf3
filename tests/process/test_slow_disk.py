"""A mesh whose agent has a real disk that is slow: the kernel holds back what it reads and writes."""

import os
import re
import tempfile
import time
from pathlib import Path

import pytest

from mesh.testing.slow_disk import NoThrottle, slow_disk
from tests.process.test_disk import complete, figure

pytestmark = [pytest.mark.process, pytest.mark.slow]

PAGE_BYTES = 40960
"""Of `tiny`, 16 tokens."""
NUM_PROMPTS, NUM_PAGES = 8, 26
RATE = 1_000_000
"""Bytes a second. 26 pages then take a second to read, and a tenth of that to compute."""
DRAIN_S = 2.0
PROMPTS = [f"{number} {7 * number}{' has 7 green pears. ' * 60}" for number in range(NUM_PROMPTS)]


@pytest.fixture
def disk():
    """A directory, and what makes the disk below it slow."""
    # Not pytest's, which may be in memory.
    with tempfile.TemporaryDirectory(dir=os.environ.get("SLOW_DISK", "/var/tmp")) as name:
        try:
            with slow_disk(Path(name)) as slow:
                slow.limit(reads=0, writes=0)
                yield Path(name), slow
        except NoThrottle as error:
            pytest.skip(str(error))


def up(host, directory, **environment):
    options = ("--model", "tiny", "--mixed", "1", "--kv-disk", str(directory), "--kv-disk-size", "64MiB")
    return host.up(*options, **environment)


def restores(host):
    """Restores by their outcome."""
    found = re.findall(r'^mesh_scheduler_restores_total{[^}]*outcome="(\w+)"[^}]*} (\S+)$', host.metrics(), re.M)
    return {outcome: float(number) for outcome, number in found}


def test_a_disk_slower_than_the_model_is_read_once_and_texts_are_equal(host, disk):
    directory, slow = disk
    mesh = up(host, directory)
    texts = [complete(host, prompt)[0] for prompt in PROMPTS]
    host.wait_until(lambda: figure(host, "mesh_kv_disk_pages") >= NUM_PROMPTS * NUM_PAGES, "the prompts are stored")
    host.ends_well(mesh)
    mesh = up(host, directory)
    # Says how long computing takes.
    complete(host, "Nobody has asked this before, so that all of it is computed.")
    slow.limit(reads=RATE, writes=0)
    slow.take(host.pids()["kv-agent-0"])
    answers, took = [], []
    for prompt in PROMPTS:
        began = time.monotonic()
        answers.append(complete(host, prompt))
        took.append(time.monotonic() - began)
    assert [text for text, _ in answers] == texts
    told = restores(host)
    # On a busy machine the agent's answer may be late for some, which are computed without a word about the disk.
    assert told["done"] + told["failed"] == 1, told
    assert told["dearer"] >= NUM_PROMPTS / 2, told
    # Its own time says that the disk was as slow as it should be; twice as fast would be a kernel that does nothing.
    assert max(took) >= 0.5 * NUM_PAGES * PAGE_BYTES / RATE
    assert figure(host, "mesh_scheduler_restored_pages_per_second") < 2 * RATE / PAGE_BYTES
    host.ends_well(mesh)


def test_a_mesh_ends_in_its_time_while_a_slow_disk_is_written(host, disk):
    directory, slow = disk
    mesh = up(host, directory, KVMESH_SUPERVISION__DRAIN_TIMEOUT_S=str(DRAIN_S))
    slow.limit(reads=0, writes=RATE // 4)
    slow.take(host.pids()["kv-agent-0"])
    texts = [complete(host, prompt)[0] for prompt in PROMPTS]
    # 208 pages, which take half a minute.
    assert figure(host, "mesh_kv_disk_pages") < NUM_PROMPTS * NUM_PAGES / 2
    began = time.monotonic()
    host.ends_well(mesh)
    took = time.monotonic() - began
    # Six seconds after its time it is killed, and a killed process is gone once the disk has taken what it was given:
    # one run of pages, 2 MiB at most, which are eight seconds.
    assert DRAIN_S < took < DRAIN_S + 6 + 8 + 4, took
    slow.limit(reads=0, writes=0)
    mesh = up(host, directory)
    assert [complete(host, prompt)[0] for prompt in PROMPTS] == texts
    assert figure(host, "mesh_kv_disk_corrupt_pages_total") == 0
    host.ends_well(mesh)
