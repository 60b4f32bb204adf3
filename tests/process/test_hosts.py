"""A mesh of three hosts, which are three run directories and three addresses of the loopback interface."""

import itertools
import json
import os
import signal
import urllib.request

import pytest

from cli.exit_codes import ExitCode
from tests.process.topologies import SERVING, write_topology

pytestmark = pytest.mark.process

QUESTION = "What is 37 + 45?"


def say_where_it_was(head):
    """A call over three hosts, on one axis: what others noted lies inside it, give or take what is said."""
    (call,) = json.loads(head.meshctl("trace", "-o", "json").stdout)
    told = {}
    for note in call["notes"]:
        told.setdefault(note["actor_id"], []).append(note)
    assert told.keys() >= {"gateway-0.head", "scheduler-prefill-0.p", "worker-prefill-0.p", "scheduler-decode-0.d"}
    assert all(note["error_s"] == 0 for note in told["gateway-0.head"]), "its own clock"
    # A message between processes takes milliseconds, of which half is what the placing of a host may be off by.
    for note in told["scheduler-decode-0.d"] + told["worker-prefill-0.p"]:
        assert 0 < note["error_s"] < 1.0, note
        assert -note["error_s"] <= note["at_s"] <= call["total_s"] + note["error_s"], note
    # Two hosts, of which each may be off: the earliest that one can have been, and the latest the other.
    prefilled = [note["at_s"] - note["error_s"] for note in told["worker-prefill-0.p"] if "is computed" in note["text"]]
    came = [note["at_s"] + note["error_s"] for note in told["scheduler-decode-0.d"] if "pages are here" in note["text"]]
    assert min(prefilled) <= came[-1], "pages are pulled after they were computed"


def hosts_of_the_page(head):
    """The first event of the page names the hosts and where each actor is."""
    with urllib.request.urlopen(f"{head.url}/events/mesh", timeout=20) as events:
        line = next(line for line in events if line.startswith(b"data:"))
    actors = {one["id"]: one["host"] for one in json.loads(line.removeprefix(b"data:"))["actors"]}
    assert actors["worker-prefill-0.p"] == "p"
    assert actors["worker-decode-0.d"] == "d"
    assert actors["gateway-0.head"] == "head"


def test_hosts_start_in_any_order_serve_together_and_come_back(host, another_host):
    head, p, d, stray = host, another_host(), another_host(), another_host()
    file = head.base / "mesh.toml"
    hosts = {"head": SERVING, "p": {"prefill": 1}, "d": {"decode": 1}}
    write_topology(file, head.port, hosts, model="tiny", local_prefill_max=0)

    def up(one, name):
        return one.up("-f", str(file), "--host", name, wait=False)

    started = {name: up(one, name) for one, name in ((d, "d"), (p, "p"), (head, "head"))}
    head.wait_ready(started["head"])

    def say():
        return head.say(QUESTION, model="tiny", temperature=0, max_tokens=16)

    answer = say()
    assert "82" in answer
    numbers = itertools.count(10)

    def is_pulled_by_tcp():
        # A new prompt each time, since of one that d has seen nothing is left to pull; until p is there d is alone.
        head.say(f"What is {next(numbers)} + 45?", model="tiny", temperature=0, max_tokens=2)
        return "by tcp" in d.meshctl("ps").stdout

    d.wait_until(is_pulled_by_tcp, "p prefills, and its pages come by tcp")

    say_where_it_was(head)
    hosts_of_the_page(head)

    told = head.meshctl("logs", "worker", "supervisor.p", "-n", "1000", "-o", "json")
    assert {json.loads(line)["actor"] for line in told.stdout.splitlines()} >= {"worker-decode-0.d", "supervisor.p"}

    # A second machine that calls itself d, and one of another mesh: refused, and nobody notices.
    double = stray.meshctl("up", "-f", str(file), "--host", "d")
    assert double.returncode == ExitCode.ALREADY_RUNNING, double.stderr
    assert "already has a host d" in double.stderr
    other = stray.meshctl("up", "-f", str(file), "--host", "d", "--name", "other", name=False)
    assert other.returncode == ExitCode.BAD_CONFIG, other.stderr
    assert f"belongs to the mesh '{head.name}'" in other.stderr
    assert say() == answer

    os.kill(d.ps()["worker-decode-0.d"]["pid"], signal.SIGKILL)
    assert say() == answer

    # The whole host, by its supervisor; it returns without what it had on disk.
    started["d"].kill()
    started["d"].wait()
    d.wait_until(lambda: len(d.processes()) == 0, "its actors have ended with it")
    told = head.meshctl("logs", "worker")
    assert "worker-prefill-0.p" in told.stdout
    assert "the logs of host d are left out" in told.stderr, told.stderr
    again = up(d, "d")
    d.wait_until(lambda: "is ready in" in again.log.read_text() or again.poll() is not None, "d is back")
    assert again.poll() is None, again.log.read_text()
    assert say() == answer
