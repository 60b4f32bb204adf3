"""Whole responses of completions, and what they share with streamed ones. Pure."""

import msgspec

from nodes.gateway.openai_types import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    Usage,
)
from nodes.gateway.outputs import Generation


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk of a call and its whole response have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def usage_of(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


def total_usage(generation: Generation) -> Usage:
    """Each prompt counted once, whatever `n` is; cached tokens are those of its first sample."""
    output, step = generation.output, generation.samples_per_prompt
    firsts = [sample.end for sample in output.samples[::step]]
    return usage_of(
        sum(generation.num_prompt_tokens[::step]),
        sum(sample.num_tokens for sample in output.samples),
        sum(end.num_cached_tokens for end in firsts if end is not None),
    )


def usage_so_far(generation: Generation, number: int) -> Usage:
    sample = generation.output.samples[number]
    return usage_of(generation.num_prompt_tokens[number], sample.num_tokens, sample.num_cached_tokens)


def whole_response(head: Head, generation: Generation) -> ChatCompletion | Completion:
    """The response to a call whose samples have all finished; takes their text out of its output."""
    finished: list[tuple[int, str, str]] = []
    for number, text, end in sorted(generation.output.take(), key=lambda piece: piece.number):
        assert end is not None, "a whole response needs samples that have ended"
        finished.append((number, text, end.finish_reason or ""))
    usage = total_usage(generation)
    if head.object == "chat.completion":
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[
                ChatChoice(index=number, message=AssistantMessage(content=text), finish_reason=reason)
                for number, text, reason in finished
            ],
            usage=usage,
        )
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[CompletionChoice(index=number, text=text, finish_reason=reason) for number, text, reason in finished],
        usage=usage,
    )
