"""Actors and supervisors that die or hang, as processes."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error

import pytest

pytestmark = pytest.mark.process

ECHO = ("--model", "echo")


def replaced(host, actor_id, before):
    """The actor's entry once a later incarnation is ready."""

    def look():
        entry = host.ps()[actor_id]
        return entry if entry["epoch"] > before["epoch"] and entry["state"] == "ready" else None

    return host.wait_until(look, f"{actor_id} is replaced", 30.0)


def test_every_actor_is_restarted_after_kill_and_hang(host):
    mesh = host.up(*ECHO, "--mixed", "1")
    before = host.ps()
    for actor_id in sorted(before.keys() - {"supervisor"}):
        os.kill(before[actor_id]["pid"], signal.SIGKILL)
        after = replaced(host, actor_id, before[actor_id])
        assert after["pid"] != before[actor_id]["pid"]
        assert after["epoch"] == before[actor_id]["epoch"] + 1
        assert (after["num_restarts"], after["num_deaths"], after["num_requested_restarts"]) == (1, 1, 0)
        assert (after["num_starts"], after["last_reason"]) == (2, "signal 9 (SIGKILL)")
        assert 0.0 < after["last_reason_age_s"] < 30.0
        host.wait_ready()
        assert host.say(f"without {actor_id}") == f"without {actor_id}"
    assert len(host.sockets()) == 2 * len(before), "the dead leave no sockets"
    hung = host.ps()["worker-mixed-0"]
    os.kill(hung["pid"], signal.SIGSTOP)
    replaced(host, "worker-mixed-0", hung)
    assert not os.path.exists(f"/proc/{hung['pid']}")
    assert host.say("after the hang") == "after the hang"
    assert host.ps()["gateway-0"]["num_restarts"] == 1
    host.ends_well(mesh)


# In CI a supervisor that is told so (`tests/cli/test_keeper.py`), and simulated returns.
@pytest.mark.slow
def test_who_is_refused_for_its_epoch_comes_again_above_the_one_that_is_known(host):
    """As a container does that lost its files while its clock is behind: somebody has been there with a later epoch."""
    host.up(*ECHO, "--mixed", "1")
    known = host.ps()["detokenizer-0"]["epoch"] + 86_400
    config = host.run_directory / "configs" / "detokenizer-0.json"
    command = ["run", "detokenizer", "--actor-id", "detokenizer-7", "--config", str(config)]

    def by_hand(*options):
        host.started.append(subprocess.Popen(host.command(*command, *options), env=host.environment))
        return host.started[-1]

    def joined(epoch):
        host.wait_until(lambda: host.ps().get("detokenizer-7", {}).get("epoch") == epoch, f"epoch {epoch} is there")

    first = by_hand("--epoch", str(known))
    joined(known)
    first.kill()
    refused = host.meshctl(*command)
    assert refused.returncode == 1
    assert f"epoch {known}" in refused.stderr, "the hello or the join is refused"
    by_hand()
    joined(known + 1)
    assert host.say("in the end") == "in the end"


def test_a_pool_that_was_lost_is_made_again_and_mapped_again(host):
    mesh = host.up(*ECHO, "--mixed", "1")
    before = host.ps()
    (segment,) = host.segments()
    os.kill(before["kv-agent-0"]["pid"], signal.SIGSTOP)
    os.unlink(f"/dev/shm/{segment}")
    os.kill(before["kv-agent-0"]["pid"], signal.SIGKILL)
    for actor_id in ("kv-agent-0", "worker-mixed-0", "scheduler-mixed-0"):
        replaced(host, actor_id, before[actor_id])
    host.wait_ready()
    assert host.say("in new memory") == "in new memory"
    host.ends_well(mesh)


