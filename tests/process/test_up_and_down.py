"""Whole meshes of processes with the echo model: start, stop by every way, and what they say when they cannot."""

import json
import os
import pty
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

STOPPED = 30.0
ECHO = ("--model", "echo")


def measured(actors):
    return actors if all(entry["memory_bytes"] for entry in actors.values()) else None


def test_foreground_life(host):
    # 256 pages of 16 tokens and the padding page: less than echo was made for.
    mesh = host.up(*ECHO, "--kv-pages", "257")
    # The gateway serves as soon as one way round the ring is there; the ready line waits for every actor.
    host.wait_until(lambda: "ready at" in mesh.log.read_text(), "the ready line")
    text = mesh.log.read_text()
    # Figures are asked for within a second, which an actor may let pass on a busy machine.
    actors = host.wait_until(lambda: measured(host.ps()), "figures of every actor")
    for actor_id in actors.keys() - {"supervisor"}:
        assert f"{actor_id} " in text
    assert f"curl {host.url}" in text
    [context] = [line for line in text.splitlines() if line.startswith("KV: ")]
    assert "4,096 tokens" in context
    # Without max_tokens, as the line that was printed: the answer may take what is left of that context.
    assert host.say("hello mesh") == "hello mesh"
    assert set(actors["gateway-0"]) >= {"role", "actor_id", "pid", "epoch", "endpoint", "state"}
    assert {entry["state"] for entry in actors.values()} == {"ready"}
    assert all(entry["memory_bytes"] > 1 << 20 and entry["cpu_cores"] >= 0 for entry in actors.values())
    scheduler = actors["scheduler-decode-0"]
    assert (scheduler["group"], scheduler["phase"], scheduler["num_running"]) == ("decode-0", "decode", 0)
    assert actors["worker-decode-0"]["phase"] == "decode"
    assert (scheduler["mesh"], scheduler["url"], scheduler["num_starts"]) == (host.name, host.url, 1)
    assert len({entry["pid"] for entry in actors.values()}) == len(actors) == 10
    assert all(entry["endpoint"]["control"].startswith("ipc://") for entry in actors.values())
    assert host.segments()

    table = host.meshctl("ps").stdout.splitlines()
    assert len(table) == 13
    assert table[:2] == [f"{host.name}: echo at {host.url}, ready", context]
    assert table[2].split()[:2] == ["ACTOR", "ROLE"]
    with urllib.request.urlopen(host.url + "/v1/models") as response:
        assert json.loads(response.read())["data"][0]["max_model_len"] == 4096
    with urllib.request.urlopen(host.url + "/events/mesh") as response:
        event = json.loads(response.readline().removeprefix(b"data: "))
    assert event["context"] == context
    histories = {sample["actor"] for sample in event["samples"]}
    assert histories == {one["id"] for one in event["actors"] if one["role"] in ("gateway", "scheduler")}
    assert host.meshctl("chat", "good day").stdout == "good day\n"
    assert '"event":"joined"' in host.meshctl("logs", "gateway-0").stdout

    again = host.meshctl("up", *ECHO)
    assert again.returncode == 4
    assert "is running" in again.stderr
    assert f"meshctl down --name {host.name}" in again.stderr
    taken = host.meshctl("up", *ECHO, "--port", str(host.port), "--name", f"{host.name[:20]}-2", name=False)
    assert taken.returncode == 7
    assert "cannot be listened on" in taken.stderr
    assert host.say("still here") == "still here"

    mesh.send_signal(signal.SIGINT)
    assert mesh.wait(STOPPED) == 0
    host.assert_nothing_left()
    order = [line.split()[2] for line in mesh.log.read_text().splitlines() if line.endswith("draining")]
    assert order[0] == "gateway-0"
    assert order[-1] == "registry"


