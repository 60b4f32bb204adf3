"""The events that the gateway's core handles, and the commands that it returns.

Events come from the mesh (`TextBatch`, `PromptRead`, `Pooled` and `AttemptFailed` as they are on the wire), from
answers to asks, from clients and from the clock. Commands are performed by `service.py`, in order.
"""

from typing import Final, NamedTuple

import msgspec

from nodes.numerics import Bits
from nodes.protocol import (
    AttemptFailed,
    ChooseRoute,
    Pooled,
    PromptRead,
    ResendFrom,
    Route,
    Submit,
    Suspected,
    TextBatch,
)
from nodes.protocol.records import SampleRecord
from nodes.request import AttemptRef, RequestSpec

ABORT: Final = "abort"
"""The finish reason of a request that `/abort_request` ended: what it had is its answer. SGLang's and vLLM's word."""


class Failure(NamedTuple):
    """Why something failed, as data: from an error frame, a lost peer, or the core itself."""

    code: str
    message: str
    retryable: bool = True
    param: str | None = None


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A client wants one sample of one prompt, whose call came at `arrived_at`.

    `shows_tokens`: its answer says something of tokens beside their text.
    """

    request_id: str
    prompt_ids: list[int]
    spec: RequestSpec
    route: Route
    arrived_at: float
    shows_tokens: bool = False


class SubmitAccepted(NamedTuple):
    """The scheduler holds these attempts; `epoch` is the incarnation that answered."""

    held: list[AttemptRef]
    scheduler: str
    epoch: int


class SubmitFailed(NamedTuple):
    """The ask failed: refused by the scheduler, or not answered (it may then hold the attempt all the same).

    `was_heard` False: no connection was made, so this request cannot have caused what happened to the scheduler.
    """

    request_id: str
    attempt: int
    failure: Failure
    was_heard: bool = True


class RouteChosen(NamedTuple):
    """A tokenizer named a route for a later try."""

    request_id: str
    attempt: int
    route: Route


class RouteFailed(NamedTuple):
    """No tokenizer could name a route."""

    request_id: str
    attempt: int
    failure: Failure


class GroupAway(NamedTuple):
    """A scheduler says that its worker is dead, for how long, and which attempts were in steps without an answer."""

    scheduler: str
    returns_in_s: float
    suspects: list[Suspected] = []


class MoveChosen(NamedTuple):
    """A tokenizer named a group where a request of `holder`, whose worker is dead, goes on sooner."""

    request_id: str
    attempt: int
    holder: str
    route: Route


class CancelAcknowledged(NamedTuple):
    """The scheduler will send nothing more for these attempts."""

    scheduler: str
    attempts: list[AttemptRef]


class CancelFailed(NamedTuple):
    """No acknowledgement; `lost` if the scheduler is gone, and what it held with it."""

    scheduler: str
    lost: bool


class PeerLost(NamedTuple):
    """An incarnation of an actor is gone or cannot be reached; `reason` is the supervisor's word, or the link's."""

    actor_id: str
    epoch: int
    reason: str = ""


class SchedulerAnswered(NamedTuple):
    """A lost incarnation is still there, and can be reached again."""

    scheduler: str
    epoch: int


class DetokenizersChanged(NamedTuple):
    """The detokenizers that are ready now."""

    ready: list[str]


class SchedulersChanged(NamedTuple):
    """The schedulers that are ready now, with their epochs; `stand_ins` decode only while no others are there.

    `bits` are those of all that announce them, ready or not: a draining one still brings output.
    """

    ready: dict[str, int]
    stand_ins: frozenset[str] = frozenset()
    bits: dict[str, Bits] = {}


class ClientGone(NamedTuple):
    """Nobody wants the output any more."""

    request_id: str


class Aborted(NamedTuple):
    """Its client wants no more of it: what there is of its output is its answer."""

    request_id: str


class Evicted(NamedTuple):
    """They give up their places, before they have any output, to requests of another client."""

    request_ids: list[str]
    failure: Failure


class Stopping(NamedTuple):
    """The gateway ends now; what it has will not be finished."""


class Tick(NamedTuple):
    """Time passed."""


Event = (
    TextBatch
    | PromptRead
    | Pooled
    | AttemptFailed
    | Opened
    | SubmitAccepted
    | SubmitFailed
    | RouteChosen
    | RouteFailed
    | GroupAway
    | MoveChosen
    | CancelAcknowledged
    | CancelFailed
    | PeerLost
    | SchedulerAnswered
    | DetokenizersChanged
    | SchedulersChanged
    | ClientGone
    | Aborted
    | Evicted
    | Stopping
    | Tick
)


class SendSubmit(NamedTuple):
    """Ask the scheduler to take an attempt; answer with `SubmitAccepted` or `SubmitFailed`."""

    scheduler: str
    message: Submit


class AskRoute(NamedTuple):
    """Ask any tokenizer for a route; answer with `RouteChosen` or `RouteFailed`."""

    attempt: int
    message: ChooseRoute


class AskMove(NamedTuple):
    """Ask any tokenizer, with all others of `holder` in one ask, where the request goes on in less than
    `returns_in_s`; if anywhere, answer with `MoveChosen`.
    """

    holder: str
    attempt: int
    returns_in_s: float
    message: ChooseRoute


class SendCancel(NamedTuple):
    """Ask a scheduler to drop attempts; answer with `CancelAcknowledged` or `CancelFailed`."""

    scheduler: str
    attempts: list[AttemptRef]


class SendResend(NamedTuple):
    """Tell a scheduler to send tokens again; `detokenizer` is empty if the present one stays."""

    scheduler: str
    detokenizer: str
    streams: list[ResendFrom]


class Suspect(NamedTuple):
    """Find out whether a scheduler is still there; if not, `PeerLost` follows."""

    scheduler: str


class AskAlive(NamedTuple):
    """Ask a scheduler that was lost whether it is there after all; answer with `SchedulerAnswered` if it is."""

    scheduler: str


class Accepted(NamedTuple):
    """A scheduler holds the request: from here on errors come inside the stream."""

    request_id: str


class Tokens(NamedTuple):
    """Output ids, and what a worker read beside each of them if the request reads anything.

    The text of the last `num_past` of them is not there yet or, where a stop string ended it, never will be.
    """

    ids: list[int]
    extras: list[bytes]
    num_past: int = 0


class Deliver(NamedTuple):
    """New output, `since_s` after the last or, if `first`, after arrival; `num_cached_tokens` as far as is known, of
    which `num_restored_tokens` were read from a disk. `tokens` if the request shows them.
    """

    request_id: str
    text: str
    num_tokens: int
    since_s: float
    first: bool
    num_cached_tokens: int = 0
    tokens: Tokens | None = None
    num_restored_tokens: int = 0


class DeliverPrompt(NamedTuple):
    """What was read of the prompt, all of it: before any output. Payloads of the same size, from position 1 on."""

    request_id: str
    payload: bytes


class DeliverVector(NamedTuple):
    """The vector that a request wanted, as `Pooled` has it; its end follows."""

    request_id: str
    vector: bytes
    num_cached_tokens: int


class End(NamedTuple):
    """The one end of a request: finished, failed or (neither) client gone. `stall_s`: longest pause in its output.
    `stop`: the stop string or the id of the token that ended it; None if neither did. `sample`: what became of it.
    """

    request_id: str
    finish_reason: str | None
    failure: Failure | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    elapsed_s: float
    stall_s: float = 0.0
    stop: str | int | None = None
    sample: SampleRecord | None = None
    num_restored_tokens: int = 0


Command = (
    SendSubmit
    | AskRoute
    | AskMove
    | SendCancel
    | SendResend
    | Suspect
    | AskAlive
    | Accepted
    | DeliverPrompt
    | DeliverVector
    | Deliver
    | End
)
