"""What crosses the mesh between roles: the request's way round the ring, and steps between scheduler and worker.

    gateway -> tokenizer                Prepare, ChooseRoute           -> Prepared, Route
    gateway -> scheduler                Submit, CancelAttempts, Resend -> Submitted, AttemptsCancelled
    scheduler -> worker -> scheduler    StepPlan -> StepResult; Adopt -> Adopted
    scheduler D -> scheduler P          PrefillOrder, CancelPrefill    -> PrefillAccepted, PrefillCancelled
    scheduler P -> scheduler D          PrefillDone, PrefillFailed
    scheduler -> detokenizer            TokenBatch
    detokenizer -> gateway              TextBatch
    detokenizer -> scheduler            StopAt, Resend
    scheduler -> gateway                AttemptFailed
    scheduler -> subscribers            Load on topic `load`, CacheEvents on topic `kv_events`

Everything told may be lost, repeated or late; whoever waits for progress asks again, and every message names the
attempt it is about.
"""

from kvstore.protocol import (
    CacheEvents,
    CloseGrant,
    GrantClosed,
    GrantOpened,
    MapPool,
    OpenGrant,
    PagesPulled,
    PagesReady,
    PoolHandle,
    TransferFailed,
)
from mesh.message import HotMessage, HotPart, Message
from nodes.request import AttemptRef, Sampling, StopRules

# gateway <-> tokenizer


class Prepare(Message):
    """Ask a tokenizer for token ids and a route. Exactly one of `chat`, `texts`, `token_ids` is given.

    `chat` is one JSON document: the list of messages as the client sent it. `texts` and `token_ids` hold one prompt
    each per element.
    """

    request_id: str
    chat: bytes | None = None
    tools: bytes | None = None
    chat_template_kwargs: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    texts: list[str] | None = None
    token_ids: list[list[int]] | None = None
    add_special_tokens: bool = True
    extra_key: str = ""
    route: bool = True
    excluded: list[str] = []


class Route(Message):
    """Where a request goes. `prefill` is empty where the decode scheduler is to prefill itself."""

    decode: str
    prefill: str = ""
    detokenizer: str = ""
    overlap_tokens: int = 0


class Prepared(Message):
    """Token ids of each prompt and a route for each (no routes where none was asked for)."""

    token_ids: list[list[int]]
    routes: list[Route] = []


class ChooseRoute(Message):
    """Ask for the route of a later attempt: the ids are known, `excluded` names actors that just failed it."""

    request_id: str
    token_ids: list[int]
    extra_key: str = ""
    excluded: list[str] = []


class Detokenize(Message):
    """Ask a tokenizer for the text of token ids (the `/detokenize` route)."""

    token_ids: list[int]
    skip_special_tokens: bool = False


class Detokenized(Message):
    """Answer to `Detokenize`."""

    text: str


# gateway <-> scheduler


class Submit(Message):
    """Start one attempt of one request. Ask; idempotent by (request_id, attempt).

    Errors: `never_fits` (400, more pages than the pool has), `overloaded` (503, queue full), `draining` (try another).
    `prompt_ids` and `output_ids` stay apart: usage, seeds and stop text depend on the boundary. Output positions count
    from 0 at the first output token of attempt 0, so this attempt begins at `len(output_ids)`.
    """

    request_id: str
    attempt: int
    gateway: str
    detokenizer: str
    prompt_ids: list[int]
    sampling: Sampling
    stop: StopRules
    output_ids: list[int] = []
    prefill: str = ""
    extra_key: str = ""
    priority: int = 0
    skip_special_tokens: bool = True


class Submitted(Message):
    """The scheduler holds the attempt from now on."""

    request_id: str
    attempt: int


class CancelAttempts(Message):
    """Free everything of these attempts and older ones: a client left, the gateway has all it wants, or moved on.

    Ask by gateways and detokenizers; idempotent; answered by `AttemptsCancelled`, for unknown attempts too.
    """

    attempts: list[AttemptRef]


class AttemptsCancelled(Message):
    """These attempts will send nothing more."""

    attempts: list[AttemptRef]


class ResendFrom(HotPart):
    """One stream's gap: send output tokens again from `position` on."""

    request_id: str
    attempt: int
    position: int


class Resend(Message):
    """Send tokens again: a receiver saw a gap, or no news for too long.

    Tell, to the scheduler. It answers with tokens (by way of the detokenizer), with nothing where there is none to
    send yet, or with `AttemptFailed` where it does not know the attempt. `detokenizer` names another one to use from
    now on, if not empty.
    """

    streams: list[ResendFrom]
    detokenizer: str = ""


class AttemptFailed(Message):
    """The attempt is over without a finish. `retryable`: the gateway may submit the next attempt.

    Codes: `unknown_attempt`, `worker_lost`, `prefill_failed`, `poisoned_request`, `preempted_for_good`, `draining`,
    `internal`.
    """

    request_id: str
    attempt: int
    code: str
    message: str = ""
    retryable: bool = True


# scheduler <-> worker


class StepRow(HotPart):
    """One sequence's share of a step: `num_tokens` tokens from position `start` on, whose KV is written to its pages.

    `row_id` is the scheduler's number for the sequence. Positions count prompt and output together. If `sampling` is
    set, a token is drawn from the last position's logits; its output position (the randomness counter) is
    `start + num_tokens - num_prompt_tokens`. `from_row` >= 0: the row's only input token is what row number `from_row`
    (index into `rows`) of step `step - 1` drew, not known to the scheduler yet; the buffer then holds -1.
    Nothing else is remembered between steps: a step can be sent again as it is.
    """

    row_id: int
    start: int
    num_tokens: int
    num_pages: int
    num_prompt_tokens: int
    sampling: Sampling | None = None
    from_row: int = -1


