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


MAX_TOKEN_ID: Final = 2**31 - 1
"""Ids go as i32 through steps and kernels, where -1 means a token that is not known yet."""
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
MAX_ASKS: Final = 16
"""More than there are kinds of asks: one request has at most one of each."""
MAX_ASK_BYTES: Final = 64 * 1024
"""Of all asks of a request together: they go with each attempt, each order of a prefill, each opening at a worker."""


TOKENS: Final = "tokens"
VECTOR_KINDS: Final = ("last", "mean", "cls")
"""What may be wanted of a model beside tokens: one vector of the prompt's last hidden states, pooled in this way."""
VECTORS: Final = "vectors/1"
"""Beside the names of asks: that a worker makes vectors."""


MAX_WEIGHT: Final = 1000
"""Of a client, beside 1 of the others: more than anybody has clients that wait at one scheduler in earnest."""


class Asked(HotPart, frozen=True):
    """One thing that a request asks of its draws, as it travels: its name with a version, and its value as bytes.

    Only the gateway that wrote it and the worker that draws read the value (`nodes/asks/`). `looks_back`: a draw
    depends on the tokens before it as well as on its logits. `reads_prompt`: it wants to know something of each token
    of the prompt.
    """

    name: str
    looks_back: bool
    value: bytes
    reads_prompt: bool = False


class Sampling(HotPart, frozen=True):
    """How one request's tokens are drawn.

    Randomness is counter-based, keyed by (seed, sample_index, position), so a draw does not depend on batch, row,
    worker, or on how often the request was started again. `temperature` 0, or below what float32 can divide by, is
    greedy. `top_k` 0 and `min_p` 0 are off. `asks` change the logits first, or read them: at most `MAX_ASKS`, together
    at most `MAX_ASK_BYTES`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    asks: list[Asked] = []

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it as well as on its logits."""
        return any(asked.looks_back for asked in self.asks)

    @property
    def reads_prompt(self) -> bool:
        """Whether something is read of every token of the prompt, cached or not."""
        return any(asked.reads_prompt for asked in self.asks)

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


class RequestSpec(HotPart, frozen=True):
    """What a client wants of one sample of its prompt: the same for every attempt and order of a prefill.

    A smaller `priority` goes first. `extra_key` keeps cached pages from requests with another one. A gateway makes it
    of a call's `cache_salt` and `extra_key`: a hash of the one in hexadecimal, a colon, the other; nothing for neither.
    `shown_ids` are special tokens that are part of the text even so with `skip_special_tokens`. `kind` is `TOKENS` or
    one of `VECTOR_KINDS`: then nothing is drawn, and `sampling` and `stop` mean nothing. Of a pair of texts, the second
    begins at token `second_from` (0: it is no pair), for models that tell them apart. `client` is who asks: all
    requests of one name share its part of a scheduler, which is `weight` (1 to `MAX_WEIGHT`) times that of a client of
    weight 1.
    """

    sampling: Sampling
    stop: StopRules
    priority: int = 0
    extra_key: str = ""
    skip_special_tokens: bool = True
    shown_ids: list[int] = []
    kind: str = TOKENS
    second_from: int = 0
    client: str = ""
    weight: int = 1

    @property
    def is_vector(self) -> bool:
        """Whether a vector is wanted."""
        return self.kind != TOKENS

    @property
    def needs(self) -> list[str]:
        """The names of what a worker must be able to do for it."""
        return [asked.name for asked in self.sampling.asks] + [VECTORS] * self.is_vector


class Stages(HotPart, frozen=True):
    """Where the time before an attempt's first token went, in seconds, each stage measured on the host that it ran on.

    `queue_s`: in the decode scheduler's queue and, if it ordered the prefill elsewhere, in the prefill scheduler's too.
    `grant_s`: until pages were granted for that prefill. `prefill_s`: from entering a batch to the first token.
    `transfer_s`: for pages that were still in transfer when that token was drawn. Without a prefill elsewhere,
    `grant_s` and `transfer_s` are 0. `restored_tokens` of the prompt's cached ones were read from a disk in that time.
    """

    queue_s: float = 0.0
    grant_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    restored_tokens: int = 0


class AttemptRef(HotPart, frozen=True):
    """One attempt of one request; the attempt number is its generation."""

    request_id: str
    attempt: int
