"""What crosses the mesh about KV memory: pools, grants, page moves and cache events.

Spoken by `nodes/kv_agent` (which owns pools and is the only writer of transferred pages), schedulers, and everything
that follows cache events. Page numbers are indices into one pool incarnation; a page is identified across time by
(pool incarnation, page, generation).
"""

from kvstore.layout import KVLayout
from mesh.wire.message import Message, Part


class MapPool(Message, frozen=True):
    """Ask a kv_agent for the pool of a worker group. Answer: `PoolHandle`.

    Grants of the asker's earlier incarnations are revoked; the answer waits until none of them is written any more.
    Each tensor-parallel rank has a pool of its own; the page table is that of rank 0's.
    """

    group: str
    rank: int = 0


class PoolHandle(Message, frozen=True):
    """Where a pool lies. One file: header, page table, pages (see `kvstore/pool/page_pool.py` for the offsets).

    `device` is `cpu`, or `cuda:N` of a pool whose pages are not in the file but there (`kvstore/pool/cuda/pool.py`).
    """

    group: str
    agent: str
    path: str
    num_pages: int
    layout: KVLayout
    incarnation: int
    device: str = "cpu"


class MakePages(Message, frozen=True):
    """Ask of a worker to its agent: a page table for pages that it will make itself. Answer: `PoolHandle`.

    Each incarnation of a worker gets a table of its own, which is empty. Errors, all retryable: `memory_released`,
    `superseded`; `unknown_group` where a group's pages are the agent's to make.
    """

    group: str


class OfferPages(Message, frozen=True):
    """Ask of a worker to its agent: the pages of this incarnation are made, and others open them by `ipc_handle`.

    Answer `PagesOffered`; from then on the pool can be mapped. Idempotent. Error: `superseded`.
    """

    group: str
    incarnation: int
    ipc_handle: bytes


class PagesOffered(Message, frozen=True):
    """The handle is in the pool's header."""

    group: str
    incarnation: int


class OpenGrant(Part, frozen=True):
    """A decode scheduler lends pages of its own pool to one transfer.

    `generations[i]` is what the page table says of `pages[i]` now; the agent checks it before and after each copy.
    A grant is single use: a retry takes new pages and a new grant.
    """

    grant_id: str
    group: str
    pages: list[int]
    generations: list[int]
    layout_digest: bytes
    holder: str
    holder_epoch: int
    timeout_s: float


class OpenGrants(Message, frozen=True):
    """Open these grants, each by itself. Ask of a decode scheduler to its own agent; answer `GrantsOpened`.

    One for all that a turn of the asker's loop brought. Idempotent: a grant that is open with the same pages is opened
    again, which starts its lease anew.
    """

    grants: list[OpenGrant]


class GrantRefused(Part, frozen=True):
    """Why one grant is not opened: `page_granted`, `too_many_grants`, `draining`, `grant_used`, and others."""

    grant_id: str
    code: str
    message: str
    retryable: bool = False


class GrantsOpened(Message, frozen=True):
    """The agent takes `PagesReady` for the `opened` from now on. What is named in neither list is to be asked again."""

    opened: list[str]
    refused: list[GrantRefused] = []


class PagesReady(Part, frozen=True):
    """A prefill scheduler announces finished pages to the destination's agent, which pulls them into the grant.

    `first` is the index in the grant of `pages[0]`. `total` is the number of pages the whole transfer has, known from
    the start. Repeats are harmless: an index already copied is acknowledged again.
    """

    grant_id: str
    first: int
    total: int
    source_group: str
    source_agent: str
    source_incarnation: int
    layout_digest: bytes
    pages: list[int]
    generations: list[int]


class AnnouncePages(Message, frozen=True):
    """Tell an agent of pages that are finished, for each grant at most once: all that a turn of the loop brought."""

    announced: list[PagesReady]


