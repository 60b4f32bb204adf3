"""`meshctl release` and `resume` while clients are served: memory goes down, nothing is lost, texts stay the same."""

import json
import os
import signal
from pathlib import Path

import pytest

from cli.exit_codes import ExitCode
from tests.process.load import Load

pytestmark = pytest.mark.process

HEADER_BYTES = 4096
QUESTION = "Tell me a story about a lighthouse, and then count to thirty."


def answer(host, number, model):
    return host.say(f"{QUESTION} ({number})", model=model, max_tokens=48, temperature=0, timeout_s=120)


def asking(host, expected, model):
    """As many clients as there are expected answers; each asks its one question again and again."""
    return Load(host, lambda number, _: (answer(host, number, model), expected[number]), len(expected))


def pool_bytes(host):
    found = {path.name.rpartition(".")[2]: path.stat().st_size for path in Path("/dev/shm").glob(f"*{host.name}.*")}
    return {group: size for group, size in found.items() if "making" not in group}


def anonymous_bytes(pid):
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def maps_pool(pid, host):
    return host.name in "".join(
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line
    )


def groups(result):
    assert result.returncode == 0, result.stderr
    return {one["group"]: one for one in json.loads(result.stdout)}


def test_a_group_gives_its_memory_back_and_the_other_one_serves(host):
    host.up("--model", "tiny", "--mixed", "2", "--max-running", "8")
    expected = [answer(host, number, "tiny") for number in range(3)]
    held, worker = pool_bytes(host), host.ps()["worker-mixed-0"]["pid"]
    before = anonymous_bytes(worker)
    assert min(held.values()) > 1 << 20
    assert maps_pool(worker, host)
    with asking(host, expected, "tiny") as load:
        load.more(4)
        found = groups(host.meshctl("release", "mixed-0", "-o", "json"))
        assert (found["mixed-0"]["state"], found["mixed-0"]["weights"]) == ("released", "reload")
        assert pool_bytes(host) == {"mixed-0": HEADER_BYTES, "mixed-1": held["mixed-1"]}
        assert not maps_pool(worker, host)
        assert anonymous_bytes(worker) < before - (4 << 20), "the weights of tiny take some megabytes"
        host.wait_until(lambda: host.ps()["scheduler-mixed-0"]["state"] == "released", "its scheduler waits")
        assert host.ps()["worker-mixed-0"]["state"] == "released"
        load.more(4)
        # Whoever dies meanwhile comes back without memory.
        for actor_id in ("worker-mixed-0", "scheduler-mixed-0", "kv-agent-0"):
            died = host.ps()[actor_id]
            os.kill(died["pid"], signal.SIGKILL)
            back = "ready" if actor_id == "kv-agent-0" else "released"
            host.wait_until(
                lambda died=died, back=back: (
                    (now := host.ps()[died["actor_id"]])["state"] == back and now["epoch"] > died["epoch"]
                ),
                f"{actor_id} is back",
            )
        host.wait_until(
            lambda: groups(host.meshctl("memory", "-o", "json"))["mixed-0"]["state"] == "released", "it stays so"
        )
        assert pool_bytes(host)["mixed-0"] == HEADER_BYTES
        load.more(4)
        assert groups(host.meshctl("resume", "-o", "json"))["mixed-0"]["state"] == "held"
        assert pool_bytes(host) == held
        load.more(4)
    assert load.wrong == []
    assert [host.ps()[one]["state"] for one in ("scheduler-mixed-0", "worker-mixed-0")] == ["ready", "ready"]


@pytest.mark.slow
def test_what_runs_waits_where_no_other_group_is_there(host):
    # From release to resume are three commands, which took longer than a request waits, 15 s, at a load of 12.
    # Echo, of which a wrong page shows: `tiny`, whose weights are dropped above, takes the cores from the commands.
    host.up("--model", "echo?step_ms=5", "--max-running", "8", KVMESH_ROLES__GATEWAY__ROLE_WAIT_S="100")
    expected = [answer(host, number, "echo") for number in range(3)]
    refused = host.meshctl("release", "--keep-weights", "--keep-kv")
    assert (refused.returncode, "nothing to release" in refused.stderr) == (ExitCode.USAGE, True), refused.stderr
    for command in ("release", "resume"):
        unknown = host.meshctl(command, "decod-0")
        assert unknown.returncode == ExitCode.USAGE
        assert "no worker group decod-0; did you mean decode-0" in unknown.stderr
    with asking(host, expected, "echo") as load:
        load.more(4)
        for options in ([], ["--keep-weights"], ["--keep-kv"]):
            found = groups(host.meshctl("release", *options, "-o", "json"))
            assert {one["state"] for one in found.values()} == {"released"}
            is_freed = options != ["--keep-kv"]
            assert all((size == HEADER_BYTES) == is_freed for size in pool_bytes(host).values())
            answered = load.num_answers
            assert groups(host.meshctl("memory", "-o", "json")).keys() == {"prefill-0", "decode-0"}
            # What was on its way to a client when the release was done.
            assert load.num_answers <= answered + len(expected), "nobody is served meanwhile"
            assert {one["state"] for one in groups(host.meshctl("resume", "-o", "json")).values()} == {"held"}
            load.more(4)
    assert load.wrong == []
