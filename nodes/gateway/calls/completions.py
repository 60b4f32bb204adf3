"""The routes that generate, streamed and whole: the path of one call through the gateway.

    read and validate the body -> a tokenizer's ids and routes -> one request for each sample -> output as it comes

A client that leaves is noticed at every stage, and whatever runs for it is cancelled. Calls of one gateway share
nothing but its service.
"""

import time
from typing import Final, NamedTuple

import msgspec
from typing_extensions import override

from nodes.gateway.admission.named_calls import NamedCall
from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import Head
from nodes.gateway.answers.surface import Surface
from nodes.gateway.answers.token_details import TokenDetails
from nodes.gateway.asked.answer_form import AnswerForm
from nodes.gateway.asked.vocabulary import Vocabulary
from nodes.gateway.calls.call import Call, ClientLeft
from nodes.gateway.calls.event_stream import EventStream, failed
from nodes.gateway.calls.job_endpoint import JobEndpoint
from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.jobs.constraints import after_reasoning, with_calls
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.records.call_log import CallTrack
from nodes.gateway.requests.outputs import Generation
from nodes.gateway.service import GatewayService
from nodes.protocol import Prepared

_PLAIN: Final = AnswerForm()


class _Prepared(NamedTuple):
    """What a tokenizer has said before a call can begin; the texts of its prompts if it wants an echo."""

    job: Job
    form: AnswerForm
    prepared: Prepared
    vocabulary: Vocabulary | None
    texts: list[str]


class CompletionEndpoint(JobEndpoint):
    """The handler of one of these routes."""

    def __init__(self, service: GatewayService, surface: Surface, validator: Validator, *, fingerprint: str) -> None:
        super().__init__(service)
        self._surface = surface
        self._validator = validator
        self._fingerprint = fingerprint

    @override
    async def _read(self, call: Call, body: bytes) -> Job:
        return self._surface.read(self._validator, body, call.request_id)

    @override
    async def _generate(self, call: Call, job: Job, track: CallTrack, named: NamedCall) -> None:
        generation: Generation | None = None
        try:
            told = await self._unless_gone(self._ask(job), call.gone)
            track.prepared(self._service.now(), told.prepared.elapsed_s, told.prepared.render_s)
            generation = self._service.open(told.job, told.prepared, track.arrived_at, call.names, call.place, track)
            self._service.end_aborted(named.opened(generation))
            output = generation.output
            call.gone.add_done_callback(lambda _: output.gone())
            answering = self._answering(told, generation)
            if job.stream:
                await self._stream(call, answering)
            else:
                await self._answer(call, answering)
        finally:
            if generation is not None:
                self._service.abandon(generation, call.place)

    async def _ask(self, job: Job) -> _Prepared:
        form = _PLAIN
        if job.answer.is_chat:
            form = await self._service.tokenizers.form.get()
            form.check_tools(job.tools)
            job = with_calls(job, form)
            if form.is_parsed(job.answer.tools):
                job = job._replace(shown_ids=form.shown_ids)
        prepared, fields = (
            await self._service.tokenizers.prepare(job.prepare, prompt_param=job.prompt_param),
            job.tokens,
        )
        # What is left of a prompt that was cut is not its text.
        texts = [] if job.prepare.truncate_to else job.prepare.texts or []
        if fields.echo and not texts:
            texts = [
                await self._service.tokenizers.detokenize(ids, skip_special_tokens=False) for ids in prepared.token_ids
            ]
        job = after_reasoning(job, form, prepared.prompt_tail)
        if fields.reads is None and fields.prompt_reads is None:
            return _Prepared(job, form, prepared, None, texts)
        return _Prepared(job, form, prepared, await self._service.tokenizers.vocabulary.get(), texts)

    def _answering(self, told: _Prepared, generation: Generation) -> Answering:
        job, form, prepared, vocabulary, texts = told
        head = Head(
            id=job.prepare.request_id,
            object=self._surface.chunk_object,
            created=int(time.time()),
            model=self._service.config.model_name,
            system_fingerprint=self._fingerprint,
        )
        details = TokenDetails(job, generation, vocabulary, texts)
        if not (job.answer.is_chat and form.is_parsed(job.answer.tools)):
            return Answering(head, job, generation, details)
        answers = Answers(form, job.answer, prepared.prompt_tail, generation.request_ids)
        return Answering(head, job, generation, details, answers)

    async def _answer(self, call: Call, answering: Answering) -> None:
        output = answering.generation.output
        while not output.is_finished:
            await output.wait()
        if output.is_gone:
            raise ClientLeft
        if output.failure is not None:
            raise failed(self._service, output.failure, answering.job)
        await call.respond(200, await self._whole(answering))

    async def _whole(self, answering: Answering) -> bytes:
        return msgspec.json.encode(self._surface.whole(answering))

    async def _stream(self, call: Call, answering: Answering) -> None:
        output = answering.generation.output
        # Until schedulers have taken every sample, an error can still be answered with its own status.
        while not (output.is_started or output.has_news or output.is_finished):
            await output.wait()
        if output.is_gone:
            raise ClientLeft
        if output.failure is not None:
            raise failed(self._service, output.failure, answering.job)
        await EventStream(self._service, call, answering, self._surface.writer(answering)).run()
