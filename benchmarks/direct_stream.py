"""Baseline of the ring: one process that answers the same HTTP with the same events and no mesh behind it.

Run as a program: `python -m benchmarks.direct_stream PORT`. It shows what HTTP and SSE alone cost.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

from nodes.gateway.config import GatewayConfig
from nodes.gateway.http.bodies import BodyBudget
from nodes.gateway.http.connection import Exchange, HttpConnection, Served


async def answer(exchange: Exchange) -> None:
    """Streams `max_tokens` one-token events, yielding to the loop between them as a server must."""
    body, is_last = b"", False
    while not (is_last or exchange.gone.done()):
        piece, is_last = await exchange.read()
        body += piece
    num_tokens = json.loads(body).get("max_tokens", 16) if body else 1
    exchange.begin(200, [(b"content-type", b"text/event-stream")], None)
    head: dict[str, Any] = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "direct"}
    for number in range(num_tokens):
        event = head | {"choices": [{"index": 0, "text": f"{number % 10}", "finish_reason": None}]}
        exchange.write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())
        await exchange.keeps_up()
        await asyncio.sleep(0)
    last: dict[str, Any] = head | {"choices": [], "usage": {"completion_tokens": num_tokens}}
    exchange.write(f"data: {json.dumps(last, separators=(',', ':'))}\n\ndata: [DONE]\n\n".encode(), more=False)


async def serve(port: int) -> None:
    """Until it is stopped from outside."""
    served = Served(answer, BodyBudget(GatewayConfig(model_name="direct", context_length=1)))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpConnection(served, ("127.0.0.1", 0)), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
