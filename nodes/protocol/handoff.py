"""Between two schedulers: one prefills a request that the other decodes.

The pages themselves are moved by the messages of `kvstore/protocol.py`.
"""

from mesh.wire.message import Message, Part
from nodes.request import RequestSpec


class PrefillOrder(Part, frozen=True):
    """Compute KV of `token_ids` and move the pages from `num_skip_tokens` on into the grant.

    `num_skip_tokens`, a multiple of the page, is what the decode side has cached already. `token_ids` is the prompt and
    the output of earlier attempts; `num_prompt_tokens` says where the prompt ends (randomness counts from there).
    An accepted order ends in `PrefillDone` or `PrefillFailed`, told repeatedly until `CancelPrefill`.
    Idempotent, and asked again as long as the pages are wanted: an asker that is silent for a lease counts as dead.
    `spec` is the request's: by its client, weight and priority it waits here among all others. Its stop rules are the
    asker's affair: one token is drawn.
    `deaths` and `cleared_at` as in `Submit`.
    """

    grant_id: str
    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_skip_tokens: int
    spec: RequestSpec
    agent: str
    timeout_s: float = 60.0
    deaths: int = 0
    cleared_at: int = 0


class OrderPrefills(Message, frozen=True):
    """Take these orders, each independently of the others, or keep them. Ask; answer `PrefillsOrdered`.

    One ask carries what one turn of the asker's loop brought for this scheduler, or a part of it.
    """

    orders: list[PrefillOrder]


class PrefillRefused(Part, frozen=True):
    """Why one order is refused.

    Codes: `overloaded`, `draining`, `never_fits`, `bad_token_id`, `bad_order`, `cancelled` (before it arrived).
    """

    grant_id: str
    code: str


class PrefillsOrdered(Message, frozen=True):
    """The prefill scheduler has the `accepted` orders. Those in neither list are to be asked again."""

    accepted: list[str]
    refused: list[PrefillRefused] = []


class PrefillDone(Part, frozen=True):
    """All chunks ran; all pages are announced to the agent. `token_id` is the first token drawn.

    `num_restored_tokens` of the cached ones were read from a disk. `extra` accompanies the token, as in `StepResult`.
    `queue_s` is how long the order waited to enter a batch, `prefill_s` how long it took from there to its token.
    """

    grant_id: str
    token_id: int
    num_cached_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    extra: bytes = b""
    num_restored_tokens: int = 0


class PrefillFailed(Part, frozen=True):
    """The order ended without a token. If the code is `poisoned_request`, the client is told `message`."""

    grant_id: str
    code: str
    message: str


class PrefillNews(Message, frozen=True):
    """Tell a decode scheduler which of its orders ended in one turn of the prefill scheduler's loop.

    Each is told again until a `CancelPrefill` names it.
    """

    done: list[PrefillDone] = []
    failed: list[PrefillFailed] = []


class CancelPrefill(Message, frozen=True):
    """Free everything held for these orders: they are done, failed, or no longer wanted. Ask; idempotent.

    One ask carries what one turn of the asker's loop brought, or a part of it. It also acknowledges each `PrefillDone`.
    """

    grant_ids: list[str]


class PrefillCancelled(Message, frozen=True):
    """The prefill scheduler holds nothing of these orders any more."""

    grant_ids: list[str]
