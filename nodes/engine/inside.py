"""What of an engine lives on its loop: the mesh's process, the gateway in the mesh, and the calls that run.

start: process -> Begun -> join -> served        the mesh's process or the registry may end it at any time
call:  body -> turn (`room.py`) -> route (`seat.py`) -> answer, or events
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from mesh.errors import MeshError
from nodes.engine.batches import place_among_all
from nodes.engine.errors import EngineClosed, EngineError, MeshGone, StartFailed
from nodes.engine.event_buffer import EventBuffer
from nodes.engine.feeder import Ticket
from nodes.engine.launch import Launched
from nodes.engine.room import NoRoom, Room
from nodes.engine.seat import Seat
from nodes.engine.startup import StartMesh, Wish
from nodes.engine.supervisor_process import ProcessEnd, SupervisorProcess
from nodes.gateway.errors import ApiError

Result = TypeVar("Result")


class Request(NamedTuple):
    """One call of a route. `shown` makes of an event of its stream what the reader gets; `where` says which it is, in
    words, among many, and `first` is the place of its first prompt; `parts` are smaller ones that can take its place,
    if it can be divided.
    """

    path: str
    body: bytes
    num_samples: int = 1
    shown: Callable[[Any], Any] | None = None
    where: str = ""
    first: int = 0
    parts: "Callable[[], Iterable[Request]] | None" = None


class Stream(NamedTuple):
    """Streamed answers that are on their way: what has come, and the task that brings them."""

    events: EventBuffer
    bringing: "asyncio.Task[None]"


class _Broken(Exception):
    """An answer broke after it had begun: there is no other attempt."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Inside:
    """One engine's mesh, from `start` to `stop`. Made and used on the engine's loop alone."""

    def __init__(self, wish: Wish, launched: Launched) -> None:
        self._wish = wish
        self._is_own = isinstance(wish, StartMesh)
        self._process = SupervisorProcess(launched)
        self._others: ProcessEnd | None = None
        self._seat: Seat | None = None
        self._room: Room | None = None
        self._end: EngineError | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def seat(self) -> Seat:
        """Raises EngineClosed, MeshGone."""
        if self._end is not None:
            raise type(self._end)(self._end.message)
        assert self._seat is not None, "an engine that has not started was used"
        return self._seat

    @property
    def room_now(self) -> int:
        """Requests that may be under way at once."""
        return 1 if self._room is None else self._room.feeder.room

    async def start(self) -> None:
        """Join the mesh, and wait until it serves if it is this engine's own. Raises StartFailed; nothing is left."""
        try:
            begun = await self._process.begun()
            if begun.supervisor_pid:
                self._others = ProcessEnd(begun.supervisor_pid)
            seat = self._seat = Seat(self._wish.mesh, self._wish.epoch, begun)
            config = seat.config
            self._room = Room(config.max_inflight, config.request_timeout_s, seat.ctx)
            await self._or_failed(self._be_served(seat), begun.start_timeout_s)
        except BaseException as error:
            # Also if the wait for it is interrupted.
            await self.stop()
            if isinstance(error, MeshError):
                message = f"the mesh {self._wish.mesh!r} cannot be joined: {error.message}"
                raise StartFailed(message) from error
            raise
        self._watching = asyncio.ensure_future(self._watch(seat))

    async def _be_served(self, seat: Seat) -> None:
        await seat.join()
        if self._is_own:
            await seat.served()

    async def _or_failed(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Raises StartFailed if the mesh of this engine ends before `work` does, or that takes too long."""
        working = asyncio.ensure_future(work)
        failing = asyncio.ensure_future(self._process.failed())
        overdue = asyncio.ensure_future(self._overdue(timeout_s))
        try:
            ends = {working, failing, overdue} if self._is_own else {working, overdue}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return
            raise (failing if failing.done() and self._is_own else overdue).result()
        finally:
            for task in (working, failing, overdue):
                task.cancel()
            await asyncio.wait({working, failing, overdue})

    async def _overdue(self, timeout_s: float) -> StartFailed:
        # Until its own mesh is ready, the supervisor knows how long that may take.
        if self._is_own:
            await self._process.all_ready.wait()
        await asyncio.sleep(timeout_s)
        trouble = self.seat.trouble
        return StartFailed(f"the mesh {self._wish.mesh!r} does not serve this engine within {timeout_s:g} s: {trouble}")

    async def _watch(self, seat: Seat) -> None:
        over = asyncio.ensure_future(seat.over())
        ended = self._process.ended if self._others is None else self._others.done
        try:
            await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
            why = f"its registry says so: {over.result()}" if over.done() else "its supervisor has ended"
            mesh = self._wish.mesh
            self._fail(MeshGone(f"the mesh {mesh!r} is gone: {why}; close this engine, and make another one"))
        finally:
            over.cancel()

    def _fail(self, error: EngineError) -> None:
        """From now on everything ends with this error, what runs included."""
        if self._end is None:
            self._end = error
        for task in self._running:
            task.cancel()

    async def stop(self) -> None:
        """End all calls, leave the mesh, and end it if it is this engine's own."""
        self._fail(EngineClosed("this engine is closed: make another one"))
        if self._watching is not None:
            self._watching.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if self._others is not None:
            self._others.close()
        if self._room is not None:
            self._room.close()
        if self._seat is not None:
            await self._seat.leave()
        await self._process.end()

    async def whole(self, requests: Iterable[Request]) -> list[Any]:
        """Answers of routes, decoded, in the order of their requests. The first error ends all."""

        async def attempt(request: Request) -> Any:
            return msgspec.json.decode(await self._ask(request, EventBuffer()))

        return await self._run(self._each_in_its_turn(requests, attempt))

    async def stream(self, requests: Iterable[Request]) -> Stream:
        """Events of streamed answers as they come. Raises EngineClosed, MeshGone."""
        _ = self.seat
        events = EventBuffer()
        bringing = asyncio.ensure_future(self._run(self._bring(requests, events)))
        bringing.add_done_callback(lambda task: events.end(None if task.cancelled() else task.exception()))
        return Stream(events, bringing)

    async def _bring(self, requests: Iterable[Request], events: EventBuffer) -> None:
        async def attempt(request: Request) -> None:
            await self._ask(request, events)

        await self._each_in_its_turn(requests, attempt)

    async def _each_in_its_turn(
        self, requests: Iterable[Request], attempt: Callable[[Request], Coroutine[Any, Any, Result]]
    ) -> list[Result]:
        """What came of each. Of thousands only those run that there is room for, and only the next is made."""
        _seat, room = self.seat, self._room
        assert room is not None, "a seat has room"
        tasks: list[asyncio.Task[list[Result]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    ticket = await room.enter(request.num_samples)
                    task = group.create_task(self._in_turn(room, ticket, request, attempt))
                    # It may be cancelled before its first step.
                    task.add_done_callback(lambda _, ticket=ticket: room.leave(ticket))
                    tasks.append(task)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise (first.error if isinstance(first, _Broken) else first) from None
        return [result for task in tasks for result in task.result()]

    async def _in_turn(
        self, room: Room, ticket: Ticket, request: Request, attempt: Callable[[Request], Coroutine[Any, Any, Result]]
    ) -> list[Result]:
        parts = request.parts
        try:
            return [await room.run(ticket, partial(attempt, request), once=parts is not None)]
        except NoRoom:
            assert parts is not None, "only what can be divided is made once"
            # What is too large for the room of now could wait for ever.
            return await self._each_in_its_turn(parts(), attempt)

    async def _ask(self, request: Request, events: EventBuffer) -> bytes:
        """The answer, if it is whole. Raises `ApiError`, or `_Broken` if it had begun."""
        call = await self.seat.ask(request.path, request.body, events, request.shown)
        if (error := call.error) is None:
            return call.answer
        place_among_all(error, request.first)
        if request.where:
            error.add_note(request.where)
        if call.status:
            raise _Broken(error) from error
        raise error

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """One of the calls that end with this engine."""
        task = asyncio.current_task()
        assert task is not None, "called from a task"
        self._running.add(task)
        # Who waited may have gone, and then asyncio would say that nobody took what it ended with.
        task.add_done_callback(_seen)
        try:
            return await work
        except asyncio.CancelledError:
            if self._end is not None:
                raise type(self._end)(self._end.message) from None
            raise
        finally:
            self._running.discard(task)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def started(wish: Wish, launched: Launched) -> Inside:
    """An engine's inside, on the loop that runs this. Raises as `start` does."""
    inside = Inside(wish, launched)
    await inside.start()
    return inside
