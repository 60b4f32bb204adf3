"""OpenAI-compatible servers on loopback, as good or as bad as a test wants them."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"completion_tokens": 5, "prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2}}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(words: str) -> bytes:
    return event(choices=[{"index": 0, "text": words}])


WHOLE = HEAD + b"".join(map(chunk, (text("a"), text("b"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n", b"")))
MODELS = b'HTTP/1.1 200 OK\r\nContent-Length: 27\r\n\r\n{"data": [{"id": "model"}]}'

Answer = tuple[bytes, str]
"""What is sent, and what follows: `close`, `reset` or `stall`."""


class StreamingServer:
    """`answers` says how each request in turn is answered; `bodies` are those that were sent."""

    def __init__(self, answer: Callable[[int], Answer]) -> None:
        self.port = 0
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self._answer = answer
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET"):
            writer.write(MODELS)
            writer.close()
            return
        (length,) = [int(line.split(":")[1]) for line in head.splitlines() if line.startswith("Content-Length")]
        self.bodies.append(json.loads(await reader.readexactly(length)))
        answer, follows = self._answer(len(self.bodies) - 1)
        writer.write(answer)
        if follows == "reset":
            await writer.drain()
            # Closing with linger 0 sends a reset.
            peer: socket.socket = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if follows != "stall":
            writer.close()

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            # Or the loop may end before the connection does. What was reset, or is not read, ends by itself.
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)


@contextlib.asynccontextmanager
async def streaming(answer: Callable[[int], Answer] = lambda _: (WHOLE, "close")) -> AsyncIterator[StreamingServer]:
    """A server while the context lasts."""
    streaming_server = StreamingServer(answer)
    server = await asyncio.start_server(streaming_server.serve, "127.0.0.1", 0)
    streaming_server.port = server.sockets[0].getsockname()[1]
    try:
        yield streaming_server
    finally:
        server.close()
        await streaming_server.close()
