"""Clients that send one request after the other while a mesh is struck, and compare each answer with the known one."""

import asyncio
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cli.bench.answer import Misdeed
from cli.bench.client import Server, exchange
from cli.chaos.answer import CANCELLED, Answer, StreamReader, WholeReader, begins, differences
from cli.chaos.asked import Request

ANSWER_TIMEOUT_S: Final = 60.0
"""For a whole answer: of a mesh that is struck every few seconds most of it is waiting, but never this much."""
NOTED_GAP_S: Final = 0.2
"""Shorter gaps in a stream are the pace of a busy mesh, and there are as many of them as tokens."""
_REDIAL_S: Final = 0.05
"""Until a gateway that was struck is there again, its port refuses at once: it would be asked without end."""


@dataclass
class Sent:
    """One request; times of `time.monotonic`, `ended_s` 0 while it runs.

    `lost` says why there is no whole answer, `different` how it is not the known one. `is_cut`: the connection broke
    with a gateway that had been struck, and the request was sent again, as another one. `was_cancelled`: by its client.
    """

    request: Request
    began_s: float
    ended_s: float = 0.0
    lost: str = ""
    different: str = ""
    is_cut: bool = False
    was_cancelled: bool = False
    request_id: str = ""
    event_times_s: "array[float]" = field(default_factory=lambda: array("d"))


async def ask(
    server: Server,
    request: Request,
    answer: Answer,
    on_event: Callable[[], object] = lambda: None,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> None:
    """Send a request and gather `answer`, in which it says what went wrong. `on_event`: a choice has arrived."""
    loop = asyncio.get_running_loop()
    connection: asyncio.Transport | None = None

    def opened(transport: asyncio.Transport) -> None:
        nonlocal connection
        connection, answer.is_open = transport, True

    def resume() -> None:
        if connection is not None and not connection.is_closing():
            connection.resume_reading()

    def heard() -> None:
        on_event()
        # Of several events that came in one piece, the first has stopped the reading.
        if request.pause_s and connection is not None and connection.is_reading():
            connection.pause_reading()
            loop.call_later(request.pause_s, resume)

    reader = StreamReader(answer, heard, request.cancel_after) if request.is_streamed else WholeReader(answer, on_event)
    whole = server.request("POST", request.path, msgspec.json.encode(request.body))
    try:
        async with asyncio.timeout(timeout_s):
            failed = (await exchange(server, whole, reader, timeout_s, opened)).failed
    except TimeoutError:
        failed = Misdeed("timeout", f"not ended within {timeout_s:g} s")
    answer.is_open = False
    if failed is not None:
        answer.failure, answer.detail = failed.kind, failed.detail


class Clients:
    """`num_clients` of them, until they are told to stop. `make_request` is asked for the request of each number.

    `expected` has the right answers, by `Request.index`. `is_excused` says of a request, by when it began and ended,
    whether a connection may have broken: a gateway was struck, and with it its streams end, so that each is sent again.
    """

    def __init__(
        self,
        server: Server,
        expected: Sequence[Answer],
        make_request: Callable[[int], Request],
        num_clients: int,
        is_excused: Callable[[float, float], bool],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.sent: list[Sent] = []
        self.gaps_s: list[tuple[float, float]] = []
        """Begin and end of each time in which a stream that is read without pauses, or its begin, waited."""
        self.event_times_s = array("d")
        self._server = server
        self._expected = expected
        self._make_request = make_request
        self._is_excused = is_excused
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def stop(self) -> None:
        """Let every client get the answer that it waits for."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    async def leave(self) -> None:
        """Break off what is open; it counts for nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self) -> None:
        request: Request | None = None
        while request is not None or not self._is_stopping:
            request = self._make_request(next(self._numbers)) if request is None else request
            sent = await self._sent(request)
            if sent.is_cut or sent.lost:
                await asyncio.sleep(_REDIAL_S)
            if not sent.is_cut:
                request = None

    async def _sent(self, request: Request) -> Sent:
        sent, answer = Sent(request, time.monotonic()), Answer()
        self.sent.append(sent)
        last_s = sent.began_s

        def heard() -> None:
            nonlocal last_s
            now_s = time.monotonic()
            self.event_times_s.append(now_s)
            sent.event_times_s.append(now_s)
            if request.is_streamed and not request.pause_s and now_s - last_s >= NOTED_GAP_S:
                self.gaps_s.append((last_s, now_s))
            last_s = now_s

        await ask(self._server, request, answer, heard, self._timeout_s)
        sent.ended_s, sent.request_id = time.monotonic(), answer.request_id
        self._judge(sent, answer)
        return sent

    def _judge(self, sent: Sent, answer: Answer) -> None:
        wanted = self._expected[sent.request.index]
        if answer.failure == CANCELLED:
            sent.was_cancelled = True
            sent.different = "" if begins(answer, wanted) else f"{differences([answer], [wanted])[0]} (cancelled)"
        elif not answer.failure:
            sent.different = next(iter(differences([answer], [wanted])), "")
        elif answer.failure in _BROKEN and self._is_excused(sent.began_s, sent.ended_s):
            sent.is_cut = True
        else:
            sent.lost = f"after {sent.ended_s - sent.began_s:.1f} s: {answer.broken}"


_BROKEN: Final = frozenset({"connect", "reset", "ended_early"})
"""What becomes of a connection whose other end dies."""


async def undisturbed(server: Server, requests: Sequence[Request], num_clients: int, timeout_s: float) -> list[Answer]:
    """The answers of a mesh that is left alone, as many at a time as a storm has clients."""
    answers = [Answer() for _ in requests]
    # Shared by all: whoever is free takes the next.
    todo = iter(zip(requests, answers, strict=True))

    async def client() -> None:
        for request, answer in todo:
            await ask(server, request, answer, timeout_s=timeout_s)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return answers
