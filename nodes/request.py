"""What a request is, wherever it goes: how to sample it and when it ends.

Shared by all roles. A request here is one sample of one prompt: the gateway expands `n` and lists of prompts first.
"""

from mesh.message import HotPart


class Sampling(HotPart, frozen=True):
    """How one request's tokens are drawn.

    Randomness is counter-based, keyed by (seed, sample_index, position), so a draw does not depend on batch, row,
    worker, or on how often the request was started again. `temperature` 0 is greedy. `top_k` 0 and `min_p` 0 are off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    logit_bias: dict[int, float] | None = None


class StopRules(HotPart, frozen=True):
    """When one request ends. Stop ids are the scheduler's to see, stop strings the detokenizer's.

    `max_tokens` counts all output tokens of the request, those of earlier attempts included.
    """

    max_tokens: int
    stop_token_ids: list[int] = []
    stop: list[str] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop: bool = False


class AttemptRef(HotPart, frozen=True):
    """One attempt of one request; the attempt number is its generation."""

    request_id: str
    attempt: int
