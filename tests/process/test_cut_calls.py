"""Calls whose gateway is killed under them: `meshctl trace` knows them by every name, and how far they had come."""

import contextlib
import http.client
import json
import os
import signal

import pytest

pytestmark = pytest.mark.process

SLOW_ECHO = ("--model", "echo?step_ms=50", "--mixed", "1")


@contextlib.contextmanager
def streaming(host, name):
    """A stream that is amid its output, and would go on for a minute."""
    connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=30)
    try:
        body = {"model": "echo", "prompt": f"{name} " * 200, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        headers = {"content-type": "application/json", "x-request-id": name}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        while b'"text"' not in answer.readline():
            assert not answer.isclosed()
        yield answer
    finally:
        connection.close()


def assert_cut(host, answer, name, reason, last=("output",)):
    """It is found by the client's name and by ours, with its stages, who died, and what others noted."""
    ours = answer.headers["x-kvmesh-request-id"]
    told = host.meshctl("trace", name, "-o", "json")
    (call,) = json.loads(told.stdout)
    assert (call["request_id"], call["client_id"], call["status"]) == (ours, name, 0)
    assert (call["code"], call["route"], call["attempts"]) == ("gateway_died", "/v1/completions", 1)
    (death,) = call["deaths"]
    assert (death["actor"], death["reason"], death["at_s"]) == ("gateway-0", reason, call["total_s"])
    (spans,) = call["spans"].values()
    assert spans[-1]["name"] in last
    assert 0 < call["first_token_s"] <= call["total_s"]
    noted = {note["actor_id"] for note in call["notes"]}
    assert {"gateway-0", "scheduler-mixed-0", "worker-mixed-0", "detokenizer-0"} <= noted
    shown = host.meshctl("trace", ours)
    assert f"{ours}  /v1/completions  not answered whole, gateway_died" in shown.stdout
    assert f"gateway-0 died: {reason}" in shown.stdout
    assert ours in host.meshctl("trace", "--last", "5").stdout


def test_a_call_of_a_killed_gateway_has_its_line(host):
    mesh = host.up(*SLOW_ECHO)
    assert host.say("one that ends well") == "one that ends well"
    with streaming(host, "mine-1") as answer:
        before = host.ps()["gateway-0"]
        os.kill(before["pid"], signal.SIGKILL)
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert b"[DONE]" not in answer.read()
        host.wait_until(lambda: host.ps()["gateway-0"]["epoch"] > before["epoch"], "it is replaced")
        host.wait_ready()
        assert_cut(host, answer, "mine-1", "signal 9 (SIGKILL)")
    # Those that ended are not told again.
    log = (host.run_directory / "requests" / "gateway-0.jsonl").read_text()
    # An empty line ends what the incarnation before may have left of one.
    lines = [json.loads(line) for line in log.splitlines() if line]
    assert [line["code"] for line in lines if line.get("code")] == ["gateway_died"]
    assert len({line["request_id"] for line in lines}) == len(lines)
    host.ends_well(mesh)
    assert not list((host.run_directory / "requests").glob("*.open"))


def test_a_call_of_a_gateway_that_was_killed_with_its_supervisor_is_told(host):
    """As when a machine runs out of memory: nobody was there who could write it down."""
    mesh = host.up(*SLOW_ECHO)
    with streaming(host, "mine-2") as answer:
        gateway = host.ps()["gateway-0"]["pid"]
        # Else it would notice, and end its calls by itself.
        os.kill(gateway, signal.SIGSTOP)
        mesh.kill()
        mesh.wait(30)
        os.kill(gateway, signal.SIGKILL)
        reason = "it ended with its supervisor"
        # When it died nobody knows: what it noted last is that there is output, or that some was written.
        assert_cut(host, answer, "mine-2", reason, last=("ways", "output"))
        # The next mesh of that name has its line, and nothing else of it.
        host.up(*SLOW_ECHO)
        assert_cut(host, answer, "mine-2", reason, last=("ways", "output"))
    (call,) = json.loads(host.meshctl("trace", "--last", "5", "-o", "json").stdout)
    assert call["client_id"] == "mine-2"
    assert not list((host.run_directory / "requests").glob("*.open"))