def test_background_and_down(host):
    pools = host.base / "pools"
    where = {"KVMESH_KV__DIRECTORY": str(pools)}
    refused = host.meshctl("up", "-d", *ECHO, "--port", str(host.port), **where)
    assert refused.returncode == 5
    assert f"KV pools cannot be placed in {pools}" in refused.stderr
    pools.mkdir()
    started = host.meshctl("up", "-d", *ECHO, "--port", str(host.port), **where)
    assert started.returncode == 0, started.stderr
    assert len(list(pools.iterdir())) == 2
    assert not host.segments(), "they lie where they were asked to"
    assert started.stdout == f"{host.name}\n"
    assert "ready at" in started.stderr
    assert host.say("from afar") == "from afar"
    # Long enough to be prefilled elsewhere.
    assert host.say("word " * 400, max_tokens=20) == "word " * 4
    (call,) = json.loads(host.meshctl("trace", "-o", "json").stdout)
    assert (call["status"], call["finish"], call["attempts"]) == (200, "length", 1)
    (spans,) = call["spans"].values()
    # Each of its stages may have taken less than the loop's clock tells.
    assert (spans[0]["begin_s"], spans[-1]["end_s"]) == (0, call["total_s"])
    told = {}
    for note in call["notes"]:
        told.setdefault(note["actor_id"], []).append(note["text"])
    assert told["gateway-0"][0] == "a tokenizer is asked (prompts: 1)"
    assert "attempt 0 is taken" in told["gateway-0"]
    assert any("is computed" in text for text in told["worker-prefill-0"])
    assert any("is computed" in text for text in told["worker-decode-0"]), "it drew, and noted no prompt"
    assert any("bytes over shm" in text for text in told["kv-agent-0"])
    assert "the text ends" in told["detokenizer-0"][-1]
    assert all(note["error_s"] == 0 for note in call["notes"]), "one host has one clock"
    marks = json.loads(host.meshctl("trace", call["request_id"], "-o", "chrome").stdout)["traceEvents"]
    assert told.keys() <= {mark["tid"] for mark in marks if "tid" in mark}
    os.kill(host.ps()["worker-decode-0"]["pid"], signal.SIGKILL)
    killed = 'mesh_supervisor_deaths_total{actor="worker-decode-0",reason="SIGKILL",role="worker"} 1.0'
    host.wait_until(lambda: killed in host.metrics(), "the death is counted")
    host.wait_until(lambda: host.ps()["worker-decode-0"]["state"] == "ready", "it is back")
    stopped = host.meshctl("down")
    assert stopped.returncode == 0, stopped.stderr
    host.assert_nothing_left(within_s=2.0)
    assert not list(pools.iterdir())
    lines = [json.loads(line) for line in (host.run_directory / "logs" / "supervisor.log").read_text().splitlines()]
    (died, *_) = told = [line for line in lines if line.get("peer") == "worker-decode-0" and line["level"] == "warning"]
    assert [line["event"] for line in told] == ["actor_died", "actor_restarts"], "the start pipe is closed by then"
    assert (died["cause"], died["reason"]) == ("SIGKILL", "signal 9 (SIGKILL)")
    assert {"mesh_ready", "mesh_stops", "mesh_stopped"} <= {line["event"] for line in lines}
    assert host.meshctl("down").returncode == 3
    assert host.meshctl("ps").returncode == 3
    assert "joined" in host.meshctl("logs", "worker-decode-0").stdout, "logs outlive the mesh"
    ended = host.meshctl("trace", call["request_id"])
    assert f"{call['request_id']}  {call['route']}  status 200" in ended.stdout, "and so do calls"
    assert "is not running" in ended.stderr
    assert "worker-prefill-0       tokens 0 to" in ended.stdout, "and what was noted of them"
    assert host.meshctl("trace", "nobody").returncode == 2


