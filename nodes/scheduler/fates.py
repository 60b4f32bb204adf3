"""What became of the pages of the last prompts: which were cached, read from the disk or computed, and why so.

    begin      a sequence arrives: what is asked of the disk, or why nothing is
    answered   the agent has said which pages it has, and why not the others
    unread     what the disk has is not read, or not all of it
    restored   so many pages were read
    enter      it goes into a batch or to another scheduler: from here on its runs of pages are fixed

A few numbers for each prompt until then, and a run or two after it. Read by `meshctl kv why` and `trace`. Pure; written
by `handoff/restore.py` and `queue/admission.py`, where all of it is decided.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.protocol import BEHIND_A_GAP, NEVER_STORED, OTHER_NUMERICS, MissedPages
from nodes.protocol.stores import PageRun, PromptFate

REMEMBERED: Final = 1000
"""As many calls a gateway remembers; half a kilobyte each."""

CACHED: Final = "cached"
RESTORED: Final = "restored"
NO_STORE: Final = "no_store"
NO_WORKER: Final = "no_worker"
SHORT: Final = "short"
LATE: Final = "late"
NO_ANSWER: Final = "no_answer"
LEFT_POOL: Final = "left_pool"
DEARER: Final = "dearer"
TIMED_OUT: Final = "timed_out"
REVOKED: Final = "revoked"
FAILED: Final = "failed"
_OF_CODES: Final = {
    "deadline_exceeded": TIMED_OUT,
    "stale_pages": "evicted",
    "corrupt_pages": "corrupt",
    "unsigned_pages": "unsigned",
    "read_failed": "unreadable",
    "revoked": REVOKED,
}
"""Why pages were not read, by the code with which a transfer from the disk ended."""


class _Span(NamedTuple):
    why: str
    first: int
    end: int


class Fate:
    """Of one sequence. Nothing changes once it has entered; its runs are made when somebody asks for them."""

    __slots__ = (
        "_asked_from", "_asked_to", "_missed", "_num_cached", "_num_found", "_restored", "_unread", "attempt",
        "is_order", "prefill", "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, attempt: int, *, is_order: bool) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.is_order = is_order
        self.prefill = ""
        # Unknown until it enters.
        self._num_cached = -1
        self._asked_from = self._asked_to = 0
        self._num_found = 0
        # Why nothing was asked, or what the agent said of the pages that it does not have.
        self._missed: tuple[MissedPages, ...] = ()
        self._unread = BEHIND_A_GAP
        self._restored = _Span(RESTORED, 0, 0)

    @property
    def has_entered(self) -> bool:
        return self._num_cached >= 0

    def runs(self) -> list[PageRun]:
        """Of a sequence that has entered. Few are ever asked for, and making them takes as long as a step's row."""
        num_cached = self._num_cached
        spans = self._spans(num_cached, max(self._asked_to, num_cached))
        return [PageRun(why=why, first=first, num=last - first) for why, first, last in spans]

    def asks(self, first: int, num_pages: int, unanswered: str) -> None:
        """So many pages from `first` on are not cached; `unanswered` is why none of them is found, if nobody says.

        Nothing changes once it has entered: a sequence that is put back asks again.
        """
        if self.has_entered:
            return
        self._asked_from, self._asked_to = first, first + num_pages
        self._missed = (MissedPages(why=unanswered, num=num_pages),)

    def answered(self, num_found: int, missed: Sequence[MissedPages], *, is_mixed: bool) -> None:
        """`is_mixed`: pages are not stored here, since groups compute in unlike ways."""
        if self.has_entered:
            return
        why = OTHER_NUMERICS if is_mixed else NEVER_STORED
        self._num_found = num_found
        self._missed = tuple(MissedPages(why=why, num=run.num) if run.why == NEVER_STORED else run for run in missed)

    def unanswered(self) -> None:
        if self.has_entered:
            return
        self._missed = tuple(MissedPages(why=NO_ANSWER, num=run.num) for run in self._missed)

    def unread(self, why: str) -> None:
        """What was found is computed, for this reason or with the code of a failed transfer."""
        if self.has_entered:
            return
        self._unread = _OF_CODES.get(why, why if why == DEARER else FAILED)

    def restored(self, first: int, num_pages: int) -> None:
        if not self.has_entered:
            self._restored = _Span(RESTORED, first, first + num_pages)

    def enter(self, num_cached: int, prefill: str) -> None:
        """With so many cached pages; what is left is computed at the scheduler `prefill`, empty for here.

        Only the first time: what a sequence finds that is put back later, it has mostly computed itself.
        """
        if not self.has_entered:
            self.prefill, self._num_cached = prefill, num_cached

    # inside

    def _spans(self, num_cached: int, end: int) -> Iterator[_Span]:
        _, read_from, read_to = self._restored
        found_to = self._asked_from + self._num_found
        spans = [
            _Span(CACHED, 0, min(read_from, num_cached)),
            _Span(RESTORED, read_from, min(read_to, num_cached)),
            _Span(CACHED, max(read_to, 0), num_cached),
            _Span(LEFT_POOL, num_cached, self._asked_from),
            _Span(self._unread, max(num_cached, self._asked_from), found_to),
        ]
        first = found_to
        for run in self._missed:
            spans.append(_Span(run.why, max(num_cached, first), min(end, first + run.num)))
            first += run.num
        yield from _joined(span for span in spans if span.first < span.end)


class Fates:
    """Of the last sequences of one scheduler."""

    def __init__(self, scheduler: str, page_size: int) -> None:
        self._scheduler = scheduler
        self._page_size = page_size
        self._fates: dict[tuple[str, int, bool], Fate] = {}

    def begin(self, request_id: str, attempt: int, *, is_order: bool) -> Fate:
        key = request_id, attempt, is_order
        # To the end: an attempt that is submitted again is among the last ones.
        self._fates.pop(key, None)
        fate = self._fates[key] = Fate(request_id, attempt, is_order=is_order)
        if len(self._fates) > REMEMBERED:
            del self._fates[next(iter(self._fates))]
        return fate

    def find(self, request_ids: Iterable[str]) -> list[PromptFate]:
        """Those of these requests that have entered, in the order in which they came."""
        wanted = frozenset(request_ids)
        return [
            PromptFate(
                request_id=fate.request_id,
                attempt=fate.attempt,
                scheduler=self._scheduler,
                is_order=fate.is_order,
                prefill=fate.prefill,
                page_size=self._page_size,
                runs=fate.runs(),
            )
            for fate in self._fates.values()
            if fate.request_id in wanted and fate.has_entered
        ]


def _joined(spans: Iterable[_Span]) -> Iterator[_Span]:
    """Runs of one reason that follow each other as one."""
    last: _Span | None = None
    for span in spans:
        if last is not None and last.why == span.why and last.end == span.first:
            last = last._replace(end=span.end)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
