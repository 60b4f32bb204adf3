"""uvicorn's httptools protocol with bounds on the head of a request, which it lacks: bytes, and time to arrive."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65536
HEAD_TIMEOUT_S = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too long or too slow; bodies are `http_call.py`'s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads_head = True
        self._num_head_bytes = 0
        self._has_completed = False
        self._has_cycle = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn declares it
        """A client may not stay silent for ever."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._forget_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see whether the head has come, and how much of it is still without an end."""
        self._has_completed = False
        super().data_received(data)
        if not self._reads_head or self.transport.is_closing():
            return
        # A request that ended in these bytes used most of them.
        self._num_head_bytes = 0 if self._has_completed else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too long.")
        elif self._num_head_bytes and self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._reads_head = False
        self._num_head_bytes = 0
        self._forget_timer()
        super().on_headers_complete()
        self._has_cycle = True

    def on_message_complete(self) -> None:
        """The next head follows."""
        self._reads_head = True
        self._has_completed = True
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        # Between requests the keep-alive timer rules, and a response may still be under way.
        if not self._has_cycle or self.cycle.response_complete:
            self.transport.close()

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
