"""What whole and streamed answers of all surfaces have in common. Pure."""

import msgspec
from msgspec import UNSET, UnsetType

from nodes.gateway.fields.openai_types import (
    CachedTokensDetails,
    CompletionTokensDetails,
    PromptTokensDetails,
    SglExt,
    Usage,
)
from nodes.gateway.jobs.answer_events import Answers
from nodes.gateway.requests.outputs import Generation, Piece


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk of a call and its whole response have in common, but for `object`, which is that of chunks."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def usage_of(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int, num_reasoning: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning),
    )


def total_usage(generation: Generation, answers: Answers | None) -> Usage:
    """Each prompt counted once, whatever `n` is; cached tokens are those of its first sample."""
    output, step = generation.output, generation.samples_per_prompt
    firsts = [sample.end for sample in output.samples[::step]]
    return usage_of(
        sum(generation.num_prompt_tokens[::step]),
        sum(sample.num_tokens for sample in output.samples),
        sum(end.num_cached_tokens for end in firsts if end is not None),
        sum(_num_reasoning(generation, answers, number) for number in range(len(output.samples))),
    )


def usage_so_far(generation: Generation, answers: Answers | None, number: int) -> Usage:
    sample, num_reasoning = generation.output.samples[number], _num_reasoning(generation, answers, number)
    return usage_of(generation.num_prompt_tokens[number], sample.num_tokens, sample.num_cached_tokens, num_reasoning)


def _num_reasoning(generation: Generation, answers: Answers | None, number: int) -> int:
    # By characters: a parser sees text, and where reasoning ends amid a token nobody could say whose it is.
    share = 0.0 if answers is None else answers.samples[number].reasoning_share
    return round(generation.output.samples[number].num_tokens * share)


def cached_details(num_cached: int, num_restored: int) -> CachedTokensDetails | None:
    """None if no tokens of a prompt were cached. `num_restored` of them were read from the disk."""
    if not num_cached:
        return None
    if not num_restored:
        return CachedTokensDetails(device=num_cached)
    return CachedTokensDetails(device=num_cached - num_restored, storage=num_restored, storage_backend="disk")


def extension_of(generation: Generation) -> SglExt | UnsetType:
    """Where cached tokens were, of the first sample that had some, as at SGLang; UNSET if none had."""
    for sample in generation.output.samples:
        counts = sample if sample.end is None else sample.end
        if (found := cached_details(counts.num_cached_tokens, counts.num_restored_tokens)) is not None:
            return SglExt(cached_tokens_details=found)
    return UNSET


def ended(generation: Generation) -> list[tuple[Piece, str]]:
    """What is left of a call whose samples have all ended, with their finish reasons, in the order of choices.

    Takes it out of the call's output.
    """
    pieces = sorted(generation.output.take(), key=lambda piece: piece.number)
    reasons: list[str] = []
    for piece in pieces:
        assert piece.end is not None, "a whole response needs samples that have ended"
        reasons.append(piece.end.finish_reason or "")
    return list(zip(pieces, reasons, strict=True))
