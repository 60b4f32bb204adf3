"""What crosses the mesh between roles: the request's way round the ring, and steps between scheduler and worker.

    gateway -> tokenizer                Prepare, ChooseRoute           -> Prepared, Route
    gateway -> scheduler                Submit, CancelAttempts, Resend -> Submitted, AttemptsCancelled
    scheduler -> worker -> scheduler    StepPlan -> StepResult or StepMismatch; Adopt -> Adopted; Dismiss
    worker -> worker of rank 0          JoinGroup                      -> GroupFormed
    scheduler D -> scheduler P          PrefillOrder, CancelPrefill    -> PrefillAccepted, PrefillCancelled
    scheduler P -> scheduler D          PrefillDone, PrefillFailed
    scheduler -> detokenizer            TokenBatch
    detokenizer -> gateway              TextBatch
    detokenizer -> scheduler            StopAt, Resend
    scheduler -> gateway                AttemptFailed
    operator -> kv_agent -> holders     see `nodes/protocol/memory.py`
    scheduler -> subscribers            Load on topic `load`, CacheEvents on topic `kv_events`

Everything told may be lost, repeated or late; whoever waits for progress asks again, and every message names the
attempt it is about.
"""

from kvstore.protocol import (
    CacheEvents,
    CloseGrant,
    ClosePair,
    GrantClosed,
    GrantOpened,
    MakePages,
    MapPool,
    OfferPages,
    OfferPair,
    OpenGrant,
    PagesOffered,
    PagesPulled,
    PagesReady,
    PagesSent,
    PairAccepted,
    PoolHandle,
    SendPages,
    TransferFailed,
)
from nodes.protocol.attempts import (
    AttemptFailed,
    AttemptsCancelled,
    CancelAttempts,
    Resend,
    ResendFrom,
    Submit,
    Submitted,
)
from nodes.protocol.handoff import (
    CancelPrefill,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillOrder,
)
from nodes.protocol.memory import (
    HasLetGo,
    HasTakenUp,
    LetGo,
    ListMemory,
    MemoryList,
    ReleaseMemory,
    ResumeMemory,
    TakeUp,
)
from nodes.protocol.output import (
    StopAt,
    StreamFinish,
    StreamOpen,
    TextBatch,
    TextDelta,
    TokenBatch,
)
from nodes.protocol.ranks import GroupFormed, JoinGroup
from nodes.protocol.routing import (
    ChooseRoute,
    Detokenize,
    Detokenized,
    Load,
    Prepare,
    Prepared,
    Route,
)
from nodes.protocol.steps import (
    Adopt,
    Adopted,
    Dismiss,
    RowError,
    StepMismatch,
    StepPlan,
    StepResult,
)

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
    | OfferPair
    | PairAccepted
    | SendPages
    | PagesSent
    | ClosePair
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
    | Dismiss
    | StepMismatch
    | PrefillOrder
    | PrefillAccepted
    | PrefillDone
    | PrefillFailed
    | CancelPrefill
    | PrefillCancelled
    | StopAt
    | Load
    | ReleaseMemory
    | ResumeMemory
    | ListMemory
    | MemoryList
    | LetGo
    | HasLetGo
    | TakeUp
    | HasTakenUp
    | MakePages
    | OfferPages
    | PagesOffered
    | JoinGroup
    | GroupFormed
)
"""Control messages: MessagePack maps, told apart by their tag."""

HotNodeMessage = StepPlan | StepResult | TokenBatch | TextBatch
"""Per-step messages: MessagePack arrays. The header says which of the two unions a body is."""
__all__ = [
    "Adopt",
    "Adopted",
    "AttemptFailed",
    "AttemptsCancelled",
    "CacheEvents",
    "CancelAttempts",
    "CancelPrefill",
    "ChooseRoute",
    "CloseGrant",
    "ClosePair",
    "Detokenize",
    "Detokenized",
    "Dismiss",
    "GrantClosed",
    "GrantOpened",
    "GroupFormed",
    "HasLetGo",
    "HasTakenUp",
    "HotNodeMessage",
    "JoinGroup",
    "LetGo",
    "ListMemory",
    "Load",
    "MakePages",
    "MapPool",
    "MemoryList",
    "NodeMessage",
    "OfferPages",
    "OfferPair",
    "OpenGrant",
    "PagesOffered",
    "PagesPulled",
    "PagesReady",
    "PagesSent",
    "PairAccepted",
    "PoolHandle",
    "PrefillAccepted",
    "PrefillCancelled",
    "PrefillDone",
    "PrefillFailed",
    "PrefillOrder",
    "Prepare",
    "Prepared",
    "ReleaseMemory",
    "Resend",
    "ResendFrom",
    "ResumeMemory",
    "Route",
    "RowError",
    "SendPages",
    "StepMismatch",
    "StepPlan",
    "StepResult",
    "StopAt",
    "StreamFinish",
    "StreamOpen",
    "Submit",
    "Submitted",
    "TakeUp",
    "TextBatch",
    "TextDelta",
    "TokenBatch",
    "TransferFailed",
]
