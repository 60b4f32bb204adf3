"""The routes for vectors: the path of one call through the gateway.

    read the body -> a tokenizer's ids and routes, some inputs at a time -> requests, as there is room -> rows -> answer

All inputs are prepared before the first of them is computed: one that is too long costs nothing else. Then parts of
them are opened, and others follow as those end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from typing_extensions import override

from nodes.gateway.admission.named_calls import NamedCall
from nodes.gateway.calls.call import Call, ClientLeft
from nodes.gateway.calls.event_stream import failed
from nodes.gateway.calls.job_endpoint import JobEndpoint
from nodes.gateway.errors import ApiError, BadRequest, TooManyRequests
from nodes.gateway.jobs.validation import Job
from nodes.gateway.records.call_log import CallTrack
from nodes.gateway.requests.outputs import Generation
from nodes.gateway.service import GatewayService
from nodes.gateway.surfaces.vectors.form import Computed, Form, FormReader
from nodes.gateway.surfaces.vectors.inputs import Part, check_lengths, parts_of, too_long
from nodes.gateway.surfaces.vectors.numbers import Row, row_of
from nodes.protocol import Prepared

_PIECES_PER_TURN: Final = 16
"""Rows of 4,096 numbers, written as text, take 0.4 ms each; a heartbeat can wait for so many."""


class VectorEndpoint(JobEndpoint):
    """The handler of one of these routes."""

    def __init__(self, service: GatewayService, form: Form) -> None:
        super().__init__(service)
        self._reader = FormReader(form, service.config)

    @override
    async def _read(self, call: Call, body: bytes) -> Job:
        return self._reader.job(body, call.request_id)

    @override
    async def _generate(self, call: Call, job: Job, track: CallTrack, named: NamedCall) -> None:
        # Of vectors there is no part to be answered with, so they are not aborted: what is at work is done soon.
        del named
        work = job.own
        prepared = await self._unless_gone(self._prepare(job), call.gone)
        track.prepared(self._service.now(), sum(answer.elapsed_s for _, answer in prepared))
        at_work = _AtWork(self._service, call, job, track)
        try:
            await at_work.run(prepared)
        finally:
            at_work.abandon()
        computed = Computed(
            id=call.request_id,
            created=int(time.time()),
            model=self._service.config.model_name,
            rows=at_work.rows,
            num_tokens=[len(ids) for _, answer in prepared for ids in answer.token_ids],
        )
        await call.respond(200, await _joined(work.answer(computed)))

    async def _prepare(self, job: Job) -> list[tuple[Part, Prepared]]:
        work = job.own
        config = self._service.config
        prepared: list[tuple[Part, Prepared]] = []
        for part in parts_of(work.inputs, job.prepare):
            param = part.names[0] if len(part.names) == 1 else job.prompt_param
            try:
                answer = await self._service.tokenizers.prepare(part.prepare, prompt_param=param)
            except BadRequest as error:
                if error.code != "context_length_exceeded":
                    raise
                # Not even encoded: more characters than any context takes, and then an input is a part by itself.
                size = f"{sum(map(len, (*(part.prepare.texts or ()), *(part.prepare.seconds or ()))))} characters"
                raise too_long(part.names[0], size, config, work.cut) from error
            check_lengths(part, answer, config, work.cut)
            prepared.append((part, answer))
        return prepared


class _AtWork:
    """The requests of one call that run, and the rows that came of others."""

    def __init__(self, service: GatewayService, call: Call, job: Job, track: CallTrack) -> None:
        self._service = service
        self._call = call
        self._job = job
        self._track = track
        self._running: dict[asyncio.Task[None], tuple[Part, Generation]] = {}
        self.rows: list[Row] = []

    async def run(self, prepared: list[tuple[Part, Prepared]]) -> None:
        """Raises `ApiError`, `ClientLeft`. `abandon` has to be called afterwards."""
        waiting = deque(prepared)
        self.rows = [row_of(b"")] * sum(len(part.names) for part, _ in prepared)
        while waiting or self._running:
            self._open(waiting)
            await asyncio.wait((*self._running, self._call.gone), return_when=asyncio.FIRST_COMPLETED)
            if self._call.gone.done():
                raise ClientLeft
            for task in [task for task in self._running if task.done()]:
                task.result()
                self._take(*self._running.pop(task))

    def abandon(self) -> None:
        for task, (_, generation) in self._running.items():
            task.cancel()
            self._service.abandon(generation, self._call.place)

    def _open(self, waiting: deque[tuple[Part, Prepared]]) -> None:
        most = self._service.config.max_samples_per_call
        num = sum(len(part.names) for part, _ in self._running.values())
        # A part may go beyond it: kept waiting until it fits, one that is larger than all of it never would be opened.
        while waiting and num < most:
            part, answer = waiting[0]
            job = self._job._replace(prepare=part.prepare)
            try:
                call, track = self._call, self._track
                opened = self._service.open(job, answer, track.arrived_at, call.names, call.place, track)
            except TooManyRequests:
                # What this call has at work itself will make room.
                if not self._running:
                    raise
                return
            waiting.popleft()
            num += len(part.names)
            self._running[asyncio.ensure_future(_ended(opened))] = part, opened

    def _take(self, part: Part, generation: Generation) -> None:
        # At once, so that the parts that wait find its place free.
        self._service.abandon(generation, self._call.place)
        output = generation.output
        if output.failure is not None:
            raise self._failed(part, generation)
        for index, sample in enumerate(output.samples, part.first):
            self.rows[index] = row_of(sample.vector or b"")

    def _failed(self, part: Part, generation: Generation) -> ApiError:
        output = generation.output
        assert output.failure is not None, "only a failure can be told"
        ended = enumerate(sample.end for sample in output.samples)
        first = next((index for index, end in ended if end is not None and end.failure is output.failure), 0)
        return failed(self._service, output.failure, self._job._replace(prompt_param=part.names[first]))


async def _ended(generation: Generation) -> None:
    while not generation.output.is_finished:
        await generation.output.wait()


async def _joined(pieces: Iterator[bytes]) -> bytes:
    joined: list[bytes] = []
    for number, piece in enumerate(pieces, 1):
        joined.append(piece)
        if number % _PIECES_PER_TURN == 0:
            await asyncio.sleep(0)
    return b"".join(joined)
