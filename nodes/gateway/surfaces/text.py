"""POST /v1/completions: its whole answers and its chunks."""

from typing import ClassVar

import msgspec
from typing_extensions import override

from nodes.gateway.events import Tokens
from nodes.gateway.openai_types import Completion, CompletionChoice, TextLogprobs
from nodes.gateway.outputs import Generation
from nodes.gateway.responses import Head, ended, total_usage
from nodes.gateway.sse import ENCODE, ChunkWriter
from nodes.gateway.surfaces.surface import Surface
from nodes.gateway.token_details import TextOffsets, TokenDetails


class TextSurface(Surface):
    """Answers continue prompts. Logprobs are of all tokens, also of the one that ends the text, which evaluation
    harnesses cut off unseen.
    """

    path: ClassVar[str] = "/v1/completions"
    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    @override
    def whole(self, head: Head, generation: Generation, details: TokenDetails) -> Completion:
        choices = [
            CompletionChoice(
                index=piece.number,
                text=piece.text,
                finish_reason=reason,
                logprobs=_logprobs(piece.tokens, TextOffsets(), details) if details.reads_logprobs else None,
                token_ids=details.ids_of(piece.tokens),
                prompt_token_ids=details.prompt_ids_of(piece.number),
            )
            for piece, reason in ended(generation)
        ]
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=total_usage(generation),
        )

    @override
    def chunks(self, head: Head, details: TokenDetails, num_samples: int, *, usage: bool) -> ChunkWriter:
        return _TextChunks(head, details, num_samples, usage=usage)


TEXT = TextSurface()


class _TextChunks(ChunkWriter):
    before_text = b'"text":'
    after_text = b""

    def __init__(self, head: Head, details: TokenDetails, num_samples: int, *, usage: bool) -> None:
        super().__init__(head, details, num_samples, usage=usage)
        self._offsets = [TextOffsets() for _ in range(num_samples if details.reads_logprobs else 0)]
        self._begun: set[int] = set()

    @override
    def logprobs(self, index: int, tokens: Tokens | None, finish_reason: str | None) -> msgspec.Struct | None:
        if tokens is None or not self._offsets:
            return None
        return _logprobs(tokens, self._offsets[index], self.details)

    @override
    def more(self, index: int, tokens: Tokens | None) -> bytes:
        prompt_ids = msgspec.UNSET if index in self._begun else self.details.prompt_ids_of(index)
        self._begun.add(index)
        prompt = b"" if prompt_ids is msgspec.UNSET else b',"prompt_token_ids":' + ENCODE(prompt_ids)
        return super().more(index, tokens) + prompt


def _logprobs(tokens: Tokens | None, offsets: TextOffsets, details: TokenDetails) -> TextLogprobs:
    drawn = details.drawn(tokens)
    tops: list[dict[str, float]] = []
    for one in drawn:
        top = {details.name(one.token_id): one.logprob}
        for token_id, logprob in one.likely:
            # Parts of characters have one text in common: the likelier of them is meant.
            top.setdefault(details.name(token_id), logprob)
        tops.append(top)
    return TextLogprobs(
        text_offset=[offsets.next(details.data_of(one.token_id)) for one in drawn],
        token_logprobs=[one.logprob for one in drawn],
        tokens=[details.name(one.token_id) for one in drawn],
        top_logprobs=tops,
    )
