"""Clients that leave: everything that worked for them is free again."""

import asyncio
import json
from typing import Any

import pytest

from tests.serving.held import assert_nothing_held

pytestmark = pytest.mark.process

DISAGGREGATED = ("--model", "echo?step_ms=5", "--prefill", "1", "--decode", "1", "--local-prefill-max", "0")


async def abort_after(port: int, num_events: int, number: int) -> None:
    """Opens a long stream, reads some of it, and closes the connection without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = f"{number:04d} " + "a long prompt for a long answer " * 8
    body = json.dumps({"model": "echo", "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    seen = 0
    while seen < num_events:
        line = await reader.readline()
        assert line, "the server ended the stream"
        seen += line.startswith(b"data: ")
    writer.close()


@pytest.mark.parametrize("num_streams", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_is_held_after_aborted_streams(mesh_of: Any, num_streams: int) -> None:
    mesh = mesh_of(*DISAGGREGATED)

    async def storm() -> None:
        limit = asyncio.Semaphore(32)

        async def one(number: int) -> None:
            async with limit:
                await abort_after(mesh.port, number % 7, number)

        await asyncio.gather(*(one(number) for number in range(num_streams)))

    asyncio.run(storm())
    assert_nothing_held(mesh)
    assert "Traceback" not in mesh.logs()
    assert all(actor["state"] == "ready" for actor in mesh.ps())
    status, answer = mesh.post("/v1/completions", {"model": "echo", "prompt": "still here", "temperature": 0})
    assert status == 200
    assert answer["choices"][0]["text"] == "still here"
