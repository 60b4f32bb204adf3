"""What whole and streamed answers of all surfaces have in common. Pure."""

import msgspec

from nodes.gateway.openai_types import PromptTokensDetails, Usage
from nodes.gateway.outputs import Generation, Piece


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
