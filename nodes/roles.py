"""What all roles have in common besides messages: their names, topics, and the codec of the node protocol."""

from typing import Final

import msgspec

from kvstore.pool.header import is_later
from mesh.membership.view import SUPERVISOR, Membership
from mesh.wire.codec import Codec
from mesh.wire.message import Part
from nodes.protocol import (
    AbortRequests,
    Adopt,
    AnnouncePages,
    AttemptFailed,
    CancelAttempts,
    CancelPrefill,
    ChooseMoves,
    ChooseRoute,
    CloseGrant,
    ClosePair,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Fence,
    FindCalls,
    FindFates,
    FindStored,
    FlushCache,
    FlushStores,
    HotNodeMessage,
    JoinGroup,
    LetGo,
    ListMemory,
    ListStoredPages,
    ListStores,
    MapPool,
    NodeMessage,
    OfferPair,
    OpenGrants,
    OpenStore,
    OrderPrefills,
    Pooled,
    PrefillNews,
    Prepare,
    PromptRead,
    ReadResponse,
    ReleaseMemory,
    Resend,
    ResumeMemory,
    SendPages,
    StepMismatch,
    StepPlan,
    StepResult,
    StepResults,
    StopAt,
    StoreChanged,
    StorePages,
    SubmitAttempts,
    TakeUp,
    TextBatch,
    TokenBatch,
    TransferNews,
    WorkerAway,
)

GATEWAY: Final = "gateway"
TOKENIZER: Final = "tokenizer"
SCHEDULER: Final = "scheduler"
WORKER: Final = "worker"
DETOKENIZER: Final = "detokenizer"
KV_AGENT: Final = "kv_agent"
REGISTRY: Final = "registry"

ROLES: Final = frozenset({GATEWAY, TOKENIZER, SCHEDULER, WORKER, DETOKENIZER, KV_AGENT, REGISTRY, SUPERVISOR})
"""The mesh's own roles; custom actors have others."""

KV_EVENTS_TOPIC: Final = "kv_events"
LOAD_TOPIC: Final = "load"

SENT_BY: Final[dict[tuple[str, ...], tuple[type, ...]]] = {
    (GATEWAY,): (
        Prepare, ChooseRoute, ChooseMoves, Detokenize, DescribeVocabulary, DescribeTemplate, DescribeTokenizer,
        ReadResponse, SubmitAttempts, CancelAttempts, AbortRequests, FlushCache,
    ),
    (GATEWAY, DETOKENIZER): (Resend,),
    (SCHEDULER,): (
        StepPlan, Adopt, Fence, OpenGrants, CloseGrant, OrderPrefills, CancelPrefill, AnnouncePages, PrefillNews,
        TokenBatch, AttemptFailed, PromptRead, Pooled, WorkerAway, OpenStore, StorePages, FindStored,
        ListStoredPages,
    ),
    (WORKER,): (StepResult, StepResults, StepMismatch, JoinGroup),
    (DETOKENIZER,): (TextBatch, StopAt),
    (KV_AGENT,): (MapPool, TransferNews, StoreChanged, OfferPair, SendPages, ClosePair, LetGo, TakeUp),
    (SUPERVISOR,): (ReleaseMemory, ResumeMemory, ListMemory, ListStores, FlushStores, FindFates),
    (SUPERVISOR, GATEWAY): (FindCalls,),
}  # fmt: skip
"""By roles: the messages that an actor accepts from another host only if the sender has one of these roles."""

NODE_CODEC: Final = Codec(
    NodeMessage, HotNodeMessage, {kind: roles for roles, kinds in SENT_BY.items() for kind in kinds}
)


class SchedulerAttributes(Part, frozen=True):
    """What a scheduler announces of itself to the registry, for routing: `Member.attributes` of a scheduler.

    `worker_ready` is false while its worker is being replaced: it takes requests, and they wait. `policy` is the order
    in which waiting requests are admitted; empty if not announced. `numerics` is the fingerprint of its worker, or of
    the last one it had (`Adopted.numerics`), and `weights` that of the model in its pool (`KVLayout.fingerprint`):
    groups that have both in common compute the same bits. Empty: not known. `asks` are the names of what that worker
    can do for a draw (`Adopted.asks`). About `damaged_pages` pages its books disagreed: they are used no more, until
    another incarnation has rebuilt them.
    """

    group: str = ""
    phase: str = "mixed"
    page_size: int = 16
    worker_ready: bool = True
    policy: str = ""
    numerics: str = ""
    asks: list[str] = []
    damaged_pages: int = 0
    weights: str = ""


class GatewayAttributes(Part, frozen=True):
    """What a gateway announces: where it is reached, and which API keys it asks for.

    `api_keys` is the digest of its file of keys, empty without one: hosts whose files differ are seen by it.
    `api_keys_trouble` says why that file cannot be used now; then the keys read before stay in force.
    """

    url: str = ""
    api_keys: str = ""
    api_keys_trouble: str = ""


class KVAgentAttributes(Part, frozen=True):
    """What a kv_agent announces: its pools, how pages get out of them, and the groups whose memory is `released`.

    `incarnations` by group: a pool of another incarnation is another pool, and a mapping of the old one is worthless.
    `fallbacks` by source agent: over what its pages come instead of the transport that the operator chose, and why.
    """

    groups: list[str] = []
    transports: list[str] = []
    incarnations: dict[str, int] = {}
    fallbacks: dict[str, str] = {}
    released: list[str] = []


class SupervisorAttributes(Part, frozen=True):
    """What a supervisor announces: ids of its actors that an operator drained, each with the incarnation it applies to.

    They stay down until an operator has them started again, unlike actors that are only being restarted.
    """

    drained: dict[str, int] = {}


def drained_by_wish(members: Membership) -> dict[str, int]:
    """Actors that stay down by their supervisor's word, each with the incarnation that was drained."""
    drained: dict[str, int] = {}
    for member in members.by_role(SUPERVISOR, ready=False):
        try:
            drained |= msgspec.convert(member.attributes, SupervisorAttributes).drained
        except msgspec.ValidationError:
            # A custom actor of this role name uses the attribute for something else.
            continue
    return drained


def is_replaced(members: Membership, agent: str, group: str, incarnation: int) -> bool:
    """Whether a later pool has replaced the group's pool of this incarnation. False while the agent is away.

    The membership view may be older than the agent's own answer, so an earlier incarnation in it replaces nothing.
    """
    member = members.get(agent)
    found = member.attributes.get("incarnations", {}).get(group) if member is not None else None
    return found is not None and is_later(found, incarnation)
