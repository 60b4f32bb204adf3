"""What a request is, wherever it goes: how to sample it and when it ends.

Shared by all roles. A request here is one sample of one prompt: the gateway expands `n` and lists of prompts first.
"""

from typing import Annotated, Final

from msgspec import Meta

from mesh.wire.message import HotPart, Part

LOWEST_TEMPERATURE: Final = 2.0**-126
"""Smallest normal float32: logits divided by less overflow, or are 0/0 where the divisor is rounded to 0."""


MIN_REPETITION_PENALTY: Final = 0.01
"""Logits are divided by it: a hundred times what they were is still finite, and more than any use needs."""
MAX_REPETITION_PENALTY: Final = 10.0
"""Wider than any use needs, and far from where logits would stop being finite."""


class Sampling(HotPart, frozen=True):
    """How one request's tokens are drawn.

    Randomness is counter-based, keyed by (seed, sample_index, position), so a draw does not depend on batch, row,
    worker, or on how often the request was started again. `temperature` 0, or below what float32 can divide by, is
    greedy. `top_k` 0 and `min_p` 0 are off. None of `masked_token_ids` is drawn at output positions before
    `min_tokens`: the scheduler lists the ids there that would end the request. Logits of tokens that already occur in
    prompt or output are divided by `repetition_penalty` if positive, else multiplied by it (Keskar et al. 2019, as in
    transformers and vLLM); 1 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0
    masked_token_ids: list[int] | None = None
    repetition_penalty: float = 1.0

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it as well as on its logits."""
        return self.repetition_penalty != 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, the lowest id among equals."""
        return self.temperature < LOWEST_TEMPERATURE


class SamplingDefaults(Part, frozen=True):
    """Defaults for what a request leaves out; fields as in `Sampling`, within the limits for requests."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0

    def describe(self) -> str:
        """`temperature 0.6, top_p 0.95`: the fields that change plain sampling; empty if none does."""
        plain = SamplingDefaults()
        fields = self.__struct_fields__
        return ", ".join(
            f"{name} {getattr(self, name):g}" for name in fields if getattr(self, name) != getattr(plain, name)
        )


class StopRules(HotPart, frozen=True):
    """When one request ends. The scheduler watches for stop ids, the detokenizer for stop strings.

    `max_tokens` counts all output tokens of the request, those of earlier attempts included. Neither end ids nor
    `stop_token_ids` are drawn among the first `min_tokens` output tokens (end ids not even with `ignore_eos`), and
    stop strings completed within them do not count.
    """

    max_tokens: int
    stop_token_ids: list[int] = []
    stop: list[str] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop: bool = False


class Stages(HotPart, frozen=True):
    """Where the time before an attempt's first token went, in seconds, each stage measured on the host that it ran on.

    `queue_s`: in the decode scheduler's queue and, if it ordered the prefill elsewhere, in the prefill scheduler's too.
    `grant_s`: until pages were granted for that prefill. `prefill_s`: from entering a batch to the first token.
    `transfer_s`: for pages that were still in transfer when that token was drawn. Without a prefill elsewhere,
    `grant_s` and `transfer_s` are 0.
    """

    queue_s: float = 0.0
    grant_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


class AttemptRef(HotPart, frozen=True):
    """One attempt of one request; the attempt number is its generation."""

    request_id: str
    attempt: int
