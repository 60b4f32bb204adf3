"""How much of a prompt is served: `truncate_prompt_tokens` and `truncation_side`, as at vLLM. For `jobs/validation.py`.

Pure. A number keeps so many tokens, the last ones unless the side is `right`; -1 keeps what fits the context beside the
answer.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import invalid
from nodes.protocol import Prepare
from nodes.request import StopRules

MOST_KEPT: Final = 2**31 - 1
"""An int32, which no context reaches."""


class TruncationFields(Struct, frozen=True, kw_only=True):
    """The fields of a body."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MOST_KEPT)] | None = None
    truncation_side: Literal["left", "right"] | None = None


def truncated(
    prepare: Prepare, body: TruncationFields, stop: StopRules, default_tokens: int, config: GatewayConfig
) -> Prepare:
    """Raises `BadRequest` for a prompt of nothing."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prepare
    if wanted == 0:
        message = "'truncate_prompt_tokens' must be at least 1, or -1 for what fits the context beside the answer."
        raise invalid(message, "truncate_prompt_tokens")
    if wanted < 0:
        # An answer has at least one token.
        wanted = max(1, config.context_length - max(stop.max_tokens or default_tokens, stop.min_tokens, 1))
    return replace(prepare, truncate_to=wanted, truncate_end=body.truncation_side == "right")
