"""What an actor does by its context, and answers to calls, in lists; what it asks for is given."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from mesh.actor import Answer
from mesh.address import Address
from mesh.membership.view import Member, Membership
from mesh.runtime.telemetry import Metrics
from mesh.runtime.trace_ring import TraceRing
from mesh.transport.base import Channel


class RecordingContext:
    """`answer` gets whom the actor asks and what, and gives the reply or raises."""

    def __init__(
        self, address: Address, answer: Callable[[str, Any], Awaitable[Any]], members: Iterable[Member] = ()
    ) -> None:
        self.address, self.answer = address, answer
        self.members = Membership()
        self.members.reset(1, 1, members)
        self.metrics = Metrics()
        self.log = structlog.get_logger()
        self.told: list[tuple[str, Any]] = []
        self.told_with: list[tuple[list[bytes], Channel]] = []
        self.asked: list[tuple[str, Any]] = []
        self.published: list[tuple[str, Any]] = []
        self.announced: list[tuple[str | None, dict[str, Any]]] = []
        self.ended: list[str] = []
        self.news = asyncio.Event()
        self.trace = TraceRing(self.now)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def tell(self, actor_id: str, message: Any, buffers: Any = (), *, channel: Channel = Channel.DATA) -> bool:
        self.told.append((actor_id, message))
        self.told_with.append(([bytes(buffer) for buffer in buffers], channel))
        self.news.set()
        return True

    async def until_told(self, count: int) -> None:
        while len(self.told) < count:
            self.news.clear()
            await self.news.wait()

    async def ask(self, actor_id: str, message: Any, *, timeout_s: float) -> Answer:
        self.asked.append((actor_id, message))
        return Answer(await self.answer(actor_id, message), (), Address(actor_id, 1))

    def ask_then(self, actor_id: str, message: Any, then: Callable[[Any], None], *, timeout_s: float) -> None:
        def done(task: asyncio.Task[Answer]) -> None:
            then(task.exception() or task.result())

        self.spawn(self.ask(actor_id, message, timeout_s=timeout_s)).add_done_callback(done)

    def publish(self, topic: str, message: Any) -> int:
        self.published.append((topic, message))
        return len(self.published)

    def end(self, reason: str, why: object = None) -> None:
        self.ended.append(reason)

    def fail(self, reason: str) -> None:
        self.ended.append(reason)

    def announce(self, state: str | None = None, **attributes: Any) -> None:
        self.announced.append((state, attributes))

    def later(self, delay_s: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)

    def spawn(self, coroutine: Any, *, name: str | None = None) -> asyncio.Task[Any]:
        return asyncio.ensure_future(coroutine)
