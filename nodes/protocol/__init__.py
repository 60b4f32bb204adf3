"""Messages between roles: a request's way round the ring, and steps between scheduler and worker.

    gateway -> tokenizer                Prepare, ChooseRoute           -> Prepared, Route
    gateway -> tokenizer                ChooseMoves                    -> MovesChosen
    gateway -> tokenizer                Detokenize, DescribeVocabulary -> Detokenized, VocabularyIs
    gateway -> tokenizer                DescribeTemplate, DescribeTokenizer -> TemplateIs, TokenizerIs
    gateway -> gateway                  ReadResponse, AbortRequests    -> ResponseIs, RequestsAborted
    gateway -> scheduler                SubmitAttempts, CancelAttempts -> AttemptsSubmitted, AttemptsCancelled; Resend
    scheduler -> worker -> scheduler    StepPlan -> StepResult(s) or StepMismatch; Adopt -> Adopted; Fence
    worker -> worker of rank 0          JoinGroup                      -> GroupFormed
    scheduler D -> its kv_agent         OpenGrants, CloseGrant         -> GrantsOpened, GrantClosed
    scheduler -> its kv_agent           OpenStore, FindStored          -> StoreOpened, StoredFound; StorePages
    scheduler -> its kv_agent           ListStoredPages                -> StoredPagesListed
    scheduler D -> scheduler P          OrderPrefills, CancelPrefill   -> PrefillsOrdered, PrefillCancelled
    scheduler P -> kv_agent of D        AnnouncePages
    kv_agent -> schedulers D, P         TransferNews
    kv_agent -> its schedulers          StoreChanged
    scheduler P -> scheduler D          PrefillNews
    scheduler -> detokenizer            TokenBatch
    detokenizer -> gateway              TextBatch
    detokenizer -> scheduler            StopAt, Resend
    scheduler -> gateway                AttemptFailed, PromptRead, Pooled, WorkerAway
    gateway -> schedulers               FlushCache                     -> CacheFlushed
    supervisor, gateway -> gateway      FindCalls                      -> CallsFound
    operator -> kv_agent -> holders     see `nodes/protocol/memory.py`
    operator -> kv_agent, scheduler     see `nodes/protocol/stores.py`
    scheduler -> subscribers            Load on topic `load`, CacheEvents on topic `kv_events`

Any tell may be lost, repeated or late. An actor that waits for progress asks again, and every message names the attempt
it is about.
"""

