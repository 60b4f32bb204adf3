"""Between gateway and scheduler: one attempt of one request, from submission to its end."""

from typing import Final

from mesh.wire.message import HotPart, Message, Part
from nodes.request import AttemptRef, RequestSpec, Stages

UNSUPPORTED_ASK: Final = "unsupported_ask"
"""A worker cannot do something that a request asks of its draws."""
OVER_SHARE: Final = "over_share"
"""There is no room, and the client of the request has more of it than any other that waits."""


class Submit(Part, frozen=True):
    """One attempt of one request, to be started; idempotent by (request_id, attempt).

    `prompt_ids` and `output_ids` are separate because usage, seeds and stop text depend on the boundary. Output
    positions count from 0 at the first output token of attempt 0, so this attempt begins at `len(output_ids)`.
    If the sampling reads its prompt, `prompt_position` is the first of the prompt's positions of which nothing has come
    (`PromptRead`): what is cached before it may be used. Such an attempt is not prefilled elsewhere.
    An attempt that wants a vector (`RequestSpec.kind`) ends with `Pooled`, has no outputs and needs no
    detokenizer.
    In a step of it `deaths` workers have died (`Suspected`). It is cleared of them once it has `cleared_at` output
    tokens: until then another death counts on from there.
    """

    request_id: str
    attempt: int
    gateway: str
    detokenizer: str
    prompt_ids: list[int]
    spec: RequestSpec
    output_ids: list[int] = []
    prefill: str = ""
    prompt_position: int = 0
    deaths: int = 0
    cleared_at: int = 0


class SubmitAttempts(Message, frozen=True):
    """Start these attempts, each independently of the others. Ask; answer `AttemptsSubmitted`.

    One ask carries what one turn of the gateway's loop brought for this scheduler, or a part of it.
    """

    attempts: list[Submit]


class AttemptRefused(Part, frozen=True):
    """Why one attempt is refused; `param` is the field of the request that would have to change.

    Codes: `never_fits` (400, more tokens than context or pool can hold), `empty_prompt` and `bad_token_id` (400),
    `bad_asks` (400, too many), `unsupported_ask` (this group's worker cannot do what the request asks of its draws),
    `overloaded` (503, queue full), `over_share` (429, queue full, and most in it is its client's), `draining` (try
    another scheduler), `attempt_over` (this attempt or a later one was here and has been cancelled, superseded or
    forgotten).
    """

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool = False
    param: str | None = None


class AttemptsSubmitted(Message, frozen=True):
    """The scheduler holds the `held` attempts from now on. It may or may not hold those in neither list."""

    held: list[AttemptRef]
    refused: list[AttemptRefused] = []


class CancelAttempts(Message, frozen=True):
    """Free everything held for these attempts and older ones: the client left, or the gateway is done or moved on.

    Ask by gateways and detokenizers; idempotent; answered by `AttemptsCancelled`, for unknown attempts too.
    """

    attempts: list[AttemptRef]


class AttemptsCancelled(Message, frozen=True):
    """These attempts will send nothing more.

    What is left out is asked for again: a worker that is back computes it, and it may be about to move (`WorkerAway`).
    """

    attempts: list[AttemptRef]


class ResendFrom(HotPart, frozen=True):
    """One stream's gap: send output tokens again from `position` on.

    A `prompt_position` above 0 asks for what was read of the prompt from there on, too (`PromptRead`).
    """

    request_id: str
    attempt: int
    position: int
    prompt_position: int = 0


class Resend(Message, frozen=True):
    """Send tokens again: a receiver saw a gap, or no news for too long.

    Tell, to the scheduler. It answers with tokens (by way of the detokenizer), with nothing if there are none to send
    yet, or with `AttemptFailed` if it does not know the attempt. For a gateway it opens the stream again first, because
    a detokenizer drops tokens that it has had before. `detokenizer`, if not empty, names the one to use from now on.
    `streams_unknown` are numbers of this scheduler's streams for which a detokenizer got tokens but no `StreamOpen`:
    the scheduler opens them again, and sends tokens from the position at which the open ends.
    """

    streams: list[ResendFrom]
    detokenizer: str = ""
    streams_unknown: list[int] = []


class PromptRead(Message, frozen=True):
    """What a worker read of an attempt's prompt, if its sampling reads it: `count` payloads, one after the other.

    Tell, scheduler -> gateway, after each step that read some and on `Resend`. The first payload is about the prompt's
    token at `position` (from 1: nothing comes before the token at 0); all have the same size, at most
    `MAX_EXTRA_BYTES`. A gateway takes what continues the payloads that it has, and no output before it has all.
    """

    request_id: str
    attempt: int
    position: int
    count: int
    payload: bytes


class Pooled(Message, frozen=True):
    """The vector of an attempt that wants one, and its end: float32 numbers, little-endian, as the worker made them.

    Tell, scheduler -> gateway; told again on `Resend` until the gateway cancels the attempt, because it has it. They
    are what comes out of the model's pooling and the layers behind it, neither normalised nor cut.
    """

    request_id: str
    attempt: int
    vector: bytes
    num_cached_tokens: int = 0
    stages: Stages | None = None


class AttemptFailed(Message, frozen=True):
    """The attempt is over without a finish. `retryable`: the gateway may submit the next attempt.

    Codes: `unknown_attempt`, `worker_lost`, `poisoned_request`, `preempted_for_good`, `draining`,
    `memory_released`, `over_share` (it gave up its place in the queue to another client's), and those of `RowError`.
    """

    request_id: str
    attempt: int
    code: str
    message: str = ""
    retryable: bool = True


class Suspected(Part, frozen=True):
    """An attempt that was in a step which a worker had not answered when it died, `deaths` workers by now.

    That step may have killed it, and so may anything else. If it is not to blame, it has `cleared_at` output tokens
    soon, those of earlier attempts included: all that the unanswered steps would have drawn, and one at least.
    """

    request_id: str
    attempt: int
    deaths: int
    cleared_at: int


class WorkerAway(Message, frozen=True):
    """Tell, scheduler -> every gateway: my worker is dead, and will be back in about `returns_in_s`.

    Told when the death is known, and again if the worker is not back by then, with the time that it has been away.
    Attempts stay here until they are cancelled: steps go on when the worker is back. A gateway may move them to another
    group meanwhile (`ChooseMoves`), the `suspects` once only. What is no positive number says nothing: attempts stay.
    `suspects` were in steps without an answer; some of them may have ended here.
    """

    returns_in_s: float
    suspects: list[Suspected] = []
