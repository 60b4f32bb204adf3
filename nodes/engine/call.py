"""One request to the routes of an engine's own gateway, as they see it: a body, and who reads what they write.

So an engine has no form of its own for bodies, answers and errors.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from typing_extensions import override

from nodes.engine.event_buffer import EventBuffer
from nodes.gateway.calls.call import Call
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.errors import ApiError, BodyTooLarge
from nodes.gateway.request_names import RequestNames

_EVENT: Final = b"data: "
_DONE: Final = b"[DONE]"


class EngineCall(Call):
    """A request with `body`. A streamed answer goes into `events`, a whole one is `answer` in the end.

    `shown` makes of an event what readers see. Once `status` is there, an error is the end of a stream.
    """

    def __init__(
        self,
        names: RequestNames,
        observer: HttpObserver,
        body: bytes,
        max_body_bytes: int,
        events: EventBuffer,
        shown: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(names, observer, asyncio.get_running_loop().create_future())
        self.answer = b""
        self.error: ApiError | None = None
        """What it ended with, if that was no answer."""
        self._error_event: Callable[[ApiError], bytes] | None = None
        self._body = body
        self._max_body_bytes = max_body_bytes
        self._events = events
        self._shown = shown

    @override
    async def read_body(self) -> bytes:
        if len(self._body) > self._max_body_bytes:
            raise BodyTooLarge(f"The body is larger than {self._max_body_bytes} bytes.")
        return self._body

    @override
    async def respond(self, status: int, body: bytes) -> None:
        self.status, self.answer = status, body

    @override
    async def start_stream(self, error_event: Callable[[ApiError], bytes] | None = None) -> None:
        self.status, self._error_event = 200, error_event

    @property
    @override
    def is_paused(self) -> bool:
        return not self._events.has_room

    @override
    def write_now(self, data: bytes) -> None:
        for event in data.split(b"\n\n"):
            if event.startswith(_EVENT) and (said := event.removeprefix(_EVENT)) != _DONE:
                decoded: Any = msgspec.json.decode(said)
                if "error" not in decoded:
                    self._events.put(decoded if self._shown is None else self._shown(decoded))

    @override
    async def write(self, data: bytes, *, more: bool = True) -> None:
        self.write_now(data)
        # As a connection whose client does not read: what comes meanwhile is written in one piece.
        await self._events.room()

    @override
    async def fail(self, error: ApiError) -> None:
        self.error = error
        if self._error_event is not None:
            # Something else may come before the error, which is raised where the events are read.
            self.write_now(self._error_event(error))
