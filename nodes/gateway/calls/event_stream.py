"""The answer to one streamed call, from its first event to its last.

Output goes to the connection as it comes, in one piece for each turn of the event loop; the call's task writes what a
client that lags has not taken yet, and the end. Made by `completions.py`, one for each call.
"""

import asyncio
from typing import Final

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.sse import Writer
from nodes.gateway.calls.call import Call, ClientLeft
from nodes.gateway.errors import ApiError
from nodes.gateway.jobs.validation import Job
from nodes.gateway.requests.events import Failure
from nodes.gateway.service import GatewayService
from nodes.trace_notes import Noted

PING_S: Final = 10.0
"""Proxies close what is silent for 30 or 60 s, and a long prompt, or a call of a tool that no text precedes, takes that
long."""


class EventStream:
    """Writes what comes of `answering` to the client of `call`, encoded by `writer`."""

    def __init__(self, service: GatewayService, call: Call, answering: Answering, writer: Writer) -> None:
        self._service = service
        self._call = call
        self._job = answering.job
        self._output = answering.generation.output
        self._samples = None if answering.answers is None else answering.answers.samples
        self._writer = writer
        self._was_silent = False
        self._has_written = False
        self._note = service.ctx.trace.note

    async def run(self) -> None:
        """Return when all is written; raises `ClientLeft`."""
        call, output = self._call, self._output
        await call.start_stream(self._writer.error)
        start = self._writer.start()
        if start:
            await call.write(start)
        # Only after the start is written: before that, news would go out ahead of it.
        output.write_through(self._write_now)
        try:
            await self._write_all()
        finally:
            # It refers back to this stream: as a cycle all that a call has, 70 objects, waited for the collector.
            output.write_through(None)

    async def _write_all(self) -> None:
        output = self._output
        while True:
            await self._wait()
            if output.is_gone:
                raise ClientLeft
            # Read before news is taken: what comes between the two is taken now, or causes another round.
            finished = output.is_finished
            chunks = self._chunks()
            if output.failure is not None:
                if chunks:
                    await self._write(b"".join(chunks), more=True)
                raise failed(self._service, output.failure, self._job)
            if finished:
                await self._writer.settle()
                chunks.append(self._writer.finish())
            if chunks:
                await self._write(b"".join(chunks), more=not finished)
            if finished:
                return

    async def _write(self, data: bytes, *, more: bool) -> None:
        """Write when the client has taken enough of what was written before."""
        call, now = self._call, self._service.now
        if not call.is_paused:
            await call.write(data, more=more)
            return
        began, name = now(), call.request_id
        self._note(Noted.LAGS, name, 0, 0)
        await call.write(data, more=more)
        self._note(Noted.KEEPS_UP, name, int((now() - began) * 1000), self._output.is_gone)

    async def _wait(self) -> None:
        """Return as `CallOutput.wait`. Until then, a silence of `PING_S` is broken."""
        if not self._writer.ping:
            return await self._output.wait()
        while True:
            self._was_silent = True
            try:
                async with asyncio.timeout(PING_S):
                    return await self._output.wait()
            except TimeoutError:
                if self._was_silent:
                    await self._call.write(self._writer.ping)

    def _write_now(self) -> bool:
        """Write news at once. False if the client does not keep up: then it is left to the call's task."""
        if self._call.is_paused:
            return False
        self._was_silent = False
        chunks = self._chunks()
        if chunks:
            self._call.write_now(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        return True

    def _chunks(self) -> list[bytes]:
        chunks: list[bytes] = []
        for number, text, end, tokens in self._output.take():
            if end is not None and end.finish_reason is None:
                # It failed, which is told once all news is written.
                end = None
            if self._samples is not None:
                sample = self._samples[number]
                events = sample.feed(text) if end is None else [*sample.feed(text), *sample.close()]
                chunk = self._writer.piece(number, events, end, tokens)
                if chunk:
                    chunks.append(chunk)
            elif text or end is not None:
                chunks.append(self._writer.text(number, text, end, tokens))
        if chunks and not self._has_written:
            self._has_written = True
            self._note(Noted.WRITTEN, self._call.request_id, 0, 0)
        return chunks


def failed(service: GatewayService, failure: Failure, job: Job) -> ApiError:
    """The answer to a call one of whose requests failed, which the service has logged."""
    error = service.error_of(failure, job.prompt_param)
    # The service logged each request as it ended.
    error.is_logged = True
    return error
