"""The answer to one streamed call, from its first event to `[DONE]`.

Output goes to the connection as it comes, in one piece for each turn of the event loop; the call's task writes what a
client that lags has not taken yet, and the end. Made by `completions.py`, one for each call.
"""

from nodes.gateway.errors import ApiError
from nodes.gateway.events import Failure
from nodes.gateway.http_call import ClientLeft, HttpCall
from nodes.gateway.outputs import Generation
from nodes.gateway.responses import total_usage, usage_so_far
from nodes.gateway.service import GatewayService
from nodes.gateway.sse import DONE, ChunkWriter, error_event
from nodes.gateway.validation import Job


class EventStream:
    """Writes the output of `generation` to the client of `call`, encoded by `writer`."""

    def __init__(
        self, service: GatewayService, call: HttpCall, job: Job, generation: Generation, writer: ChunkWriter
    ) -> None:
        self._service = service
        self._call = call
        self._job = job
        self._generation = generation
        self._output = generation.output
        self._writer = writer

    async def run(self) -> None:
        """Return when all is written; raises `ClientLeft`."""
        call, output = self._call, self._output
        await call.start_stream()
        start = self._writer.start()
        if start:
            await call.write(start)
        # Only after the start is written: before that, news would go out ahead of it.
        output.write_through(self._write_now)
        while True:
            await output.wait()
            if output.is_gone:
                raise ClientLeft
            # Read before news is taken: what comes between the two is taken now, or causes another round.
            finished = output.is_finished
            chunks = self._chunks()
            if output.failure is not None:
                chunks.append(self._error(output.failure))
            elif finished:
                if self._job.include_usage:
                    chunks.append(self._writer.usage(total_usage(self._generation)))
                # Not after an error: the answer is incomplete then.
                chunks.append(DONE)
            if chunks:
                await call.write(b"".join(chunks), more=not finished)
            if finished:
                return

    def _write_now(self) -> bool:
        """Write news at once. False if the client does not keep up: then it is left to the call's task."""
        if not self._call.can_write_now:
            return False
        chunks = self._chunks()
        if chunks:
            self._call.write_now(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        return True

    def _chunks(self) -> list[bytes]:
        chunks: list[bytes] = []
        for number, text, end, tokens in self._output.take():
            reason = None if end is None else end.finish_reason
            if not text and reason is None:
                continue
            usage = usage_so_far(self._generation, number) if self._job.continuous_usage else None
            chunks.append(self._writer.delta(number, text, reason, usage, tokens))
        return chunks

    def _error(self, failure: Failure) -> bytes:
        return error_event(failed(self._service, failure, self._job), self._call.request_id)


def failed(service: GatewayService, failure: Failure, job: Job) -> ApiError:
    error = service.error_of(failure, job.prompt_param)
    # The service logged each request as it ended.
    error.is_logged = True
    return error
