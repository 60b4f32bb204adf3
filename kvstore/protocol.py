"""Messages about KV memory: pools, grants, page transfers and cache events.

Used by `nodes/kv_agent` (which owns pools and is the only writer of transferred pages), by schedulers, and by
everything that follows cache events. Page numbers are indices into one pool incarnation; a page is identified across
time by (pool incarnation, page, generation).
"""

from typing import Annotated, Final

from msgspec import Meta

from kvstore.hashing import HASH_BYTES, TOKEN_BYTES
from kvstore.layout import KVLayout
from mesh.wire.message import Message, Part


class MapPool(Message, frozen=True):
    """Ask a kv_agent for the pool of a worker group. Answer: `PoolHandle`.

    Grants held by the asker's earlier incarnations are revoked; the answer waits until nothing can still write their
    pages. Each tensor-parallel rank has its own pool; the page table in use is that of rank 0's pool.
    """

    group: str
    rank: int = 0


class PoolHandle(Message, frozen=True):
    """Where a pool is: one file of header, page table and pages (see `kvstore/pool/page_pool.py` for the offsets).

    `device` is `cpu`, or `cuda:N` if the pages are on that device and not in the file (`kvstore/pool/cuda/pool.py`).
    """

    group: str
    agent: str
    path: str
    num_pages: int
    layout: KVLayout
    incarnation: int
    device: str = "cpu"


class StoredPages(Part, frozen=True):
    """Pages of a store of the agent, as `StoredFound` named them: slot by slot, with the sequences that they had then.

    `source` is the store's name as a source of transfers, `incarnation` that of the agent which told of it.
    """

    source: str
    incarnation: int
    slots: list[int]
    sequences: list[int]


class OpenGrant(Part, frozen=True):
    """A decode scheduler lends pages of its own pool to one transfer.

    `generations[i]` is the current generation of `pages[i]` in the page table; the agent checks it before and after
    each copy. A grant is single-use: a retry takes new pages and a new grant. `request_id` is whose pages they are, for
    those who look into the agent. With `stored`, as many pages as the grant has, the agent reads those into it at once,
    and nothing is announced by others.
    """

    grant_id: str
    group: str
    pages: list[int]
    generations: list[int]
    layout_digest: bytes
    holder: str
    holder_epoch: int
    timeout_s: float
    request_id: str = ""
    stored: StoredPages | None = None


class OpenGrants(Message, frozen=True):
    """A decode scheduler asks its own agent to open grants, each independent of the others. Answer: `GrantsOpened`.

    One message carries the grants from one turn of the asker's loop, or a part of them. Idempotent: asking again for
    an open grant with the same pages restarts its lease.
    """

    grants: list[OpenGrant]


class GrantRefused(Part, frozen=True):
    """Why one grant was not opened; `code`: `page_granted`, `too_many_grants`, `draining`, `grant_used` and others."""

    grant_id: str
    code: str


class GrantsOpened(Message, frozen=True):
    """From now on the agent accepts `PagesReady` for `opened`. A grant in neither list has to be asked for again."""

    opened: list[str]
    refused: list[GrantRefused] = []


class PagesReady(Part, frozen=True):
    """A prefill scheduler announces finished pages to the destination's agent, which pulls them into the grant.

    `first` is the index of `pages[0]` in the grant. `total` is the number of pages in the whole transfer, known from
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
    """Tell an agent which pages one turn of the sender's loop finished, with at most one entry for each grant."""

    announced: list[PagesReady]


class PagesPulled(Part, frozen=True):
    """The agent tells both schedulers how far a transfer is; `complete` is set exactly when all pages are in.

    Completion is told to the grant's holder only, and to both in answer to a repeated `PagesReady`. The first
    `num_pages` pages of the grant are in; they are not written again, however the transfer ends.
    """

    grant_id: str
    num_pages: int
    complete: bool = False


class TransferFailed(Part, frozen=True):
    """The transfer ended without all its pages; told to both sides.

    A copy may still be writing; only `GrantClosed` says that none is.
    """

    grant_id: str
    code: str
    message: str


