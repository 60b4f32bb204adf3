"""What a client can do wrong, against a whole mesh: a clear 4xx that names the parameter, and serving goes on."""

import json
import random
import socket
from typing import Any

import pytest

pytestmark = pytest.mark.process

ECHO = ("--model", "echo", "--context-length", "1024")


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    return mesh_of(*ECHO)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "hello", "max_tokens": 4} | fields


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"model": "echo", "prompt": "\xff\xfe"}', 400, None),
        (b"[" * 100_000, 400, None),
        (completion(prompt=None), 400, "prompt"),
        (completion(prompt={"a": 1}), 400, "prompt"),
        (completion(prompt=[]), 400, "prompt"),
        (completion(prompt=[-1]), 400, "prompt"),
        (completion(prompt=[2**40]), 400, "prompt"),
        (completion(model="gpt-99"), 404, "model"),
        (completion(max_tokens=-1), 400, "max_tokens"),
        (completion(max_tokens="many"), 400, "max_tokens"),
        (completion(max_tokens=10**30), 400, "max_tokens"),
        (completion(temperature=-0.1), 400, "temperature"),
        (completion(temperature=1e9), 400, "temperature"),
        (completion(top_p=-0.1), 400, "top_p"),
        (completion(top_p=1.5), 400, "top_p"),
        (completion(top_k=-7), 400, "top_k"),
        (completion(min_p=2), 400, "min_p"),
        (completion(n=0), 400, "n"),
        (completion(n=10**6), 400, "n"),
        (completion(stop=[""]), 400, "stop"),
        (completion(stop=["x"] * 1000), 400, "stop"),
        (completion(stop=7), 400, "stop"),
        (completion(logit_bias={"zebra": 1}), 400, "logit_bias"),
        (completion(logit_bias={"5": 1e6}), 400, "logit_bias"),
        (completion(seed="x"), 400, "seed"),
        (completion(stream="yes"), 400, "stream"),
        (completion(prompt="x" * 3000), 400, "prompt"),
        (completion(prompt=[70] * 5000), 400, "prompt"),
    ],
)
def test_completion_is_refused(mesh: Any, body: Any, status: int, param: str | None) -> None:
    got, answer = mesh.post("/v1/completions", body)
    assert got == status, answer
    assert set(answer) == {"error"}
    assert {"message", "type", "param", "code"} <= set(answer["error"])
    if param is not None:
        assert str(answer["error"]["param"]).partition(".")[0].partition("[")[0] == param
    assert_serving(mesh)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
    ],
)
def test_messages_are_refused(mesh: Any, messages: Any) -> None:
    status, answer = mesh.post("/v1/chat/completions", {"model": "echo", "messages": messages})
    assert status == 400
    assert answer["error"]["param"].startswith("messages")
    assert_serving(mesh)


def test_unknown_fields_are_accepted(mesh: Any) -> None:
    status, answer = mesh.post("/v1/completions", completion(a_field_of_next_year={"x": [1]}))
    assert status == 200, answer


def test_ten_megabytes_are_refused(mesh: Any) -> None:
    status, answer = mesh.post("/v1/completions", completion(prompt="x" * 10_000_000))
    assert status in (400, 413)
    assert answer["error"]["message"]
    assert_serving(mesh)


def test_garbage_on_every_mesh_socket(mesh: Any) -> None:
    """Bytes that are no ZeroMQ, and ZeroMQ frames that are no envelope: refused, and nobody dies."""
    import zmq

    before = {actor["actor_id"]: actor["pid"] for actor in mesh.ps()}
    context = zmq.Context()
    draw = random.Random(1)
    for actor in mesh.ps():
        endpoints = actor["endpoint"]
        for endpoint in (endpoints["control"], endpoints["data"]):
            if endpoint.startswith("ipc://"):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect(endpoint.removeprefix("ipc://"))
                    raw.send(draw.randbytes(500))
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 200
            dealer.connect(endpoint)
            for _ in range(20):
                dealer.send_multipart([draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(1, 6))])
            dealer.send(b"\x00" * 100_000)
            dealer.close()
    context.term()
    assert_serving(mesh)
    assert {actor["actor_id"]: actor["pid"] for actor in mesh.ps()} == before
    refused = sum(value for name, value in mesh.metrics().items() if name.startswith("mesh_frames_refused_total"))
    assert refused >= 20


def assert_serving(mesh: Any) -> None:
    status, answer = mesh.post("/v1/completions", {"model": "echo", "prompt": "are you there", "temperature": 0})
    assert status == 200, json.dumps(answer)
    assert answer["choices"][0]["text"] == "are you there"
