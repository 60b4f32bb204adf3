"""What a client can do wrong, against a whole mesh: a clear 4xx that names the parameter, and serving goes on."""

import json
import random
import socket
from typing import Any

import pytest

pytestmark = pytest.mark.process


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "hello", "max_tokens": 4} | fields


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"model": "echo", "prompt": "\xff\xfe"}', 400, None),
        (b"[" * 100_000, 400, None),
        (completion(prompt=[-1]), 400, "prompt"),
        (completion(model="gpt-99"), 404, "model"),
        (completion(logit_bias={"zebra": 1}), 400, "logit_bias"),
        (completion(max_tokens=10**30), 400, "max_tokens"),
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


def test_messages_are_refused(mesh: Any) -> None:
    status, answer = mesh.post("/v1/chat/completions", {"model": "echo", "messages": [{"role": "user"}]})
    assert (status, answer["error"]["param"]) == (400, "messages.0.content")
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
