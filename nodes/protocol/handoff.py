"""Between two schedulers: the prefill of a request whose decode is elsewhere.

The pages themselves move by the messages of `kvstore/protocol.py`.
"""

from mesh.wire.message import Message
from nodes.request import Sampling


class PrefillOrder(Message, frozen=True):
    """Compute KV of `token_ids` and move the pages from `num_skip_tokens` on into the grant. Ask.

    `num_skip_tokens` is a multiple of the page: what the decode side has cached already. `token_ids` is prompt and
    earlier attempts' output together; `num_prompt_tokens` tells where the prompt ends (randomness counts from there).
    Answer `PrefillAccepted`; later `PrefillDone` or `PrefillFailed` by tell, repeated until `CancelPrefill`.
    Idempotent, and asked again as long as the pages are wanted: who does not ask for a lease is taken for dead.
    Errors: `overloaded`, `draining`, `never_fits`, `bad_token_id`, `bad_order`, `cancelled` (before it arrived).
    """

    grant_id: str
    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_skip_tokens: int
    sampling: Sampling
    agent: str
    extra_key: str = ""
    timeout_s: float = 60.0


class PrefillAccepted(Message, frozen=True):
    """The prefill scheduler has queued the order."""

    grant_id: str


class PrefillDone(Message, frozen=True):
    """All chunks ran; all pages are announced to the agent. `token_id` is the first token drawn.

    `extra` goes beside it, as in `StepResult`. `queue_s` and `prefill_s` are how long the order waited for a batch, and
    from there for its token.
    """

    grant_id: str
    token_id: int
    num_cached_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    extra: bytes = b""


class PrefillFailed(Message, frozen=True):
    """The order ended without its token."""

    grant_id: str
    code: str
    message: str
    retryable: bool = True


class CancelPrefill(Message, frozen=True):
    """Free everything of these orders: they are done, failed, or no longer wanted. Ask; idempotent.

    One for all that a turn of the asker's loop brought: it is how each `PrefillDone` is acknowledged.
    """

    grant_ids: list[str]


class PrefillCancelled(Message, frozen=True):
    """Nothing of the orders is left at the prefill scheduler."""

    grant_ids: list[str]
