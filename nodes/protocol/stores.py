"""Stores of KV pages on disk, as an operator looks at them and empties them.

    meshctl -> supervisor -> kv_agent     ListStores, FlushStores -> StoreList, StoresFlushed

    meshctl -> supervisor -> scheduler    FindFates -> FatesFound

What is in a store, schedulers ask and tell by the messages of `kvstore/protocol.py`.
"""

from typing import Annotated, Final

from msgspec import Meta

from mesh.wire.message import Message, Part
from nodes.protocol.records import MAX_CALLS

LOADING: Final = "store_loading"
"""Code of a refusal, retryable: which pages are in a store is still being read."""


class ListStores(Message, frozen=True):
    """Ask a kv_agent for the stores in its directory; a supervisor, for those of all hosts. Answer: `StoreList`."""


class FlushStores(Message, frozen=True):
    """Ask a kv_agent, or a supervisor for all hosts, to forget all pages of its open stores, or of those in `folders`.

    What is being read from them ends as stale, what waits to be written is dropped; pools keep their pages. Answered
    when no restart finds the pages again. Their bytes stay on the disk until they are written over. A folder that is
    not open here is passed over; a supervisor refuses one that is open nowhere (`unknown_store`).

    Errors: `store_loading`, and `store_not_flushed` if the disk did not take it, or for an installed store.
    """

    folders: list[str] = []


class StoreFacts(Part, frozen=True):
    """One store. `numerics` and `layout` (a digest, in hexadecimal) say whose pages it has; empty if nobody can tell.

    One that is not open belongs to another model, mesh or way of computing; of it `num_pages` and `num_slots` are not
    known (0). `num_bytes` is what it takes on the disk. `used_s` ago its pages were found or written last, -1 if that
    is not known. `why_buffered`: pages go through the kernel's cache, because of that; `why_read_only`: nothing more is
    written; `last_failure` of the disk. `why_off`: nothing is stored or found, because of that: an installed store is
    given up, the files of one on disk are gone. An installed store's `num_pages` are those that the agent knows to be
    there. `counts` are pages since its agent started, by what became of them.
    """

    folder: str
    is_open: bool = False
    is_loaded: bool = False
    groups: list[str] = []
    layout: str = ""
    numerics: str = ""
    page_bytes: int = 0
    tp_size: int = 1
    num_pages: int = 0
    num_slots: int = 0
    num_bytes: int = 0
    used_s: float = -1.0
    num_queued: int = 0
    why_buffered: str = ""
    why_read_only: str = ""
    last_failure: str = ""
    counts: dict[str, int] = {}
    why_off: str = ""


class AgentStores(Part, frozen=True):
    """What one kv_agent keeps in `directory`, `size_bytes` at most; in an installed store: in that of this name, 0.

    `dropped` are pages that it was told of and that it did not store, by reason.
    """

    agent: str
    directory: str
    size_bytes: int
    stores: list[StoreFacts] = []
    dropped: dict[str, int] = {}


class StoreReader(Part, frozen=True):
    """What a scheduler has read from its host's store, by figures of its `/metrics`.

    Rates are those of late, 0 while not known: pages read and tokens computed in a second. Pages were `num_queried` for
    what was not cached; `num_dearer` counts prompts whose pages were computed because that was quicker.
    """

    scheduler: str
    pages_per_s: float = 0.0
    tokens_per_s: float = 0.0
    num_queried: int = 0
    num_found: int = 0
    num_restored: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_dearer: int = 0


class StoreList(Message, frozen=True):
    """Answer to `ListStores`. `readers` are told by supervisors; `silent` are who did not answer them."""

    agents: list[AgentStores]
    readers: list[StoreReader] = []
    silent: list[str] = []


class FindFates(Message, frozen=True):
    """Ask a scheduler, or a supervisor for all of them, what became of the pages of these requests' prompts."""

    request_ids: Annotated[list[str], Meta(max_length=MAX_CALLS)]


class PageRun(Part, frozen=True):
    """So many pages of a prompt from page `first` on, of which one thing is to be said.

    `why` is `cached`, `restored` (read from the disk) or why they were computed: nothing was asked of the disk
    (`no_store`; `no_worker`: it was not known how pages are computed; `short`: computing takes less than asking), the
    agent said that it does not have them (reasons of `MissedPages`), its answer came too `late`, or never
    (`no_answer`), they were cached when the request arrived and are not any more (`left_pool`); or the disk had them
    and they were not read: computing was quicker (`dearer`), the disk `timed_out`, their memory was needed (`revoked`),
    or reading `failed` in another way.
    """

    why: str
    first: int
    num: int


class PromptFate(Part, frozen=True):
    """What became of a prompt's full pages when it first entered a batch, or was given to the scheduler `prefill`.

    `is_order`: a prefill that another scheduler ordered here. What was computed by `prefill` has a fate there, too.
    """

    request_id: str
    attempt: int
    scheduler: str
    is_order: bool = False
    prefill: str = ""
    page_size: int = 0
    runs: list[PageRun] = []


class FatesFound(Message, frozen=True):
    """Answer to `FindFates`: those of the last 1,000 prompts of each scheduler. `silent` did not answer."""

    fates: list[PromptFate]
    silent: list[str] = []


class FlushedStore(Part, frozen=True):
    """A store of an agent that has forgotten so many pages."""

    agent: str
    folder: str
    num_pages: int


class StoresFlushed(Message, frozen=True):
    """Answer to `FlushStores`. `note` says which hosts could not be asked; empty if all were."""

    flushed: list[FlushedStore]
    note: str = ""
