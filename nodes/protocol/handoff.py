"""Between two schedulers: the prefill of a request whose decode is elsewhere.

The pages themselves move by the messages of `kvstore/protocol.py`.
"""

from mesh.wire.message import Message, Part
from nodes.request import Sampling


class PrefillOrder(Part, frozen=True):
    """Compute KV of `token_ids` and move the pages from `num_skip_tokens` on into the grant.

    `num_skip_tokens` is a multiple of the page: what the decode side has cached already. `token_ids` is prompt and
    earlier attempts' output together; `num_prompt_tokens` tells where the prompt ends (randomness counts from there).
    Once accepted it ends in `PrefillDone` or `PrefillFailed`, told again and again until `CancelPrefill`.
    Idempotent, and asked again as long as the pages are wanted: who does not ask for a lease is taken for dead.
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


class OrderPrefills(Message, frozen=True):
    """Take these orders, each by itself, or keep them. Ask; answer `PrefillsOrdered`.

    One for all that a turn of the asker's loop brought for this scheduler.
    """

    orders: list[PrefillOrder]


class PrefillRefused(Part, frozen=True):
    """Why one order is not taken.

    Codes: `overloaded`, `draining`, `never_fits`, `bad_token_id`, `bad_order`, `cancelled` (before it arrived).
    """

    grant_id: str
    code: str
    message: str
    retryable: bool = False


class PrefillsOrdered(Message, frozen=True):
    """The prefill scheduler has the `accepted`. What is named in neither list is to be asked again."""

    accepted: list[str]
    refused: list[PrefillRefused] = []


class PrefillDone(Part, frozen=True):
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


class PrefillFailed(Part, frozen=True):
    """The order ended without its token."""

    grant_id: str
    code: str
    message: str
    retryable: bool = True


class PrefillNews(Message, frozen=True):
    """Tell a decode scheduler which of its orders have ended: all that a turn of the prefill scheduler's loop brought.

    Of each it is told again until that one is named in a `CancelPrefill`.
    """

    done: list[PrefillDone] = []
    failed: list[PrefillFailed] = []


class CancelPrefill(Message, frozen=True):
    """Free everything of these orders: they are done, failed, or no longer wanted. Ask; idempotent.

    One for all that a turn of the asker's loop brought: it is how each `PrefillDone` is acknowledged.
    """

    grant_ids: list[str]


class PrefillCancelled(Message, frozen=True):
    """Nothing of the orders is left at the prefill scheduler."""

    grant_ids: list[str]
