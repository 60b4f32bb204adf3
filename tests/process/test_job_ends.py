"""The end of a whole mesh by signals to every process at once, as a batch system ends a job, while streams run."""

import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request

import pytest

from tests.process.topologies import SERVING, write_topology

pytestmark = pytest.mark.process

NUM_STREAMS = 4
NUM_TOKENS = 400


class Stream(threading.Thread):
    """One streamed completion, read to its end: its text, finish reasons, usage and error."""

    def __init__(self, url, number, model, surface="/v1/completions", **fields):
        super().__init__()
        self.text, self.finish, self.usage, self.error, self.is_done = "", None, None, None, False
        asked = {"model": model, "prompt": f"{number}, and so on: ", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        asked |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        self.request = urllib.request.Request(
            url + surface, json.dumps(asked | fields).encode(), {"content-type": "application/json"}
        )

    def run(self):
        try:
            with urllib.request.urlopen(self.request, timeout=60) as answer:
                for line in answer:
                    self.take(line.decode().strip().removeprefix("data: "))
        except urllib.error.HTTPError as error:
            self.error = (error.code, error.headers["retry-after"], json.loads(error.read())["error"]["code"])

    def take(self, data):
        if data == "[DONE]":
            self.is_done = True
        elif data:
            event = json.loads(data)
            self.error = event.get("error", self.error)
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", ()):
                self.text += choice["text"]
                self.finish = choice["finish_reason"] or self.finish


def streams_of(head, model):
    streams = [Stream(head.url, number, model) for number in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
    head.wait_until(lambda: all(len(stream.text) > 3 for stream in streams), "all streams run")
    return streams


def ended(streams):
    for stream in streams:
        stream.join(90)
    assert not any(stream.is_alive() for stream in streams), "a stream hangs"
    return streams


def signal_all(number, *hosts):
    """To each process of each host, in the order of their ids: supervisors, zygotes, actors, and actors' children."""
    for pid in sorted(pid for host in hosts for pid in host.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def start(head, others, model, **settings):
    file = head.base / "mesh.toml"
    write_topology(file, head.port, {"head": SERVING, "p": {"prefill": 1}, "d": {"decode": 1}}, model=model, **settings)
    names = {"head": head, **others}
    meshes = [host.up("-f", str(file), "--host", name, wait=False) for name, host in names.items()]
    head.wait_ready(meshes[0])
    head.wait_until(lambda: len(whole(head)) == len(names), "all hosts are there")
    return meshes


def whole(head):
    """Hosts all of whose actors are ready."""
    rows = head.ps().values()
    hosts = {row["host"] for row in rows if row["role"] != "supervisor"}
    return {one for one in hosts if all(row["state"] == "ready" for row in rows if row["host"] == one)}


def all_end_well(hosts, meshes):
    for host, mesh in zip(hosts, meshes, strict=True):
        assert mesh.wait(60) == 0, mesh.log.read_text()
        assert "by force" not in mesh.log.read_text()
        host.assert_nothing_left()
        for log in (host.run_directory / "logs").glob("*.log"):
            deaths = [line for line in log.read_text().splitlines() if '"actor_died"' in line or "zygote_died" in line]
            assert not deaths, deaths


def test_streams_are_finished_when_every_process_of_all_hosts_is_signalled(host, another_host):
    hosts = head, p, d = host, another_host(), another_host()
    meshes = start(head, {"p": p, "d": d}, "echo?step_ms=5", local_prefill_max=0)
    streams = streams_of(head, "echo")
    signal_all(signal.SIGTERM, *hosts)
    late = Stream(head.url, "late", "echo")
    late.start()
    for stream in ended(streams):
        assert (stream.finish, stream.usage["completion_tokens"], stream.error) == ("length", NUM_TOKENS, None)
        assert stream.is_done
    late.join(30)
    all_end_well(hosts, meshes)
    # It came before or after the gateway's own signal, or when nobody listened any more.
    assert late.finish == "length" or late.error is None or late.error[0] == 503, late.error


def test_a_bound_that_ends_is_told_to_every_stream_with_what_was_used(host):
    host.environment["KVMESH_SUPERVISION__DRAIN_TIMEOUT_S"] = "1"
    mesh = host.up("--model", "echo?step_ms=20")
    streams = streams_of(host, "echo")
    signal_all(signal.SIGTERM, host)
    for stream in ended(streams):
        assert (stream.error["code"], stream.finish, stream.is_done) == ("shutting_down", None, False)
        assert 0 < stream.usage["completion_tokens"] < NUM_TOKENS
    all_end_well([host], [mesh])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_to_one_actor_ends_its_host_in_order(host, number):
    mesh = host.up("--model", "echo?step_ms=5")
    streams = streams_of(host, "echo")
    os.kill(host.ps()["worker-decode-0"]["pid"], number)
    for stream in ended(streams):
        assert (stream.finish, stream.error) == ("length", None)
    all_end_well([host], [mesh])
    assert f"stopping: {number.name} to worker-decode-0" in mesh.log.read_text()
