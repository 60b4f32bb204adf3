"""Baseline of the ring: one process that answers the same HTTP with the same events and no mesh behind it.

Run as a program: `python -m benchmarks.direct_stream PORT`. It shows what uvicorn, httptools and SSE alone cost.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Streams `max_tokens` one-token events, yielding to the loop between them as a server must."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    num_tokens = json.loads(body).get("max_tokens", 16) if body else 1
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "direct"}
    for number in range(num_tokens):
        event = head | {"choices": [{"index": 0, "text": f"{number % 10}", "finish_reason": None}]}
        data = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await asyncio.sleep(0)
    last = head | {"choices": [], "usage": {"completion_tokens": num_tokens}}
    data = f"data: {json.dumps(last, separators=(',', ':'))}\n\ndata: [DONE]\n\n".encode()
    await send({"type": "http.response.body", "body": data})


if __name__ == "__main__":
    uvicorn.run(
        application, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", loop="uvloop", http="httptools"
    )
