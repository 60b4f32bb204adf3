"""POST /v1/completions: its whole answers and its chunks."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET
from typing_extensions import override

from nodes.gateway.answers.answering import Answering
from nodes.gateway.answers.prompt_details import offsets_in
from nodes.gateway.answers.responses import ended, extension_of, total_usage
from nodes.gateway.answers.sse import ENCODE, ChunkWriter
from nodes.gateway.answers.surface import Surface
from nodes.gateway.answers.token_details import TextOffsets, TokenDetails
from nodes.gateway.fields.openai_types import Completion, CompletionChoice, TextLogprobs
from nodes.gateway.jobs.validation import Job, Validator
from nodes.gateway.requests.events import End, Tokens
from nodes.gateway.requests.outputs import Piece


class TextSurface(Surface):
    """Answers continue prompts. Logprobs are of all tokens but those of a stop string, also of the one that ends the
    text, which evaluation harnesses cut off unseen.
    """

    path: ClassVar[str] = "/v1/completions"
    id_prefix: ClassVar[str] = "cmpl-"
    chunk_object: ClassVar[str] = "text_completion"

    @override
    def read(self, validator: Validator, data: bytes, request_id: str) -> Job:
        return validator.text(data, request_id)

    @override
    def whole(self, answering: Answering) -> Completion:
        head, details = answering.head, answering.details
        choices: list[CompletionChoice] = []
        for piece, reason in ended(answering.generation):
            stop = details.stop_of(piece.end)
            choices.append(
                CompletionChoice(
                    index=piece.number,
                    text=details.of_prompts.text_of(piece.number) + piece.text,
                    finish_reason=reason,
                    logprobs=_logprobs_of_all(piece, details) if details.reads_logprobs else None,
                    token_ids=details.ids_of(piece.tokens),
                    prompt_token_ids=details.prompt_ids_of(piece.number),
                    prompt_logprobs=details.prompt_logprobs_of(piece.number),
                    stop_reason=UNSET if stop is None else stop.stop_reason,
                    matched_stop=UNSET if stop is None else stop.matched_stop,
                )
            )
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=total_usage(answering.generation, answering.answers),
            sglext=extension_of(answering.generation) if answering.job.tokens.cached else UNSET,
        )

    @override
    def writer(self, answering: Answering) -> ChunkWriter:
        return _TextChunks(answering)


TEXT = TextSurface()


class _TextChunks(ChunkWriter):
    before_text = b'"text":'
    after_text = b""

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering)
        details, num_read = self.details, self.num_samples if self.details.reads_logprobs else 0
        texts = [details.of_prompts.text_of(number) for number in range(num_read)]
        self._offsets = [TextOffsets(len(text)) for text in texts]
        self._begun: set[int] = set()
        self._is_echoed = details.of_prompts.is_echoed

    @override
    def lead(self, number: int) -> bytes:
        """The first chunk is of the prompt, if that is echoed."""
        if not self._is_echoed or number in self._begun:
            return b""
        prompt, details = self.details.of_prompts.text_of(number), self.details
        logprobs = ENCODE(_logprobs_of_prompt(number, details) if details.reads_logprobs else None)
        return self.chunk(number, self.before_text + ENCODE(prompt), logprobs, None, self.more(number, None, None))

    @override
    def logprobs(self, number: int, tokens: Tokens | None, finish_reason: str | None) -> msgspec.Struct | None:
        if tokens is None or not self._offsets:
            return None
        return _logprobs(tokens, self._offsets[number], self.details)

    @override
    def more(self, number: int, tokens: Tokens | None, end: End | None) -> bytes:
        prompt = b"" if number in self._begun else self.prompt_ids(number)
        self._begun.add(number)
        return super().more(number, tokens, end) + prompt


def _logprobs_of_all(piece: Piece, details: TokenDetails) -> TextLogprobs:
    """Of the prompt, if there is an echo, then of the output."""
    offsets = TextOffsets(len(details.of_prompts.text_of(piece.number)))
    of_output = _logprobs(piece.tokens, offsets, details)
    if not details.of_prompts.is_echoed:
        return of_output
    both = _logprobs_of_prompt(piece.number, details), of_output
    return TextLogprobs(
        text_offset=[one for part in both for one in part.text_offset],
        token_logprobs=[one for part in both for one in part.token_logprobs],
        tokens=[one for part in both for one in part.tokens],
        top_logprobs=[one for part in both for one in part.top_logprobs],
    )


def _logprobs_of_prompt(number: int, details: TokenDetails) -> TextLogprobs:
    of_prompts = details.of_prompts
    read = of_prompts.read(number, of_prompts.echoed_top)
    # Fewer than all if it was aborted before.
    ids = of_prompts.ids_of(number)[: len(read) + 1]
    return TextLogprobs(
        text_offset=offsets_in(of_prompts.text_of(number), map(details.data_of, ids)),
        token_logprobs=[None, *(one.logprob for one in read)],
        tokens=[details.name(token_id) for token_id in ids],
        top_logprobs=[None, *(_top(one.token_id, one.logprob, one.likely, details) for one in read)],
    )


def _top(token_id: int, logprob: float, likely: Sequence[tuple[int, float]], details: TokenDetails) -> dict[str, float]:
    top = {details.name(token_id): logprob}
    for one, its in likely:
        # Parts of characters have one text in common: the likelier of them is meant.
        top.setdefault(details.name(one), its)
    return top


def _logprobs(tokens: Tokens | None, offsets: TextOffsets, details: TokenDetails) -> TextLogprobs:
    drawn = details.drawn_in_text(tokens)
    return TextLogprobs(
        text_offset=[offsets.next(details.data_of(one.token_id)) for one in drawn],
        token_logprobs=[one.logprob for one in drawn],
        tokens=[details.name(one.token_id) for one in drawn],
        top_logprobs=[_top(one.token_id, one.logprob, one.likely, details) for one in drawn],
    )