def test_a_request_that_kills_its_worker_fails_alone(host):
    mesh = host.up("--model", "echo?step_ms=5&fatal_token=7")
    answers, errors = {}, []

    def say(number):
        text = f"{number} " + "lives on and on " * 20
        answers[number] = host.say(text, max_tokens=200) == text[:200]

    def kill():
        with pytest.raises(urllib.error.HTTPError) as caught:
            host.say("here it comes: \x07, the bell")
        errors.append((caught.value.code, json.loads(caught.value.read())["error"]["code"]))

    threads = [threading.Thread(target=say, args=(number,)) for number in range(6)] + [threading.Thread(target=kill)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [(500, "poisoned_request")]
    assert answers == dict.fromkeys(range(6), True)
    restarts = {actor_id: entry["num_restarts"] for actor_id, entry in host.ps().items() if entry["role"] == "worker"}
    assert sum(restarts.values()) == 3
    host.ends_well(mesh)


# Steps that hang are simulated in CI, where `StepWatch` is broken, too.
@pytest.mark.slow
def test_a_step_past_its_deadline_ends_the_worker_and_in_the_end_the_request(host):
    deadlines = {"KVMESH_ROLES__SCHEDULER__STEP_DEADLINE_S": "1e-6", "KVMESH_ROLES__SCHEDULER__TOKEN_DEADLINE_S": "0"}
    mesh = host.up("--model", "random:tiny-llama", "--served-name", "echo", "--mixed", "1", **deadlines)
    with pytest.raises(urllib.error.HTTPError) as caught:
        host.say("No step can be so quick.", max_tokens=4)
    assert json.loads(caught.value.read())["error"]["code"] == "poisoned_request"
    assert host.ps()["worker-mixed-0"]["num_restarts"] == 3
    assert "has not ended within 1e-06 s" in host.meshctl("logs", "worker-mixed-0").stdout
    host.wait_ready()
    host.ends_well(mesh)


@pytest.mark.slow
def test_while_the_supervisor_stands_still_its_actors_keep_their_leases(host):
    """It renews them for all of its actors, so that the registry has to ask each of them itself."""
    mesh = host.up(*ECHO, KVMESH_ROLES__REGISTRY__LEASE_S="2")
    before = host.ps()
    os.kill(mesh.pid, signal.SIGSTOP)
    try:
        ends = time.monotonic() + 4 * 2.0
        num_asked = 0
        while time.monotonic() < ends:
            assert host.say(f"and still {num_asked}") == f"and still {num_asked}"
            num_asked += 1
        # What dies now is not started again, but it is missed by those who talk with it, and by no one else.
        os.kill(before["detokenizer-0"]["pid"], signal.SIGKILL)
    finally:
        os.kill(mesh.pid, signal.SIGCONT)
    replaced(host, "detokenizer-0", before["detokenizer-0"])
    assert host.say("it moves again") == "it moves again"
    deaths = {actor_id: entry["num_deaths"] for actor_id, entry in host.ps().items() if entry["num_deaths"]}
    assert deaths == {"detokenizer-0": 1}
    assert num_asked > 10
    host.ends_well(mesh)


def test_a_spent_budget_is_loud_and_the_mesh_goes_on(host):
    mesh = host.up(*ECHO, "--detokenizers", "2", KVMESH_SUPERVISION__RESTART_BUDGET="1")

    def given_up():
        """Strikes as soon as there is somebody: a second more, and it would be one who has served well."""
        manifest = json.loads((host.run_directory / "manifest.json").read_text())
        for record in manifest["processes"]:
            if record["actor_id"] == "detokenizer-1":
                with contextlib.suppress(ProcessLookupError):  # the manifest is written a moment after a death
                    # Not SIGKILL, which costs nothing: that is somebody else's doing.
                    os.kill(record["pid"], signal.SIGSEGV)
        return "GIVEN UP" in mesh.log.read_text()

    host.wait_until(given_up, "it is given up")
    entry = host.ps()["detokenizer-1"]
    assert (entry["state"], entry["pid"]) == ("given_up", None)
    assert "signal 11" in entry["reason"]
    assert "signal 11" in entry["last_reason"]
    assert 0.0 < entry["next_start_in_s"] <= 60.0
    assert host.say("one is enough") == "one is enough"
    host.ends_well(mesh)


def left_by_a_dead_supervisor(host, actor_id):
    """The pid of one of its actors, which is stopped and so cannot notice that it is gone; all others have ended."""
    mesh = host.up(*ECHO)
    stopped = host.pids()[actor_id]
    os.kill(stopped, signal.SIGSTOP)
    mesh.kill()
    mesh.wait()
    host.wait_until(lambda: host.processes() == [stopped], "the others have ended")
    return stopped


def test_a_dead_supervisor_takes_its_actors_along_and_the_next_one_sweeps(host):
    stopped = left_by_a_dead_supervisor(host, "worker-decode-0")
    assert host.meshctl("ps").returncode == 3
    again = host.up(*ECHO)
    assert f"removed what an earlier supervisor left: process {stopped} (worker-decode-0)" in again.log.read_text()
    assert host.say("clean again") == "clean again"
    host.ends_well(again)


def test_down_sweeps_after_a_dead_supervisor(host):
    left_by_a_dead_supervisor(host, "kv-agent-0")
    assert host.segments()
    swept = host.meshctl("down")
    assert swept.returncode == 0
    assert "kv-agent-0" in swept.stderr
    host.assert_nothing_left(within_s=1.0)
