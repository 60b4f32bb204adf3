"""One request as its route sees it, however it came: over HTTP (`nodes/gateway/http/call.py`), or from the program that
has an engine (`nodes/engine/call.py`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from nodes.api_keys.entries import ApiKey
from nodes.gateway.calls.observer import HttpObserver
from nodes.gateway.clients import NOBODY, Client
from nodes.gateway.errors import ApiError
from nodes.gateway.request_names import RequestNames

if TYPE_CHECKING:
    from nodes.gateway.admission.in_flight import Place


class ClientLeft(Exception):
    """Nobody reads an answer any more."""


class Call(ABC):
    """`names` are the request's, `observer` logs and counts what becomes of it, `gone` is done once its client left
    before the end of its answer. `status` is that of the answer; 0: none has begun.
    """

    def __init__(self, names: RequestNames, observer: HttpObserver, gone: asyncio.Future[None]) -> None:
        self.names = names
        self.request_id = names.ours
        self.observer = observer
        self.gone = gone
        self.status = 0
        self.key: ApiKey | None = None
        self.place: Place | None = None

    def belongs_to(self, key: ApiKey) -> None:
        """The request brought this API key, which its log lines name."""
        self.key = key
        self.names = self.names._replace(key=key.name)

    @property
    def client(self) -> Client:
        """Whose part of the mesh it takes."""
        return NOBODY

    def status_of(self, error: ApiError) -> int:
        """The status of an answer that is this error."""
        return error.status

    @abstractmethod
    async def read_body(self) -> bytes:
        """The whole body. Raises `ApiError` over a limit, `ClientLeft` if its client goes first."""

    @abstractmethod
    async def respond(self, status: int, body: bytes) -> None:
        """The whole answer, JSON."""

    @abstractmethod
    async def start_stream(self, error_event: Callable[[ApiError], bytes] | None = None) -> None:
        """From now on an error is the last event, by `error_event` if its form depends on what was written before."""

    @property
    @abstractmethod
    def is_paused(self) -> bool:
        """The client reads too slowly: what is written now waits until it has read more."""

    @abstractmethod
    def write_now(self, data: bytes) -> None:
        """A piece of the stream, not its last one, to a client that keeps up; dropped if it has left."""

    @abstractmethod
    async def write(self, data: bytes, *, more: bool = True) -> None:
        """A piece of the stream; waits while the client reads too slowly."""

    @abstractmethod
    async def fail(self, error: ApiError) -> None:
        """An error for an answer; inside a stream that has begun, its last event."""
