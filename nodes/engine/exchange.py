"""One request to the routes of an engine's own gateway: what HTTP would carry, without HTTP.

The routes see an exchange at the level of ASGI, as from a connection: a body, and somebody who reads what they write.
So an engine has no form of its own for bodies, answers and errors.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from nodes.engine.event_buffer import EventBuffer
from nodes.gateway.errors import ApiError, BadRequest, Internal, TimedOut, TooManyRequests, Unavailable
from nodes.gateway.http.call import PIECES, HttpCall

_EVENT: Final = b"data: "
_DONE: Final = b"[DONE]"
_BY_TYPE: Final = {kind.type: kind for kind in (BadRequest, TooManyRequests, Internal, Unavailable, TimedOut)}


class Exchange:
    """A request with `body` to `path`. A streamed answer goes into `events`, a whole one is `answer` in the end.

    `shown` makes of an event what readers see. After `has_begun` an error is part of the stream, and final.
    Implements `nodes.gateway.http.call.PieceWriter`.
    """

    def __init__(
        self, path: str, body: bytes, id_prefix: str, events: EventBuffer, shown: Callable[[Any], Any] | None = None
    ) -> None:
        self.path = path
        self.answer = b""
        self.has_begun = False
        self._events = events
        self._shown = shown
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path,
            "headers": [(b"content-type", b"application/json")], "extensions": {PIECES: {"writer": self}},
        }  # fmt: skip
        self.call = HttpCall(scope, self._receive, self._send, id_prefix)

    @property
    def can_write(self) -> bool:
        return self._events.has_room

    @property
    def is_paused(self) -> bool:
        return not self._events.has_room

    @property
    def has_body(self) -> bool:
        return self._body is not None

    def write(self, data: bytes) -> None:
        """Raises the `ApiError` that the piece ends with, if the stream broke."""
        for event in data.split(b"\n\n"):
            if event.startswith(_EVENT) and (said := event.removeprefix(_EVENT)) != _DONE:
                decoded: Any = msgspec.json.decode(said)
                if "error" in decoded:
                    raise _error_of(decoded["error"])
                self._events.put(decoded if self._shown is None else self._shown(decoded))

    async def _receive(self) -> Any:
        body, self._body = self._body, None
        if body is None:
            await self.gone
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            return
        body = message.get("body", b"")
        if not self.has_begun:
            self.answer += body
            return
        self.write(body)
        # As a connection whose client does not read: what comes meanwhile is written in one piece.
        await self._events.room()


def _error_of(said: dict[str, Any]) -> ApiError:
    error = _BY_TYPE.get(said["type"], Internal)(said["message"], param=said["param"], code=said["code"])
    error.is_logged = True
    return error