class TransferNews(Message, frozen=True):
    """Tell a scheduler what one turn of the agent's loop did for its transfers; `pulled` came before `failed`."""

    pulled: list[PagesPulled] = []
    failed: list[TransferFailed] = []


class CloseGrant(Message, frozen=True):
    """A grant's holder asks to revoke it. Answer: `GrantClosed`, once nothing can still write its pages."""

    grant_id: str


class GrantClosed(Message, frozen=True):
    """The grant is gone and its pages are the holder's alone. Sent for unknown grants too: closing is idempotent."""

    grant_id: str


class OfferPair(Message, frozen=True):
    """Ask a source's agent to make a pair of two ranks, in which the asker is rank 0. Answer: `PairAccepted`.

    `pair` is the asker's name for the pair. `unique_id` is what NCCL gave rank 0 or, if `transport` is `tcp`, where
    rank 0 listens (`kvstore/transfer/paired/tcp/wire.py`). `timeout_s` is how long making the pair may take. An agent
    whose transport is `nccl` or `tcp` sends this before its first pull from the memory that holds the pages of rank
    `rank` of `group`.
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
    """The other end is now making its half of the pair. Both ends see any failure from here on."""

    pair: str


class SendPages(Message, frozen=True):
    """Ask the other end of a pair to send bytes of a pool; the asker has begun to receive them. Answer: `PagesSent`.

    `offsets[i]` counts bytes from page 0 and `sizes[i]` bytes to send from there; each is one send, in this order.
    `generations[j]` is what was announced for `pages[j]`; the sender compares before it sends and again when it has
    sent. The orders of one pair are carried out in the order in which they arrive. `rank` is the tensor-parallel rank
    whose pool is meant; generations are those of rank 0, whose page table describes the pages of all ranks.
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
    """How a `SendPages` ended; empty `code`: all was sent, and the generations were right before and afterwards.

    `is_sent` False: nothing was sent, or not all, and the pair cannot be used any more.
    """

    pair: str
    number: int
    is_sent: bool
    code: str = ""
    message: str = ""


class ClosePair(Message, frozen=True):
    """Tell the other end that a pair is given up; it then aborts its half."""

    pair: str


class OpenStore(Message, frozen=True):
    """Ask a kv_agent to open its store on disk for the pages of a group. Answer: `StoreOpened`.

    `numerics` is the fingerprint of the group's worker: pages that were computed in another way are in another store.
    Asked before a scheduler is ready, so that what is wrong with the disk is an error of the start.

    Errors: `no_store` (the agent is set to keep nothing), `unknown_group`, and the codes of `StoreError`.
    """

    group: str
    numerics: str


class StoreOpened(Message, frozen=True):
    """The store is open, with room for `num_pages`; it was open already if another group has pages like these."""

    group: str
    num_pages: int


NEVER_STORED: Final = "never_stored"
OTHER_NUMERICS: Final = "other_numerics"
BEHIND_A_GAP: Final = "behind_a_gap"
LOADING: Final = "loading"
NOT_OPEN: Final = "not_open"
"""Reasons of `MissedPages` that are not of a single page; the others are in `kvstore/store/missing.py`."""


class StoredPrompt(Part, frozen=True):
    """A prompt whose pages are looked for: `hashes` of 16 bytes each, one after the other, in order."""

    name: str
    hashes: bytes


class FindStored(Message, frozen=True):
    """Ask a kv_agent which pages its store on disk has, for each prompt from the first page on. Answer: `StoredFound`.

    `numerics` are those of the group's worker now: what was computed in another way is not found.
    """

    group: str
    numerics: str
    prompts: list[StoredPrompt]


class ListStoredPages(Message, frozen=True):
    """Ask a kv_agent which pages its store on disk has, for tokenizers that have not seen them. Answer:
    `StoredPagesListed`.

    `first_slot` 0 and `used_after` -1 begin; the answer says what to go on with. `numerics` as in `FindStored`.
    Errors: `no_store`, `unknown_group`, `store_not_open` and `store_loading` (try again).
    """

    group: str
    numerics: str
    first_slot: int = 0
    used_after: int = -1


