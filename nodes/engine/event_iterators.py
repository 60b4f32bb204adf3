"""Streamed answers as an engine's users read them: an iterator, and one for `async for`.

A stream that is left early, closed or forgotten ends what still runs of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from nodes.engine.errors import WrongLoop
from nodes.engine.inside import Stream
from nodes.engine.loop_thread import LoopThread


class _Reader:
    """What both have. `check` raises `EngineError` where the engine cannot be used."""

    def __init__(self, thread: LoopThread, stream: Stream, check: Callable[[], object]) -> None:
        self._thread = thread
        self._stream = stream
        self._check = check
        self._events: Iterator[Any] = iter(())

    def _hang_up(self) -> None:
        self._thread.post(self._stream.bringing.cancel)

    def __del__(self) -> None:
        self._hang_up()


class EventIterator(_Reader, Iterator[Any]):
    """Read it in any thread, one at a time. `close` is for who leaves early; `with` and its last event do it, too."""

    def __next__(self) -> Any:
        self._check()
        for event in self._events:
            return event
        self._events = iter(events := self._thread.wait(self._stream.events.take()))
        if not events:
            raise StopIteration
        return next(self._events)

    def close(self) -> None:
        self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncEventIterator(_Reader, AsyncIterator[Any]):
    """Read it in the event loop that it began in."""

    def __init__(self, thread: LoopThread, stream: Stream, check: Callable[[], object]) -> None:
        super().__init__(thread, stream, check)
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> Any:
        self._check()
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop(
                "this stream began in another event loop: read it there, or begin it here. The engine itself can be "
                "used in any number of loops and threads"
            )
        for event in self._events:
            return event
        self._events = iter(events := await asyncio.wrap_future(self._thread.begin(self._stream.events.take())))
        if not events:
            raise StopAsyncIteration
        return next(self._events)

    async def aclose(self) -> None:
        self._hang_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