class PagesPulled(Part, frozen=True):
    """The agent tells both schedulers how far the transfer is; `complete` is said exactly when all pages are in.

    That end goes to the grant's holder, and to both in answer to a repeated `PagesReady`. The first `num_pages` pages
    of the grant are in; they are not written again, however the transfer ends.
    """

    grant_id: str
    num_pages: int
    complete: bool = False


class TransferFailed(Part, frozen=True):
    """The transfer ended without all its pages; told to both sides.

    A copy may still write; what says that none does is `GrantClosed`.
    """

    grant_id: str
    code: str
    message: str


class TransferNews(Message, frozen=True):
    """Tell a scheduler what a turn of the agent's loop brought for its transfers; `pulled` came before `failed`."""

    pulled: list[PagesPulled] = []
    failed: list[TransferFailed] = []


class CloseGrant(Message, frozen=True):
    """Revoke a grant. Ask by its holder; answered by `GrantClosed` once nothing can still write its pages."""

    grant_id: str


class GrantClosed(Message, frozen=True):
    """The grant is gone and its pages are the holder's alone. Said of unknown grants too: closing is idempotent."""

    grant_id: str


class OfferPair(Message, frozen=True):
    """Ask a source's agent to make a pair of two ranks, the asker's being 0. Answer: `PairAccepted`.

    `pair` is the asker's name for it; `unique_id` is what NCCL gave rank 0, or with `transport` `tcp` where rank 0
    listens (`kvstore/transfer/paired/tcp/wire.py`). `timeout_s` is how long making it may take. Sent by an agent whose
    transport is `nccl` or `tcp`, before it pulls pages of `group` from where its rank `rank` has them for the first
    time.
    """

    pair: str
    unique_id: bytes
    group: str
    incarnation: int
    layout_digest: bytes
    timeout_s: float
    transport: str = "nccl"
    rank: int = 0


class PairAccepted(Message, frozen=True):
    """The other end makes its half of the pair now. What fails from here on is seen by both."""

    pair: str


class SendPages(Message, frozen=True):
    """Ask the other end of a pair to send bytes of a pool; the asker has begun to receive them. Answer: `PagesSent`.

    `offsets[i]` and `sizes[i]` are bytes from page 0, one send each, in this order. `generations[j]` is what was
    announced of `pages[j]`; the sender compares them before it sends and when it has sent. Orders of one pair are
    carried out in the order of their coming. `rank` is the tensor-parallel rank whose pool is meant; generations are
    those of rank 0, whose page table tells of all.
    """

    pair: str
    number: int
    group: str
    incarnation: int
    offsets: list[int]
    sizes: list[int]
    pages: list[int]
    generations: list[int]
    timeout_s: float
    rank: int = 0


class PagesSent(Message, frozen=True):
    """How a `SendPages` ended; `code` empty: all was sent, and was before and afterwards what had been announced.

    `is_sent` False: nothing was, or not all, and the pair is of no use any more.
    """

    pair: str
    number: int
    is_sent: bool
    code: str = ""
    message: str = ""


class ClosePair(Message, frozen=True):
    """Tell the other end that a pair is given up: it aborts its half."""

    pair: str


class PageStored(Message, frozen=True):
    """A full page entered the prefix cache of `group`."""

    group: str
    page_hash: bytes
    parent_hash: bytes
    token_ids: list[int]
    extra_key: str = ""


class PageRemoved(Message, frozen=True):
    """Pages left the prefix cache of `group`."""

    group: str
    page_hashes: list[bytes]


class CacheCleared(Message, frozen=True):
    """The prefix cache of `group` starts empty (a new scheduler epoch without adoption, or a weight update)."""

    group: str


class CacheEvents(Message, frozen=True):
    """One publication of topic `kv_events`: the events since the last, in order.

    The publication's own sequence number tells a subscriber of a gap; it then asks for a replay.
    """

    events: list[PageStored | PageRemoved | CacheCleared]
