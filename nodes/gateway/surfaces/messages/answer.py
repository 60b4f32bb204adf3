"""What whole and streamed answers say of their end. Pure."""

from nodes.gateway.requests.events import ABORT
from nodes.gateway.surfaces.messages.types import MessageUsage, StopReason


def stop_reason_of(
    finish_reason: str, *, has_calls: bool, stop_sequence: str | None, num_output_tokens: int, max_tokens: int
) -> StopReason:
    """`max_tokens`: what the client allowed, which may be more than the context had room for."""
    if finish_reason == ABORT:
        # Anthropic's API has no word for it; of all its words this one alone says that there was more to come.
        return "max_tokens"
    if finish_reason == "length":
        return "max_tokens" if num_output_tokens >= max_tokens else "model_context_window_exceeded"
    if stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def usage_of(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> MessageUsage:
    """`num_prompt_tokens` are all of the prompt's; Anthropic's API counts those that were cached apart."""
    return MessageUsage(
        input_tokens=num_prompt_tokens - num_cached_tokens,
        cache_read_input_tokens=num_cached_tokens,
        output_tokens=num_output_tokens,
    )
