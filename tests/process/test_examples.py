"""The examples, as processes beside a mesh: peers of their own kind that come, serve, outlive the registry, and go."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"


class Example:
    """One of them running; `text` is what it has printed."""

    def __init__(self, host, file, *arguments):
        self.log = host.base / f"example-{len(host.started)}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / file), *arguments, "--name", host.name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=host.environment,
            )
        host.started.append(self.process)

    @property
    def text(self):
        return self.log.read_text()

    def says(self, text):
        assert self.process.poll() is None, f"it has ended: {self.text}"
        return text in self.text

    def ends(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def ask(host, text, actor_id="words-0", wait_s=10):
    """What `words.py ask` prints, its exit code and its log."""
    options = ["--name", host.name, "--actor-id", actor_id, "--wait", str(wait_s)]
    command = [sys.executable, str(EXAMPLES / "words.py"), "ask", *options, text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=host.environment, check=False)
    return done.stdout.strip(), done.returncode, done.stderr


def warnings(text):
    return [line for line in text.splitlines() if '"level":"warning"' in line or '"level":"error"' in line]


def test_a_peer_of_zeromq_and_messagepack_alone_is_a_member_like_any_other(host):
    host.up("--model", "echo")
    peer = Example(host, "plain_peer.py")
    host.wait_until(lambda: peer.says("tokens [104, 105] of 'hi', and 'hi' of these"), "it has asked the tokenizer")
    answer, code, log = ask(host, "one two three")
    assert re.fullmatch(r"words-0#\d+ counts 3", answer)
    assert code == 0
    assert [line for line in warnings(log) if "ending" not in line] == []
    # The supervisor's view follows the registry's: whom another member finds, it may be told of a moment later.
    found = host.wait_until(lambda: (actors := host.ps()).get("words-0") and actors, "the supervisor lists it")
    assert (found["words-0"]["role"], found["words-0"]["supervised"]) == ("custom", False)
    assert all(entry["supervised"] for actor_id, entry in found.items() if actor_id != "words-0")
    metrics = host.metrics()
    assert 'words_counted_total{actor="words-0",role="custom"} 1.0' in metrics
    command = [sys.executable, str(EXAMPLES / "plain_peer.py"), "--name", host.name, "--actor-id", "gateway-0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=host.environment, check=False)
    assert done.returncode == 1
    assert "registry refuses gateway-0, no_proof: gateway-0 is already an actor of the mesh" in done.stderr
    before = host.ps()["registry"]["pid"]
    os.kill(before, signal.SIGKILL)
    host.wait_until(lambda: host.ps()["registry"]["pid"] not in (None, before), "another registry")
    host.wait_until(lambda: ask(host, "it is still there")[0].endswith("counts 4"), "it has joined the next registry")
    assert peer.ends() == 0
    host.wait_until(lambda: 'actor="words-0"' not in host.metrics(), "nobody counts it a member any more")
    assert not [name for name in host.sockets() if name.startswith("words-0")]
    assert host.meshctl("down").returncode == 0
    host.assert_nothing_left()
    noise = [entry for path in (host.run_directory / "logs").glob("*.log") for entry in warnings(path.read_text())]
    assert [entry for entry in noise if "words-0" in entry or "asker-" in entry] == []


def test_what_the_sdk_makes_serves_and_watches(host):
    host.up("--model", "echo")
    served, watch = Example(host, "words.py", "serve"), Example(host, "cache_watch.py")
    answer = host.wait_until(lambda: (found := ask(host, "a b c d"))[1] == 0 and found[0], "it answers")
    assert answer.endswith("counts 4")
    host.wait_until(lambda: "scheduler-decode-0: 0 stored" in watch.text, "it has the snapshot")
    assert host.say(" ".join(map(str, range(100))), max_tokens=4)
    host.wait_until(lambda: re.search(r"scheduler-decode-0: [1-9]\d* stored", watch.text), "what decode has cached")
    answer, code, _ = ask(host, "anybody", "nobody-0", wait_s=1)
    assert (answer, code) == ("nobody-0 is not a member of the mesh", 1)
    # A later incarnation of either kind takes the place of the one that is there, which is told so and ends.
    plain = Example(host, "plain_peer.py")
    assert served.process.wait(30) == 0
    again = Example(host, "words.py", "serve")
    assert plain.process.wait(30) == 1
    assert ask(host, "a b")[0].endswith("counts 2")
    assert (again.ends(), watch.ends()) == (0, 0)
    assert host.meshctl("down").returncode == 0
    host.assert_nothing_left()


def test_an_actor_under_seeded_faults_fails_the_same_way_each_time():
    def storm(seed):
        command = [sys.executable, str(EXAMPLES / "faults.py"), seed]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    first = storm("3")
    assert re.search(r"'ok': \d\d\b", first)
    assert (storm("3"), storm("4") == first) == (first, False)


OF_THEIR_OWN = {"faults.py", "engine.py", "lm_eval_engine.py"}
"""Those that need no mesh to be there: one simulates, the others start one."""


@pytest.mark.parametrize("file", sorted({path.name for path in EXAMPLES.glob("*.py")} - OF_THEIR_OWN))
def test_without_a_mesh_it_says_what_to_do(host, file):
    command = [sys.executable, str(EXAMPLES / file), *(["serve"] if file == "words.py" else [])]
    environment = {**host.environment, "KVMESH_NAME": host.name}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 1
    assert f"no mesh {host.name} runs here" in done.stderr
    assert "start one with `meshctl up`" in done.stderr
    assert "Traceback" not in done.stderr