def test_a_closed_terminal(host):
    pid, master = pty.fork()
    if pid == 0:
        os.execve(sys.executable, host.command("up", *ECHO, "--port", str(host.port)), host.environment)
    output = []

    def read():
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:
                return
            if not data:
                return
            output.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        host.wait_ready()
        host.wait_until(lambda: b"ready at" in b"".join(output), "the ready line")
        # What a terminal does when it goes: the session's processes get SIGHUP, and writing to it fails.
        os.kill(pid, signal.SIGHUP)
    finally:
        host.wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the supervisor is gone", STOPPED)
        reader.join()
        os.close(master)
    host.assert_nothing_left()


def test_interrupted_while_starting(host):
    mesh = host.up(*ECHO, wait=False)
    host.wait_until(lambda: (host.run_directory / "manifest.json").exists(), "it begins")
    mesh.send_signal(signal.SIGINT)
    assert mesh.wait(STOPPED) == 130
    host.assert_nothing_left()


def test_the_second_signal_forces(host):
    mesh = host.up("--model", "echo?step_ms=500")
    with socket.create_connection(("127.0.0.1", host.port)) as client:
        body = b'{"model": "echo", "stream": true, "messages": [{"role": "user", "content": "' + b"x" * 200 + b'"}]}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        assert b"200 OK" in client.recv(4096)
        mesh.send_signal(signal.SIGINT)
        host.wait_until(lambda: "gateway-0              draining" in mesh.log.read_text(), "the drain begins")
        with pytest.raises(subprocess.TimeoutExpired):
            mesh.wait(1.5)
        mesh.send_signal(signal.SIGINT)
        mesh.wait(10.0)
    host.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--model", "/nowhere/model"), 6, "/nowhere/model"),
        ((*ECHO, "--host", "203.0.113.1"), 7, "cannot be listened on"),
    ],
)
def test_what_cannot_be_started_says_so(host, options, code, words):
    # In the background too: once for what the plan finds and once for what the supervisor does. Each costs an `up`.
    for extra in ((), ("-d",)):
        failed = host.meshctl("up", *options, *extra)
        assert failed.returncode == code, failed.stderr
        assert words in failed.stderr
        assert "why:" in failed.stderr or "do:" in failed.stderr
        assert "Traceback" not in failed.stderr
        host.assert_nothing_left(within_s=1.0)


def test_a_damaged_model_that_only_its_actor_sees(host):
    model = host.base / "model"
    shutil.copytree(Path(__file__).parents[2] / "nodes" / "bundled" / "tiny", model)
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    failed = host.meshctl("up", "--model", str(model), "--port", str(host.port))
    assert failed.returncode == 6, failed.stderr
    assert "tokenizer.json cannot be loaded" in failed.stderr
    assert "Traceback" not in failed.stderr
    host.assert_nothing_left()


@pytest.mark.slow
def test_every_printed_line_runs_alone(host):
    printed = host.meshctl("up", *ECHO, "--mixed", "1", "--port", str(host.port), "--dry-run")
    assert printed.returncode == 0
    lines = [shlex.split(line) for line in printed.stdout.splitlines()]
    assert all(words[0] == "meshctl" for words in lines)
    for number, words in enumerate(lines):
        with (host.base / f"alone-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli", *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=host.environment,
            )
        host.started.append(process)
    host.wait_ready()
    assert host.say("no supervisor") == "no supervisor"
    for process in reversed(host.started):
        process.terminate()
    assert [process.wait(STOPPED) for process in host.started] == [0] * len(lines)
    assert host.processes() == []
    assert host.segments() == []
    assert host.sockets() == []


def test_one_process_may_ask_the_supervisor_again_and_again(host):
    """Each time as somebody else: who comes under an identity that is just leaving is never welcomed."""
    host.up(*ECHO)
    asks = (
        "from cli.client import find_mesh\n"
        f"mesh = find_mesh({host.name!r})\n"
        "print(sum(bool(mesh.actors()) for _ in range(40)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", asks], env=host.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "40\n", done.stderr