from kvstore.protocol import (
    AnnouncePages,
    CacheEvents,
    CloseGrant,
    ClosePair,
    FindStored,
    GrantClosed,
    GrantRefused,
    GrantsOpened,
    ListStoredPages,
    MapPool,
    OfferPair,
    OpenGrant,
    OpenGrants,
    OpenStore,
    PagesPulled,
    PagesReady,
    PagesSent,
    PairAccepted,
    PoolHandle,
    SendPages,
    StoreChanged,
    StoredFound,
    StoredPagesListed,
    StoreOpened,
    StorePages,
    TransferFailed,
    TransferNews,
)
from nodes.protocol.attempts import (
    AttemptFailed,
    AttemptRefused,
    AttemptsCancelled,
    AttemptsSubmitted,
    CancelAttempts,
    Pooled,
    PromptRead,
    Resend,
    ResendFrom,
    Submit,
    SubmitAttempts,
    Suspected,
    WorkerAway,
)
from nodes.protocol.control import AbortRequests, CacheFlushed, FlushCache, RequestsAborted
from nodes.protocol.handoff import (
    CancelPrefill,
    OrderPrefills,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillNews,
    PrefillOrder,
    PrefillRefused,
    PrefillsOrdered,
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
from nodes.protocol.records import CallsFound, FindCalls
from nodes.protocol.responses import ReadResponse, ResponseIs
from nodes.protocol.routing import (
    PROMPT_TAIL_CHARS,
    ChooseMoves,
    ChooseRoute,
    DescribeTemplate,
    DescribeTokenizer,
    DescribeVocabulary,
    Detokenize,
    Detokenized,
    Load,
    MovesChosen,
    Prepare,
    Prepared,
    Route,
    TemplateIs,
    TokenizerIs,
    VocabularyIs,
)
from nodes.protocol.steps import (
    Adopt,
    Adopted,
    Fence,
    RowError,
    StepMismatch,
    StepPlan,
    StepResult,
    StepResults,
)
from nodes.protocol.stores import FatesFound, FindFates, FlushStores, ListStores, StoreList, StoresFlushed

NodeMessage = (
    MapPool
    | PoolHandle
    | OpenGrants
    | GrantsOpened
    | AnnouncePages
    | TransferNews
    | OpenStore
    | StoreOpened
    | FindStored
    | StoredFound
    | ListStoredPages
    | StoredPagesListed
    | StorePages
    | StoreChanged
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
    | ChooseMoves
    | MovesChosen
    | Detokenize
    | Detokenized
    | DescribeVocabulary
    | VocabularyIs
    | DescribeTemplate
    | TemplateIs
    | DescribeTokenizer
    | TokenizerIs
    | ReadResponse
    | ResponseIs
    | AbortRequests
    | RequestsAborted
    | FindCalls
    | CallsFound
    | FlushCache
    | CacheFlushed
    | SubmitAttempts
    | AttemptsSubmitted
    | CancelAttempts
    | AttemptsCancelled
    | Resend
    | AttemptFailed
    | Pooled
    | PromptRead
    | WorkerAway
    | Adopt
    | Adopted
    | Fence
    | StepMismatch
    | OrderPrefills
    | PrefillsOrdered
    | PrefillNews
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
    | ListStores
    | StoreList
    | FlushStores
    | StoresFlushed
    | FindFates
    | FatesFound
    | JoinGroup
    | GroupFormed
)
"""Control messages: MessagePack maps, distinguished by their tag."""

HotNodeMessage = StepPlan | StepResult | StepResults | TokenBatch | TextBatch
"""Per-step messages: MessagePack arrays. A body's first byte says which of the unions it is (`mesh/wire/codec.py`)."""
__all__ = [
    "PROMPT_TAIL_CHARS",
    "AbortRequests",
    "Adopt",
    "Adopted",
    "AnnouncePages",
    "AttemptFailed",
    "AttemptRefused",
    "AttemptsCancelled",
    "AttemptsSubmitted",
    "CacheEvents",
    "CacheFlushed",
    "CallsFound",
    "CancelAttempts",
    "CancelPrefill",
    "ChooseMoves",
    "ChooseRoute",
    "CloseGrant",
    "ClosePair",
    "DescribeTemplate",
    "DescribeTokenizer",
    "DescribeVocabulary",
    "Detokenize",
    "Detokenized",
    "FatesFound",
    "Fence",
    "FindCalls",
    "FindFates",
    "FindStored",
    "FlushCache",
    "FlushStores",
    "GrantClosed",
    "GrantRefused",
    "GrantsOpened",
    "GroupFormed",
    "HasLetGo",
    "HasTakenUp",
    "HotNodeMessage",
    "JoinGroup",
    "LetGo",
    "ListMemory",
    "ListStoredPages",
    "ListStores",
    "Load",
    "MapPool",
    "MemoryList",
    "MovesChosen",
    "NodeMessage",
    "OfferPair",
    "OpenGrant",
    "OpenGrants",
    "OpenStore",
    "OrderPrefills",
    "PagesPulled",
    "PagesReady",
    "PagesSent",
    "PairAccepted",
    "PoolHandle",
    "Pooled",
    "PrefillCancelled",
    "PrefillDone",
    "PrefillFailed",
    "PrefillNews",
    "PrefillOrder",
    "PrefillRefused",
    "PrefillsOrdered",
    "Prepare",
    "Prepared",
    "PromptRead",
    "ReadResponse",
    "ReleaseMemory",
    "RequestsAborted",
    "Resend",
    "ResendFrom",
    "ResponseIs",
    "ResumeMemory",
    "Route",
    "RowError",
    "SendPages",
    "StepMismatch",
    "StepPlan",
    "StepResult",
    "StepResults",
    "StopAt",
    "StoreList",
    "StoresFlushed",
    "StreamFinish",
    "StreamOpen",
    "Submit",
    "SubmitAttempts",
    "Suspected",
    "TakeUp",
    "TemplateIs",
    "TextBatch",
    "TextDelta",
    "TokenBatch",
    "TokenizerIs",
    "TransferFailed",
    "TransferNews",
    "VocabularyIs",
    "WorkerAway",
]
