"""POST /v1/chat/completions: its whole answers and its chunks."""

from typing import ClassVar

import msgspec
from typing_extensions import override

from nodes.gateway.events import Tokens
from nodes.gateway.openai_types import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    DrawnTokenLogprob,
    TokenLogprob,
)
from nodes.gateway.outputs import Generation
from nodes.gateway.responses import Head, ended, total_usage
from nodes.gateway.sse import ChunkWriter
from nodes.gateway.surfaces.surface import Surface
from nodes.gateway.token_details import TokenDetails


class ChatSurface(Surface):
    """Answers are messages; the token that ends one is not part of it."""

    path: ClassVar[str] = "/v1/chat/completions"
    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    @override
    def whole(self, head: Head, generation: Generation, details: TokenDetails) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=piece.number,
                message=AssistantMessage(content=piece.text),
                finish_reason=reason,
                logprobs=_logprobs(piece.tokens, reason, details),
                token_ids=details.ids_of(piece.tokens),
            )
            for piece, reason in ended(generation)
        ]
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=total_usage(generation),
            # All samples have one prompt.
            prompt_token_ids=details.prompt_ids_of(0),
            prompt_logprobs=details.prompt_logprobs_of(0),
        )

    @override
    def chunks(self, head: Head, details: TokenDetails, num_samples: int, *, usage: bool) -> ChunkWriter:
        return _ChatChunks(head, details, num_samples, usage=usage)


CHAT = ChatSurface()


class _ChatChunks(ChunkWriter):
    before_text = b'"delta":{"content":'
    after_text = b"}"

    @override
    def start(self) -> bytes:
        """A message has a role before it has text; the first of these events says what the prompt was."""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = self.prompt_ids(0)
        return b"".join(
            self.opening + b'{"index":%d,' % index + role + (b"" if index else prompt) + self.ending
            for index in range(self.num_samples)
        )

    @override
    def logprobs(self, index: int, tokens: Tokens | None, finish_reason: str | None) -> msgspec.Struct | None:
        found = _logprobs(tokens, finish_reason, self.details)
        # An event for the end alone has none.
        return found if found is not None and found.content else None


def _logprobs(tokens: Tokens | None, finish_reason: str | None, details: TokenDetails) -> ChatLogprobs | None:
    if not details.reads_logprobs:
        return None
    drawn = details.drawn(tokens)
    if details.ends_hidden(tokens, finish_reason):
        drawn.pop()
    return ChatLogprobs(
        content=[
            DrawnTokenLogprob(
                token=details.name(token_id),
                logprob=logprob,
                bytes=details.bytes_of(token_id),
                top_logprobs=[
                    TokenLogprob(token=details.name(one), logprob=its, bytes=details.bytes_of(one))
                    for one, its in likely
                ],
            )
            for token_id, logprob, likely in drawn
        ]
    )
