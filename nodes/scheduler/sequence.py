"""One request as the scheduler sees it: its tokens, how far they are computed, the pages it holds, when it ends.

    token_ids     [ prompt | outputs of earlier attempts | outputs of this one ]
    num_computed  ----------------------------->|             KV written, acknowledged by the worker
    num_scheduled ---------------------------------->|        KV written once all steps sent are done
    length        ---------------------------------------->|  tokens known, and one more if a step sent draws it

    WAITING -> PREFILL -> DECODE -> ENDED       prefilled here
    WAITING -> HANDOFF -> DECODE                prefilled elsewhere; back to WAITING if that fails
    WAITING -> RESTORE -> WAITING               a part of it is read from the disk
    PREFILL, DECODE -> PREEMPTED -> WAITING     its pages or its place were needed; tokens stay, KV is computed again
    PREFILL -> RETAINED -> ENDED                prefilled for another scheduler: pages are kept until they are pulled

`num_inflight` counts the steps sent and unacknowledged that have a row of the sequence: until it is 0 its pages may
still be written and are not given back, whatever became of the sequence. Written by the files of this folder only.
"""

import enum
from array import array
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvstore.cache.block_table import BlockTable
from mesh.address import Address
from nodes.prompt_payloads import PromptPayloads
from nodes.protocol import PrefillOrder, Submit, Suspected
from nodes.protocol.steps import LAST_SEQUENCE, Open
from nodes.request import RequestSpec, Stages

if TYPE_CHECKING:
    from nodes.scheduler.fates import Fate


class Stage(enum.IntEnum):
    """Where a sequence stands."""

    WAITING = 0
    HANDOFF = 1
    RESTORE = 2
    PREFILL = 3
    DECODE = 4
    PREEMPTED = 5
    RETAINED = 6
    ENDED = 7


class Offer(NamedTuple):
    """Pages of a prompt that the agent's store `source` has, from page `first` on: their slots, and their sequences."""

    source: str
    incarnation: int
    first: int
    slots: list[int]
    sequences: list[int]
    is_trial: bool = False
    """Read to learn whether a disk that was slower than computing still is."""


NEVER = float("-inf")


