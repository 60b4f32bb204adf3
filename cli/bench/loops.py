"""The two ways to send requests: so many at a time, or each when it is due, whatever became of the others."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cli.bench.answer import Sample
from cli.bench.client import SILENCE_S, MakeBody, Server, encoded, stream

COMPLETIONS: Final = "/v1/completions"
MOST_OPEN: Final = 4096
"""Requests that may be open at a time where they come by themselves; those beyond it fail as `not_sent`."""
_PROBE_S: Final = 0.05
"""Often enough for a p99 of a run of seconds, and 0.1 % of a core."""


@dataclass
class Run:
    """What came of a number of requests. It can be read while they run, too.

    `late_s`: how late each request was sent that had been due. `loop_late_s`: how late the client's event loop was,
    sampled 20 times a second: so much may be wrong with every time that was taken. `cpu_s` is the client's own.
    """

    samples: list[Sample] = field(default_factory=list[Sample])
    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    loop_late_s: "array[float]" = field(default_factory=lambda: array("d"))
    start_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0


async def closed_loop(
    server: Server,
    concurrency: int,
    num_requests: int,
    make_body: MakeBody,
    *,
    run: Run | None = None,
    path: str = COMPLETIONS,
    silence_s: float = SILENCE_S,
) -> Run:
    """`concurrency` clients, each sending its next request when the last has ended, `num_requests` in all."""
    run = Run() if run is None else run
    # Shared by all clients: whoever is free takes the next, so that a slow answer holds up one of them.
    numbers = iter(range(num_requests))

    async def client() -> None:
        for number in numbers:
            body = encoded(make_body(number))
            sample = Sample(time.perf_counter())
            run.samples.append(sample)
            await stream(server, path, body, sample, silence_s=silence_s)
            if sample.failure:
                # A server that refuses everything at once would be asked as fast as the client can.
                await asyncio.sleep(0.01)

    async with _measured(run), asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, num_requests)):
            group.create_task(client())
    return run


async def open_loop(
    server: Server,
    due_s: Sequence[float],
    make_body: MakeBody,
    *,
    run: Run | None = None,
    path: str = COMPLETIONS,
    silence_s: float = SILENCE_S,
) -> Run:
    """Send each request when it is due, in seconds from the start, and time it from then: a user waits that long too.

    A closed loop sends its next request only after the last answer, so a server that stalls gets fewer of them; here
    they come all the same, and the stall shows.
    """
    run = Run() if run is None else run
    # Each has a connection, and a server that stalls lets none of them go.
    room = asyncio.Semaphore(MOST_OPEN)

    async def request(body: bytes, sample: Sample) -> None:
        await stream(server, path, body, sample, silence_s=silence_s)
        room.release()

    async with _measured(run), asyncio.TaskGroup() as group:
        for number, due in enumerate(due_s):
            # Before it is due: a long prompt takes milliseconds to write.
            body = encoded(make_body(number))
            # Also if it is late already: who is answered must have a turn.
            await asyncio.sleep(max(0.0, run.start_s + due - time.perf_counter()))
            sample = Sample(run.start_s + due)
            run.samples.append(sample)
            run.late_s.append(time.perf_counter() - sample.start_s)
            if room.locked():
                sample.failure, sample.detail = "not_sent", f"{MOST_OPEN} requests are open already"
                sample.end_s = time.perf_counter()
                continue
            await room.acquire()
            group.create_task(request(body, sample))
    return run


@contextlib.asynccontextmanager
async def _measured(run: Run) -> AsyncGenerator[None]:
    run.start_s, cpu_s = time.perf_counter(), time.process_time()
    probe = asyncio.create_task(_probe(run.loop_late_s))
    try:
        yield
    finally:
        probe.cancel()
        run.wall_s, run.cpu_s = time.perf_counter() - run.start_s, time.process_time() - cpu_s


async def _probe(late_s: "array[float]") -> None:
    while True:
        asked_s = time.perf_counter()
        await asyncio.sleep(_PROBE_S)
        late_s.append(time.perf_counter() - asked_s - _PROBE_S)
