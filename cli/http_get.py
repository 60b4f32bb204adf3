"""Fetches one page of a mesh's gateway, with one deadline for the whole exchange."""

import asyncio
import contextlib
from typing import Final, NamedTuple

import msgspec

_MAX_ANSWER_BYTES: Final = 1 << 16
"""A health page has less than 1 KB; whatever else listens at that port must not fill the memory."""


class _Readiness(msgspec.Struct):
    reasons: list[str] = []


class Page(NamedTuple):
    """What a server has answered."""

    status: int
    body: bytes

    @property
    def reasons(self) -> str:
        """What a health route says is missing; empty if it does not say."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            return "; ".join(msgspec.json.decode(self.body, type=_Readiness).reasons)
        return ""


async def get_page(host: str | None, port: int | None, path: str, timeout_s: float, key: str = "") -> Page:
    """The page at `path`, asked for with an API key unless `key` is empty.

    Raises OSError, ValueError if the server does not speak HTTP, and TimeoutError.
    """
    # A timeout of `http.client` starts anew with each packet: a slow server could hold up a health check for ever.
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            # HTTP/1.0, so that the body ends with the connection and is not chunked.
            authorization = f"Authorization: Bearer {key}\r\n" if key else ""
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n{authorization}\r\n".encode())
            answer = await reader.read(_MAX_ANSWER_BYTES)
            while piece := await reader.read(_MAX_ANSWER_BYTES):
                answer = (answer + piece)[:_MAX_ANSWER_BYTES]
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("it does not speak HTTP")
    return Page(int(words[1]), body)