class Share:
    """What a client has been served here, in weighted tokens. Written by `queue/shares.py` and `queue/turnover.py`."""

    __slots__ = ("is_owed", "name", "num_held", "ran_at", "served", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1
        self.served = 0.0
        self.num_held = 0
        # A sequence of another client has gone to make room for its next one.
        self.is_owed = False
        # When something of it was last seen to run, while others waited.
        self.ran_at = NEVER


class Sequence:
    """State of one attempt, or of one prefill that another scheduler ordered (`order_id` is then its grant id)."""

    __slots__ = (
        "arrived_at",
        "attempt",
        "capacity",
        "cleared_at",
        "commit_at",
        "detokenizer",
        "entered_at",
        "extras",
        "fate",
        "finish_reason",
        "gateway",
        "grant_s",
        "is_looked_up",
        "is_open",
        "is_private",
        "is_vector",
        "keeps_until",
        "kv",
        "length",
        "looks_until",
        "max_length",
        "num_cached_tokens",
        "num_computed",
        "num_deaths",
        "num_inflight",
        "num_looks",
        "num_paid",
        "num_placed",
        "num_preemptions",
        "num_prior_outputs",
        "num_prompt_tokens",
        "num_restored",
        "num_scheduled",
        "num_sent",
        "number",
        "offer",
        "order_id",
        "order_queue_s",
        "page_ids",
        "pooled",
        "prefill",
        "prefill_s",
        "put_back_at",
        "reading",
        "request_id",
        "row_id",
        "share",
        "slot",
        "spec",
        "stage",
        "stages",
        "stop_ids",
        "table",
        "token_ids",
        "transfer_s",
        "vector",
    )

    def __init__(
        self, row_id: int, token_ids: Iterable[int], num_prompt_tokens: int, spec: RequestSpec, arrived_at: float
    ) -> None:
        self.row_id = row_id
        # Its number in the worker's table, of 32 bits; sequences that are alive at one time have different ones.
        self.number = row_id & LAST_SEQUENCE
        self.token_ids = array("i", token_ids)
        self.length = len(self.token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_prior_outputs = self.length - num_prompt_tokens
        self.spec = spec
        self.arrived_at = arrived_at
        self.request_id, self.attempt, self.gateway = "", 0, Address("", 0)
        self.prefill = self.order_id = ""
        self.stop_ids: frozenset[int] = frozenset()
        self.max_length = self.length + 1
        # It ends with a vector of its prompt and draws nothing.
        # Its pages are neither taken from the cache nor put there, if it is private.
        self.is_vector, self.is_private = spec.is_vector, False
        self.stage, self.finish_reason = Stage.WAITING, ""
        self.num_computed = self.num_scheduled = self.num_inflight = self.num_preemptions = 0
        # Workers that died with a step of it, since the last acknowledged one; of workers elsewhere, until it has so
        # many output tokens: it begins again here, and a first chunk is not what killed them.
        self.num_deaths = self.cleared_at = 0
        # Its client's, while it is held, and how many of its outputs are counted there.
        self.share: Share | None = None
        self.num_paid = 0
        # When it last made room for another client, and how many tokens it has to have before it does so again.
        self.put_back_at, self.keeps_until = NEVER, 0
        # -1 until known: what the first start of the attempt found in a cache, here or at the prefill scheduler. And
        # whether a cache has counted a look for the request, in this attempt or before it.
        self.num_cached_tokens, self.is_looked_up = -1, False
        # What the disk has of it; until when the answer to that is waited for; how often it was asked for; tokens that
        # came from there.
        self.offer: Offer | None = None
        self.looks_until, self.num_looks, self.num_restored = 0.0, 0, 0
        # What became of its prompt's pages, for those who ask later.
        self.fate: Fate | None = None
        # At the worker: its slot, the table it was last opened in (0: none), and how many pages it was given there.
        self.slot, self.table, self.num_placed = -1, 0, 0

        self.kv: BlockTable | None = None
        self.page_ids = array("i")
        # `commit_at`: the number of computed tokens at which the next page is full.
        self.capacity = self.commit_at = 0

        # When it left the queue for the first time; -1 before that. The next four are set by a prefill elsewhere.
        self.entered_at = -1.0
        self.grant_s = self.order_queue_s = self.prefill_s = self.transfer_s = 0.0
        self.stages: Stages | None = None
        # What accompanies output tokens, by output position.
        self.extras: dict[int, bytes] = {}
        # The vector, once it is made, and what the worker has pooled of the computed tokens until then.
        self.vector = self.pooled = b""
        # What is read of the prompt, if anything.
        self.reading: PromptPayloads | None = None

        self.detokenizer, self.is_open = "", False
        # Output tokens sent to the detokenizer, earlier attempts' included.
        self.num_sent = self.num_prior_outputs

    @classmethod
    def from_submit(
        cls,
        row_id: int,
        submit: Submit,
        gateway: Address,
        eos_token_ids: Collection[int],
        context_length: int,
        now: float,
    ) -> "Sequence":
        num_prompt = len(submit.prompt_ids)
        self = cls(row_id, [*submit.prompt_ids, *submit.output_ids], num_prompt, submit.spec, now)
        self.request_id, self.attempt, self.gateway = submit.request_id, submit.attempt, gateway
        self.is_looked_up = submit.attempt > 0
        self.prefill, stop = submit.prefill, submit.spec.stop
        eos = () if stop.ignore_eos else eos_token_ids
        self.stop_ids = frozenset([*eos, *stop.stop_token_ids])
        # Counted from the prompt, so that outputs of earlier attempts do not raise the limit.
        self.max_length = min(num_prompt + stop.max_tokens, context_length)
        self.detokenizer = submit.detokenizer
        self.num_deaths, self.cleared_at = max(0, submit.deaths), submit.cleared_at
        if self.is_vector:
            # Its vector goes to the gateway from here, as it is.
            self.max_length, self.prefill, self.detokenizer = num_prompt, "", ""
        if submit.spec.sampling.reads_prompt:
            # Where it is prefilled it also decodes: only the scheduler that has its attempt tells the gateway.
            self.reading, self.prefill = PromptPayloads(submit.prompt_position, num_prompt), ""
        return self

    @classmethod
    def from_order(cls, row_id: int, order: PrefillOrder, now: float) -> "Sequence":
        """A prefill that another scheduler orders: one token is drawn, for that scheduler."""
        self = cls(row_id, order.token_ids, order.num_prompt_tokens, order.spec, now)
        self.request_id, self.attempt = order.request_id, order.attempt
        self.is_looked_up = order.attempt > 0
        self.order_id = order.grant_id
        self.num_deaths, self.cleared_at = max(0, order.deaths), order.cleared_at
        return self

    def measure(self, now: float) -> Stages:
        """Where the time went until now, when the first token is drawn."""
        entered_at = now if self.entered_at < 0 else self.entered_at
        prefill_s = self.prefill_s or max(0.0, now - entered_at - self.grant_s)
        queue_s = entered_at - self.arrived_at + self.order_queue_s
        self.stages = Stages(queue_s, self.grant_s, prefill_s, self.transfer_s, self.num_restored)
        return self.stages

    @property
    def has_made_room(self) -> bool:
        """Whether it ever went back to the queue so that another client had its turn."""
        return self.put_back_at > NEVER

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reusable_ids(self) -> "array[int]":
        """Tokens whose KV may be taken from the cache, and one more, which is computed in any case."""
        reading = self.reading
        if self.is_private or (self.is_vector and self.spec.kind != "last"):
            # States are pooled from the first position on, and a cache holds none.
            return self.token_ids[:1]
        # What is read of a token comes from the position before it.
        return self.token_ids if reading is None or reading.is_whole else self.token_ids[: reading.next]

    def num_read_by(self, start: int, count: int) -> int:
        """How many positions of its prompt a row reads."""
        return 0 if self.reading is None else max(0, min(start + count, self.num_prompt_tokens - 1) - start)

    @property
    def num_unscheduled(self) -> int:
        """Tokens whose KV is not computed by any step sent so far."""
        return self.length - self.num_scheduled

    @property
    def is_prompt_left(self) -> bool:
        """Whether it takes part in steps as a prompt. The last token known is decoding's, unless nothing is decoded."""
        return self.length - self.num_scheduled > (0 if self.is_vector else 1)

    @property
    def num_kv_tokens(self) -> int:
        """Most tokens whose KV the sequence can ever need: the last token's is never computed."""
        return self.max_length - 1

    def opening(self) -> Open:
        # Only the few samplings that look back or read the prompt need them; otherwise a long prompt would be sent to
        # the worker twice.
        sampling = self.spec.sampling
        token_ids = list(self.token_ids) if sampling.looks_back or sampling.reads_prompt else []
        return Open(
            self.slot,
            self.number,
            self.num_prompt_tokens,
            sampling,
            self.request_id,
            token_ids,
            self.spec.kind,
            self.pooled,
            # Up to what is acknowledged: rows that were in flight are sent again behind it.
            self.num_computed if self.pooled else 0,
            self.spec.second_from,
        )

    def survived(self, num_drawn: int) -> None:
        """A step with it, which drew `num_drawn` tokens for it, succeeded: it was not this one that killed workers."""
        if self.num_output_tokens + num_drawn >= self.cleared_at:
            self.num_deaths = 0

    def suspected(self) -> Suspected:
        """As one whose unanswered steps a worker has just died with."""
        would_have = max(self.length, self.num_tokens + 1) - self.num_prompt_tokens
        return Suspected(self.request_id, self.attempt, self.num_deaths + 1, max(self.cleared_at, would_have))

    def take_token(self, token_id: int, extra: bytes) -> None:
        if extra:
            self.extras[self.num_output_tokens] = extra
        self.token_ids.append(token_id)

    def hold(self, kv: BlockTable) -> None:
        """Take pages; the KV they already hold counts as computed."""
        self.kv = kv
        self.num_computed = self.num_scheduled = kv.num_tokens
        self.page_ids = array("i", kv.pages)
        self.table = 0

    def receive(self, first_page: int, page_size: int) -> None:
        """Take back the lent pages, from index `first_page` on: they now hold the KV of all tokens."""
        assert self.kv is not None, "lent pages still belong to the sequence"
        self.kv.commit(self.token_ids[first_page * page_size :])
        self.num_computed = self.num_scheduled = len(self.token_ids)
        self.page_ids = array("i", self.kv.pages)
        self.table = 0
        self.capacity = len(self.page_ids) * page_size
        self.commit_at = (self.kv.num_tokens // page_size + 1) * page_size

    def reserve(self, num_tokens: int, page_size: int) -> bool:
        """Get pages for `num_tokens` tokens; False if the pool cannot give them now."""
        assert self.kv is not None, "a sequence in steps holds pages"
        if not self.kv.reserve(num_tokens):
            return False
        self.page_ids.extend(self.kv.pages[len(self.page_ids) :])
        self.capacity = len(self.page_ids) * page_size
        self.commit_at = (self.kv.num_tokens // page_size + 1) * page_size
        return True

    def drop_pages(self) -> None:
        """Give the pages back; full ones stay in the cache. Nothing of it counts as computed from now on."""
        assert self.num_inflight == 0, "a step that may still write the pages is unacknowledged"
        if self.kv is not None:
            self.kv.release()
        self.kv = None
        self.page_ids = array("i")
        self.pooled = b""
        self.capacity = self.num_computed = self.num_scheduled = self.table = 0
        # Of steps that were taken back, what they would have drawn is not known either.
        self.length = len(self.token_ids)

    def commit_full_pages(self, page_size: int) -> None:
        """Enter acknowledged full pages into page table and cache if they are not there yet; due at `commit_at`.

        Whole pages only: after a crash at most a page is computed again, and a step costs no write for most rows.
        """
        if self.is_private:
            return
        kv = self.kv
        assert kv is not None, "acknowledged KV is in pages that are held"
        end = min(self.num_computed, len(self.token_ids)) // page_size * page_size
        if end > kv.num_tokens:
            kv.advance(self.token_ids[kv.num_tokens : end])
        self.commit_at = (kv.num_tokens // page_size + 1) * page_size

    def finish_reason_now(self) -> str:
        """Why the sequence ends with the last token it has, or an empty string."""
        if self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_length else ""


def num_shared_tokens(left: Sequence, right: Sequence, page_size: int) -> int:
    """Length in tokens, of whole pages, of the prefix that two sequences share."""
    if left.spec.extra_key != right.spec.extra_key:
        return 0
    low, high = 0, min(left.num_tokens, right.num_tokens) // page_size
    while low < high:
        # Binary search, which compares slices in C; a loop over the tokens of two long prompts, for each waiting one at
        # each admission, would run in Python.
        middle = (low + high + 1) // 2
        end = middle * page_size
        if left.token_ids[low * page_size : end] == right.token_ids[low * page_size : end]:
            low = middle
        else:
            high = middle - 1
    return low * page_size