class StoredPagesListed(Message, frozen=True):
    """Pages on disk, each once in all answers: `hashes` of 16 bytes, one after the other, in no order.

    `next_slot` and `used_after` are for the next ask; a `next_slot` of 0: that was all. What is stored meanwhile may be
    missing, what goes is told in vain.
    """

    hashes: bytes
    next_slot: int = 0
    used_after: int = 0


class StoreChanged(Message, frozen=True):
    """Tell a scheduler that the store of its group has lost its pages, or was opened anew, with what lies there.

    What was told of pages on disk counts no more: it lists them again. Soft, as that list is: told once.
    """

    group: str


class MissedPages(Part, frozen=True):
    """So many pages one after the other that a store does not have, and why, as far as the agent knows it.

    `why`: `never_stored` (or it is forgotten), `evicted`, `corrupt`, `unsigned` (by the key of the mesh), `unreadable`,
    `queue_full`, `changed` (used again before it was written), `write_failed`, `read_only`, `flushed`, `lost` (with
    the store's files), `not_open`, `loading` (which pages there are is being read), `other_numerics` (stored by a group
    that computes otherwise), `behind_a_gap` (stored, but not the pages before it).
    """

    why: str
    num: int


class StoredPrefix(Part, frozen=True):
    """The first `len(slots)` pages of a prompt are stored: where, and which sequence each slot has; `missed` follow."""

    name: str
    slots: list[int]
    sequences: list[int]
    missed: list[MissedPages] = []


class StoredFound(Message, frozen=True):
    """What is stored of each prompt, as `OpenGrant.stored` names it. They may be gone when they are read.

    Empty `source`: the store is not open, and nothing was found.
    """

    found: list[StoredPrefix]
    source: str = ""
    incarnation: int = 0


class StorePages(Message, frozen=True):
    """Tell a kv_agent which pages of its own pool to keep on disk; each list has one entry for each page.

    `generations[i]` is the current generation of `pages[i]` in the pool's `incarnation`; a page that has another one
    when it is written, or afterwards, is not stored. `hashes` are the pages' own, `parents` those of the pages before
    them, parents first. Told once: what is lost, or does not fit the agent's queue, is not stored.
    """

    group: str
    incarnation: int
    numerics: str
    pages: list[int]
    generations: list[int]
    hashes: list[bytes]
    parents: list[bytes]


PageHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class PagesStored(Message, frozen=True):
    """Full pages entered the prefix cache of `group`, each the parent of the next; `parent_hash` is that of the first.

    Hashes have 16 bytes, `tokens` are the ids of all of them as little-endian u32, as many for each page. Refused
    unless there is a page and its tokens. `extra_key` is left out when a cache is stated anew.
    """

    group: str
    page_hashes: list[PageHash]
    parent_hash: PageHash
    tokens: bytes
    extra_key: str = ""

    def __post_init__(self) -> None:
        # In a body, a ValueError here refuses it (`bad_body`).
        if not (self.page_hashes and self.tokens) or len(self.tokens) % (TOKEN_BYTES * len(self.page_hashes)):
            raise ValueError(f"{len(self.tokens)} bytes of tokens do not fill {len(self.page_hashes)} pages")


class PageRemoved(Message, frozen=True):
    """Pages left the prefix cache of `group`. `on_disk`: the host's disk was told to keep them, and may have them."""

    group: str
    page_hashes: list[PageHash]
    on_disk: bool = False


class CacheCleared(Message, frozen=True):
    """What the prefix cache of `group` holds is stated anew from here; what was published before no longer counts.

    `on_disk`: it does where a disk may have it, as in `PageRemoved`.
    """

    group: str
    on_disk: bool = False


class PagesOnDisk(Message, frozen=True):
    """Pages that the disk of `group`'s host has, cached or not: `hashes` of 16 bytes each, one after the other.

    Told once a scheduler has begun, or states its cache anew: of these no `PageRemoved` has told.
    """

    group: str
    hashes: bytes


CacheEvent = PagesStored | PageRemoved | CacheCleared | PagesOnDisk


class CacheEvents(Message, frozen=True):
    """One publication on topic `kv_events`: the events since the previous one, in order.

    A gap in the publications' own sequence numbers tells a subscriber that it missed some; it then asks for a replay.
    """

    events: list[CacheEvent]
