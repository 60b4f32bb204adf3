"""POST /generate: SGLang's own route, which trainers and evaluation harnesses use: ids in, ids and logprobs out.

A body becomes one of /v1/completions (`body.py`); answers are said in SGLang's form (`answer.py`).
"""

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.responses import ended
from nodes.gateway.answers.sse import DONE, ENCODE, Writer
from nodes.gateway.answers.surface import Surface
from nodes.gateway.errors import OPENAI_ERRORS, ApiError
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.parsers.events import Event, Text
from nodes.gateway.requests.events import End, Tokens
from nodes.gateway.surfaces.generate.answer import GenerateAnswer, GrowingAnswer
from nodes.gateway.surfaces.generate.body import Shown, read


class GenerateSurface(Surface[Shown]):
    """One sample is an object; several, and those of a list of prompts, are a list. Streamed events are cumulative."""

    path: ClassVar[str] = "/generate"
    id_prefix: ClassVar[str] = "gen-"

    @override
    def read(self, validator: Validator, data: bytes, request_id: str) -> Job[Shown]:
        return read(validator, data, request_id)

    @override
    def whole(self, answering: Answering[Shown]) -> GenerateAnswer | list[GenerateAnswer]:
        answers: list[GenerateAnswer] = []
        for piece, _ in ended(answering.generation):
            growing = GrowingAnswer(answering, piece.number)
            growing.grow(piece.text, piece.tokens)
            answers.append(growing.answer(piece.end, is_indexed=False))
        is_list = len(answers) > 1 or answering.job.own.is_list
        return answers if is_list else answers[0]

    @override
    def writer(self, answering: Answering[Shown]) -> "_GenerateStream":
        return _GenerateStream(answering)


GENERATE = GenerateSurface()


class _GenerateStream(Writer):
    def __init__(self, answering: Answering[Shown]) -> None:
        self._request_id = answering.head.id
        self._growing = [GrowingAnswer(answering, number) for number in range(len(answering.generation.output.samples))]

    @override
    def text(self, number: int, text: str, end: End | None, tokens: Tokens | None) -> bytes:
        growing = self._growing[number]
        growing.grow(text, tokens)
        return b"data: " + ENCODE(growing.answer(end, is_indexed=True)) + b"\n\n"

    @override
    def piece(self, number: int, events: Sequence[Event], end: End | None, tokens: Tokens | None) -> bytes:
        return self.text(number, "".join(event.text for event in events if isinstance(event, Text)), end, tokens)

    @override
    def finish(self) -> bytes:
        return DONE

    @override
    def error(self, error: ApiError) -> bytes:
        return OPENAI_ERRORS.event(error, self._request_id)
