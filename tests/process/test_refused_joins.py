"""Machines that cannot be hosts of a mesh are told why and what to do; who serves notices nothing of them."""

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from cli.exit_codes import ExitCode
from mesh.testing.ports import free_port
from nodes.model_spec.resolve import BUNDLED_DIRECTORY
from tests.process.topologies import SERVING, write_topology

pytestmark = pytest.mark.process

FREE = "127.0.0.3"
REFUSED = (
    (("--host", "head"), ExitCode.BAD_CONFIG, ("has its registry on the host of that name", "another name")),
    (("--host", "e"), ExitCode.ALREADY_RUNNING, ("already has a host e", "meshctl down --host e")),
    (("--device", "cuda"), ExitCode.BAD_CONFIG, ("the device cuda cannot be used", "--device cpu needs none")),
    (("--model", "tiny"), ExitCode.BAD_CONFIG, ("model is tiny", "and echo in the mesh", "without those options")),
    (("--context-length", "784"), ExitCode.BAD_CONFIG, ("context length is 784 here and 4784 in the mesh",)),
    (("--ports", "{first}-{last}"), ExitCode.CANNOT_BIND, ("from {first} to {last} is free", "give this host more")),
    (("--ports", "{first}-{second}"), ExitCode.BAD_CONFIG, ("are too few for host", "listens on 8,")),
    (
        ("--gateways", "1", "--port", "{port}"),
        ExitCode.CANNOT_BIND,
        ("{port} cannot be listened on", "another --port, or"),
    ),
)


# Each refusal by itself is for `tests/cli`; here eight `up` are started beside a mesh of two hosts.
@pytest.mark.slow
def test_hosts_that_cannot_join_are_told_why_and_disturb_nobody(host, another_host):
    file = host.base / "mesh.toml"
    write_topology(file, host.port, {"head": SERVING | {"decode": 1}}, pages=300, model="echo", insecure=True)
    host.up("-f", str(file), "--host", "head")
    token = host.meshctl("keys", "token").stdout.strip()
    e = another_host()
    joined = e.up("--join", token, "--decode", "1", "--host", "e", "--address", "127.0.0.2", wait=False)
    e.wait_until(lambda: "is ready in" in joined.log.read_text(), "e has joined")
    serving = {name: one["pid"] for name, one in host.ps().items()}
    assert serving["worker-decode-0.e"]

    def join(number, options):
        # The name that is given twice is the one that counts.
        plain = ("--join", token, "--decode", "1", "--host", f"h{number}", "--address", FREE)
        return others[number].meshctl("up", *plain, *options)

    with ExitStack() as taken, ThreadPoolExecutor(2) as threads:
        first = free_port()
        # As many as what would run there takes.
        for number in range(first, first + 8):
            taken.enter_context(socket.create_server((FREE, number)))
        values = {"first": first, "second": first + 1, "last": first + 7, "port": host.port}
        others = [another_host() for _ in REFUSED]
        options = [[one.format(**values) for one in options] for options, _, _ in REFUSED]
        results = list(threads.map(join, range(len(REFUSED)), options))
    for result, (options, code, texts) in zip(results, REFUSED, strict=True):
        assert result.returncode == code, (options, result.stdout, result.stderr)
        for text in texts:
            assert text.format(**values) in result.stderr, (options, result.stderr)
        assert "  do:  " in result.stderr
        assert not result.stdout, "an error is all that it says"
        assert "Traceback" not in result.stderr
    assert {name: one["pid"] for name, one in host.ps().items()} == serving
    assert host.say("hello", model="echo") == host.say("hello", model="echo")


def test_a_host_whose_copy_of_the_weights_differs_is_refused(host, another_host):
    copies = [shutil.copytree(BUNDLED_DIRECTORY / "tiny", host.base / where / "model") for where in ("a", "b")]
    with (copies[1] / "model.safetensors").open("r+b") as weights:
        # The last number of the file, in bfloat16.
        weights.seek(-2, 2)
        weights.write(b"\x00\x40")
    file = host.base / "mesh.toml"
    settings = {"model": str(copies[0]), "insecure": True}
    write_topology(file, host.port, {"head": SERVING | {"mixed": 1}}, pages=300, **settings)
    host.up("-f", str(file), "--host", "head")
    token = host.meshctl("keys", "token").stdout.strip()
    plain = ("--join", token, "--decode", "1", "--address", FREE)
    result = another_host().meshctl("up", *plain, "--host", "e", "--model", str(copies[1]))
    assert result.returncode == ExitCode.BAD_CONFIG, result.stderr
    assert "model is model (" in result.stderr
    e = another_host()
    joined = e.up(*plain, "--host", "e", "--model", str(copies[0]), wait=False)
    e.wait_until(lambda: "is ready in" in joined.log.read_text(), "the same weights at another place may join")
