"""A host with far more to do than it has cores: nobody who merely waits for a core is taken for hung."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process

HOGS_PER_CORE = 16
STARVED_S = 8.0
MESH = ("--model", "tiny", "--prefill", "1", "--decode", "1")


@contextlib.contextmanager
def hogs():
    """Processes that want all the time there is."""
    number = HOGS_PER_CORE * (os.cpu_count() or 1)
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for hog in started:
            hog.kill()
        for hog in started:
            hog.wait()


@pytest.mark.slow
def test_nobody_is_killed_for_waiting_for_a_core(host):
    mesh = host.up(*MESH)
    with hogs():
        until = time.monotonic() + STARVED_S
        num_answers = 0
        while time.monotonic() < until or num_answers == 0:
            assert host.say("What is 37 + 45?", timeout_s=60, model="tiny", temperature=0) == "82"
            num_answers += 1
        actors = host.ps()
    assert {actor_id: entry["num_restarts"] for actor_id, entry in actors.items() if entry["num_restarts"]} == {}
    assert "dying" not in mesh.log.read_text()
    host.ends_well(mesh)