class StepPlan(HotMessage):
    """One forward pass. Buffers: `token_ids` int32 of all rows, `page_ids` int32 of all rows (each row's from 0 on).

    `num_pages` of a row covers at least positions `0 .. start + num_tokens`. Rows finish in order; the worker
    runs steps in order of `step`, refuses other epochs, and answers a step it has already done with the same result.
    """

    scheduler_epoch: int
    step: int
    rows: list[StepRow]
    timeout_s: float = 60.0


class RowError(HotPart):
    """A row that could not be computed; the others of its step could."""

    row: int
    code: str
    message: str


class StepResult(HotMessage):
    """What a step drew: `token_ids[i]` for `rows[i]`, -1 where row i drew nothing."""

    scheduler_epoch: int
    step: int
    token_ids: list[int]
    errors: list[RowError] = []
    elapsed_s: float = 0.0


class Adopt(Message):
    """A scheduler takes a worker over: queued steps are dropped, the running one is finished first."""

    scheduler_epoch: int


class Adopted(Message):
    """`last_step` is the last step the worker ran for the scheduler before (0: none)."""

    last_step: int
    worker_epoch: int
    numerics: str
    vocab_size: int
    max_batch_tokens: int = 0


# scheduler D <-> scheduler P


class PrefillOrder(Message):
    """Compute KV of `token_ids` and move the pages from `num_skip_tokens` on into the grant. Ask.

    `num_skip_tokens` is a multiple of the page: what the decode side has cached already. `token_ids` is prompt and
    earlier attempts' output together; `num_prompt_tokens` tells where the prompt ends (randomness counts from there).
    Answer `PrefillAccepted`; later `PrefillDone` or `PrefillFailed` by tell, repeated until `CancelPrefill`.
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


class PrefillAccepted(Message):
    """The prefill scheduler has queued the order."""

    grant_id: str


class PrefillDone(Message):
    """All chunks ran; all pages are announced to the agent. `token_id` is the first token drawn."""

    grant_id: str
    token_id: int
    num_cached_tokens: int


class PrefillFailed(Message):
    """The order ended without its token."""

    grant_id: str
    code: str
    message: str
    retryable: bool = True


class CancelPrefill(Message):
    """Free everything of the order: it is done, failed, or no longer wanted. Ask; idempotent."""

    grant_id: str


class PrefillCancelled(Message):
    """Nothing of the order is left at the prefill scheduler."""

    grant_id: str


# scheduler -> detokenizer -> gateway


class StreamOpen(HotPart):
    """Opens a stream at a detokenizer, or opens it again from the start (`position` of its next tokens says where).

    `prompt_tail` is the last few prompt ids, which some tokenizers need to decode the first output token.
    `output_ids` are outputs that earlier attempts already delivered.
    """

    stream: int
    request_id: str
    attempt: int
    gateway: str
    stop: StopRules
    prompt_tail: list[int]
    output_ids: list[int]
    num_cached_tokens: int = 0
    skip_special_tokens: bool = True


class StreamFinish(HotPart):
    """The last token of a stream has been sent; reason `stop` or `length`. `drop_last`: do not show the stop token."""

    stream: int
    position: int
    reason: str


class TokenBatch(HotMessage):
    """One step's tokens, columnar: stream `streams[i]` gets `counts[i]` tokens from output position `positions[i]` on.

    `opens` come first, then tokens, then `finishes`, then `closes` (streams to forget without an end).
    A stream number is unique within (sender, sender epoch).
    """

    streams: list[int]
    positions: list[int]
    counts: list[int]
    token_ids: list[int]
    opens: list[StreamOpen] = []
    finishes: list[StreamFinish] = []
    closes: list[int] = []


class TextDelta(HotPart):
    """New output of one request: tokens from output position `position`, text from character `text_offset`.

    Text may lag behind tokens (incomplete UTF-8, a possible stop string). `finish_reason` is `stop` or `length`, set
    on the last delta only, whose text is then complete. `num_tokens` at the finish counts all output tokens.
    """

    request_id: str
    attempt: int
    position: int
    token_ids: list[int]
    text_offset: int
    text: str
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    scheduler: str = ""


class TextBatch(HotMessage):
    """All deltas of one step for one gateway."""

    deltas: list[TextDelta]


class StopAt(Message):
    """A stop string was found at output position `position`: end the attempt there. Tell, detokenizer -> scheduler."""

    attempts: list[AttemptRef]


# topics


class Load(Message):
    """What a scheduler publishes on topic `load` when it changed (at most some times a second)."""

    group: str
    phase: str
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_waiting_tokens: int = 0


NodeMessage = (
    MapPool
    | PoolHandle
    | OpenGrant
    | GrantOpened
    | PagesReady
    | PagesPulled
    | TransferFailed
    | CloseGrant
    | GrantClosed
    | CacheEvents
    | Prepare
    | Prepared
    | Route
    | ChooseRoute
    | Detokenize
    | Detokenized
    | Submit
    | Submitted
    | CancelAttempts
    | AttemptsCancelled
    | Resend
    | AttemptFailed
    | Adopt
    | Adopted
    | PrefillOrder
    | PrefillAccepted
    | PrefillDone
    | PrefillFailed
    | CancelPrefill
    | PrefillCancelled
    | StopAt
    | Load
)
"""Control messages: MessagePack maps, told apart by their tag."""

HotNodeMessage = StepPlan | StepResult | TokenBatch | TextBatch
"""Per-step messages: MessagePack arrays. The header says which of the two unions a body is."""
