"""What all endpoints have in common whose body becomes a job: counting the call, reading it, and waiting for others
while its client is there. Extended by `completions.py` and by `surfaces/vectors/endpoint.py`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from nodes.gateway.admission.named_calls import NamedCall
from nodes.gateway.calls.call import Call, ClientLeft
from nodes.gateway.calls.endpoint import CLIENT_LEFT
from nodes.gateway.errors import ApiError, Internal
from nodes.gateway.jobs.validation import Job
from nodes.gateway.records.call_log import CallTrack
from nodes.gateway.requests.events import Failure
from nodes.gateway.service import GatewayService

_Result = TypeVar("_Result")


class JobEndpoint(ABC):
    """The handler of one route."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    async def __call__(self, call: Call) -> None:
        """Answer one call; raises `ApiError` before the answer has begun, `ClientLeft` at any time."""
        arrived_at = self._service.now()
        track = self._service.account.begin(call.names, arrived_at)
        status, code = Internal.status, ""
        try:
            await self._serve(call, track)
            status = call.status
        except ApiError as error:
            # The answer of a stream that had begun keeps its status; what ended it is its code.
            status, code = call.status or call.status_of(error), error.code or error.type
            raise
        except ClientLeft:
            status, code = call.status or CLIENT_LEFT, "client_left"
            raise
        except BaseException:  # whatever it is, the record says that the call did not go well
            code = "internal_error"
            raise
        finally:
            self._service.account.end(track, status, code)

    async def _serve(self, call: Call, track: CallTrack) -> None:
        place = call.place = self._service.door.enter(call.client, call.key)
        try:
            call.observer.came(call.names)
            if call.names.traceparent:
                self._service.continue_trace(call.names.traceparent)
            job = await self._read(call, await call.read_body())
            if (named := call.names.called(job.client_id)) != call.names:
                call.names = named
                call.observer.came(named)
            self._service.account.read(track, call.names)
            call.observer.unknown_fields(job.unknown_fields, call.names.path)
            self._service.check_priority(job.priority)
            names = [one for one in (job.rids, job.client_id, call.request_id) if one]
            with self._service.named.entered(call.names.key, names, job.num_prompts) as named:
                try:
                    await self._generate(call, job, track, named)
                except ApiError as error:
                    error.rename(job.names)
                    raise
        finally:
            self._service.door.leave(place)

    @abstractmethod
    async def _read(self, call: Call, body: bytes) -> Job:
        """What is to be done. Raises `ApiError`."""

    @abstractmethod
    async def _generate(self, call: Call, job: Job, track: CallTrack, named: NamedCall) -> None:
        """Do it, and answer; `named` knows whether it was aborted. Raises `ApiError`, `ClientLeft`."""

    async def _unless_gone(self, asked: Coroutine[Any, Any, _Result], watcher: asyncio.Future[None]) -> _Result:
        """What comes of `asked`. Raises `ClientLeft` and `ApiError` if the client or this gateway goes before that.

        In the call's own task, which is interrupted: a second one costs a call of two tokens 4 % of its gateway's time.
        """
        if watcher.done():
            asked.close()
            raise ClientLeft
        task = asyncio.current_task()
        assert task is not None, "a call is answered by a task"
        ended_by: list[asyncio.Future[None]] = []
        num_cancels, is_waiting = task.cancelling(), True

        def interrupt(ended: asyncio.Future[None]) -> None:
            # Once: each further one would have to be taken back by itself. Not in the turn in which the answer came
            # first: this was called for by then, and would end what the task does next.
            if is_waiting and not ended_by:
                ended_by.append(ended)
                task.cancel()

        stopping = self._service.stopping
        waited_for = (watcher, stopping)
        for one in waited_for:
            one.add_done_callback(interrupt)
        try:
            return await asked
        except asyncio.CancelledError:
            # As `asyncio.timeout` does: whoever else cancels this task means all of it.
            if not ended_by or task.uncancel() > num_cancels:
                raise
            if ended_by[0] is watcher:
                raise ClientLeft from None
            failure = Failure("shutting_down", "this gateway is shutting down")
            raise self._service.error_of(failure, "") from None
        finally:
            is_waiting = False
            for one in waited_for:
                one.remove_done_callback(interrupt)
