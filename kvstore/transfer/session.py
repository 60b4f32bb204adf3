"""One transfer into granted pages, as the destination's agent sees it: a state machine that always ends.

    BOOTSTRAPPING   the grant is open; nothing announced yet, or the source pool is not mapped yet
    WAITING         everything announced so far is in
    TRANSFERRING    a copy runs
    SUCCESS         all pages are in, which closes the grant
    FAILED          it ended without them

    BOOTSTRAPPING --Announced, then SourceMapped--> TRANSFERRING --CopyEnded--> WAITING --Announced--> TRANSFERRING
    TRANSFERRING --CopyEnded, the last page--> SUCCESS
    any but SUCCESS --deadline, refusal, Revoked, SenderLost--> FAILED

Every state has a deadline. A failure is told to both sides, and to the holder again and again until it closes the
grant, since a tell may be lost. A success is told to the holder; the sender learns of it when the holder cancels its
order. Success closes the grant by itself and leaves a tombstone: the sender repeats its announcements until the holder
cancels the order, and each repeat is answered to both. A success of pages that are stored here has no sender who would,
so it is repeated like a failure. While a cancelled copy may still write, `CloseGrant` is not
answered; it is once that copy has ended. `puller` compares pages and generations before and after each copy.

Pure: events and the time in, commands out. Owned by `nodes/kv_agent/core.py`.
"""

import enum
from typing import Final, NamedTuple, assert_never

import msgspec

from kvstore.protocol import OpenGrant, PagesPulled, PagesReady, TransferFailed


class Phase(enum.Enum):
    """State of a transfer."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines in seconds, each capped by the grant's own, and the largest single copy."""

    map_s: float = 5.0
    """Of one transfer: to map its source."""
    waiting_s: float = 60.0
    """For pages to come."""
    copy_s: float = 30.0
    """Of one copy."""
    resend_s: float = 0.5
    """Until its end is told again."""
    linger_s: float = 30.0
    """For how long it is told."""
    max_pages_per_copy: int = 1024
    """Pages of one copy."""


DEFAULT_LIMITS: Final = SessionLimits()

# events


class Announced(NamedTuple):
    """A prefill scheduler says that pages are finished."""

    sender: str
    sender_epoch: int
    ready: PagesReady


class SourceMapped(NamedTuple):
    """The source pool can be read; this is what its header says."""

    incarnation: int
    layout_digest: bytes


class SourceRefused(NamedTuple):
    """The source pool cannot be read."""

    code: str
    message: str


class CopyEnded(NamedTuple):
    """The copy writes no more; empty `code`: all its pages are in, and were the right ones before and after.

    Otherwise the first `num_good` are.
    """

    copy_id: int
    code: str = ""
    message: str = ""
    num_good: int = 0


class Revoked(NamedTuple):
    """The grant is revoked: by its holder (which needs no news then), or because the holder or the pool is gone."""

    code: str
    message: str


class SenderLost(NamedTuple):
    """The sender is gone. Pages it has announced may still be pulled; the others will never come."""

    message: str


class Tick(NamedTuple):
    """Time passed."""


Event = Announced | SourceMapped | SourceRefused | CopyEnded | Revoked | SenderLost | Tick


# commands


class MapSource(NamedTuple):
    """Make the pool of `group` at `agent` readable; answer `SourceMapped` or `SourceRefused`."""

    agent: str
    group: str
    incarnation: int


class StartCopy(NamedTuple):
    """Pull `source_pages[i]` into `pages[i]`, if both still have their generations; always answer `CopyEnded`."""

    copy_id: int
    source_pages: list[int]
    source_generations: list[int]
    pages: list[int]
    generations: list[int]
    deadline: float


class CancelCopy(NamedTuple):
    """End a copy early; its `CopyEnded` still comes."""

    copy_id: int


class Send(NamedTuple):
    """Tell an actor."""

    receiver: str
    message: PagesPulled | TransferFailed


Command = MapSource | StartCopy | CancelCopy | Send


class TransferSession:
    """The life of one grant. `handle` takes an event; `deadline` says when it next wants a `Tick`."""

    def __init__(self, grant: OpenGrant, now: float, limits: SessionLimits = DEFAULT_LIMITS) -> None:
        self.grant = grant
        self.phase = Phase.BOOTSTRAPPING
        self.limits = limits
        self.failure = TransferFailed(grant_id=grant.grant_id, code="", message="")
        self.is_closed = False
        self.sender = ""
        self.sender_epoch = 0
        self.source: MapSource | None = None
        self._is_mapped = False
        self._expires = now + grant.timeout_s
        self.deadline = self._expires
        self._copy_id = 0
        self._copying: list[int] = []
        # Index in the grant -> (source page, its generation), announced and not copied yet.
        self._announced: dict[int, tuple[int, int]] = {}
        self._copied: set[int] = set()
        self._num_first = 0

    @property
    def num_pages(self) -> int:
        """Pages that are in."""
        return len(self._copied)

    @property
    def num_copying(self) -> int:
        """Pages that a copy may be writing."""
        return len(self._copying)

    @property
    def has_ended(self) -> bool:
        # Not by a set: the hash of an enum's member is a call, and this is asked ten times in a transfer's life.
        return self.phase is Phase.SUCCESS or self.phase is Phase.FAILED

    @property
    def is_quiesced(self) -> bool:
        """Whether nothing can write the granted pages, now or later."""
        return self.has_ended and not self._copying

    def is_over(self, now: float) -> bool:
        return self.is_quiesced and now >= self._expires

    def renew(self, timeout_s: float, now: float) -> None:
        # A session that has ended is kept for the time set by `_settle`, and a grant's pages are not used twice.
        if not self.has_ended:
            self._expires = now + timeout_s
            self.deadline = max(self.deadline, min(self._expires, self._state_deadline(now)))

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case Announced():
                return self._on_announced(event, now)
            case SourceMapped():
                return self._on_mapped(event, now)
            case SourceRefused():
                return self._fail(event.code, event.message, now)
            case CopyEnded():
                return self._on_copy_ended(event, now)
            case Revoked():
                return self._on_revoked(event, now)
            case SenderLost():
                # Its pages are in its agent's memory, not its own: if all of them are announced, the copy goes on.
                if len(self._announced) + len(self._copying) + len(self._copied) == len(self.grant.pages):
                    return []
                return self._fail("source_lost", event.message, now)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    # events

    def _on_announced(self, event: Announced, now: float) -> list[Command]:
        ready = event.ready
        # Pages of two prefills must not be mixed: the same tokens need not have the same bits at both.
        if self.sender and (event.sender, event.sender_epoch) != (self.sender, self.sender_epoch):
            taken = (
                f"this grant already takes pages of {self.sender}#{self.sender_epoch}; request the transfer again with"
                " a new grant"
            )
            return [Send(event.sender, self._failed("grant_taken", taken))]
        self.sender, self.sender_epoch = event.sender, event.sender_epoch
        if self.has_ended:
            # The holder may not have heard of its success: if it had, the sender would not repeat itself.
            return self._tell(self._outcome(), holder=self.phase is Phase.SUCCESS)
        problem = self._problem(ready)
        if problem:
            return self._fail(*problem, now)
        last = ready.first + len(ready.pages)
        repeated = self._copied.issuperset(range(ready.first, last))
        for index, page, generation in zip(range(ready.first, last), ready.pages, ready.generations, strict=True):
            if index not in self._copied and index not in self._copying:
                self._announced[index] = (page, generation)
        commands: list[Command] = [Send(event.sender, self._progress())] if repeated else []
        if self.source is None:
            self.source = MapSource(ready.source_agent, ready.source_group, ready.source_incarnation)
            self._wait(now)
            return [*commands, self.source]
        return commands + self._copy_next(now)

    def _on_mapped(self, event: SourceMapped, now: float) -> list[Command]:
        if self.has_ended or self.source is None or self._is_mapped:
            return []
        # The announced page numbers belong to the earlier pool.
        if event.incarnation != self.source.incarnation:
            return self._fail("source_changed", f"the pool of {self.source.group} was recreated", now)
        if event.layout_digest != self.grant.layout_digest:
            return self._fail("layout_mismatch", f"the pool of {self.source.group} has a different layout", now)
        self._is_mapped = True
        return self._copy_next(now)

    def _on_copy_ended(self, event: CopyEnded, now: float) -> list[Command]:
        # A copy that this session has not begun, or an end reported twice.
        if event.copy_id != self._copy_id or not self._copying:
            return []
        copied, self._copying = self._copying, []
        if self.has_ended:
            self._settle(now)
            return []
        num_before = self._num_first
        self._copied.update(copied[: event.num_good] if event.code else copied)
        # Announcements may be lost and repeated out of order; decode's cache can only use pages up to the first gap.
        while self._num_first in self._copied:
            self._num_first += 1
        if event.code:
            for index in copied:
                self._announced.pop(index, None)
            # Before the failure: then the holder looks at what it has.
            has_more = self._num_first > num_before and not self.is_closed
            news: list[Command] = [Send(self.grant.holder, self._progress())] if has_more else []
            return [*news, *self._fail(event.code, event.message, now)]
        if self.num_pages == len(self.grant.pages):
            self.phase = Phase.SUCCESS
            # A sender that hears nothing repeats itself, and the holder is told again. What an agent has read of its
            # own store nobody repeats: then the holder has to say that it has heard.
            self.is_closed = self.grant.stored is None
            self._settle(now)
            # The sender learns it from the holder's cancel; if that does not come, it repeats and is answered.
            return [Send(self.grant.holder, self._progress())]
        return self._tell(self._progress(), holder=not self.is_closed) + self._copy_next(now)

    def _on_revoked(self, event: Revoked, now: float) -> list[Command]:
        self.is_closed = True
        if self.has_ended:
            self.deadline = max(self._expires, now)
            return []
        return self._fail(event.code, event.message, now)

    def _on_tick(self, now: float) -> list[Command]:
        if now < self.deadline:
            return []
        if not self.has_ended:
            state = self.phase.value if self.sender else "waiting for a first announcement"
            progress = f"{self.num_pages} of {len(self.grant.pages)} pages copied"
            return self._fail("deadline_exceeded", f"the transfer ran out of time while {state}, {progress}", now)
        if self.is_closed or self.is_over(now):
            self.deadline = max(self._expires, now + self.limits.resend_s)
            return []
        # Not an ask that a `Retrier` could repeat: this is a tell, and the holder's own `CloseGrant` ends it. The
        # session has one deadline for each of its states; this is the one for an end not acknowledged.
        self.deadline = now + self.limits.resend_s
        return [Send(self.grant.holder, self._outcome())]

    # inside

    def _problem(self, ready: PagesReady) -> tuple[str, str] | None:
        source = MapSource(ready.source_agent, ready.source_group, ready.source_incarnation)
        if ready.layout_digest != self.grant.layout_digest:
            return "layout_mismatch", f"pages of {ready.source_group} do not have the grant's layout"
        if self.source is not None and source != self.source:
            return "source_changed", f"pages were announced from {self.source}, and now others from {source}"
        fits = ready.total == len(self.grant.pages) and 0 <= ready.first <= ready.total - len(ready.pages)
        if not fits or len(ready.pages) != len(ready.generations):
            return (
                "bad_announcement",
                f"{len(ready.pages)} pages from index {ready.first}, of {ready.total}, with {len(ready.generations)} "
                f"generations do not fit a grant of {len(self.grant.pages)} pages",
            )
        return None

    def _copy_next(self, now: float) -> list[Command]:
        """Start the next copy if one can start; only one runs at a time, so a cancel has one thing to wait for."""
        if self._copying or not self._is_mapped or self.has_ended:
            return []
        if not self._announced:
            self.phase = Phase.WAITING
            self._wait(now)
            return []
        # In the grant's order, so that pages come in from its beginning; 1,024 at most, so that one prompt's copy is
        # neither one endless message nor one cancel that takes seconds.
        self._copying = sorted(self._announced)[: self.limits.max_pages_per_copy]
        sources = [self._announced.pop(index) for index in self._copying]
        self._copy_id += 1
        self.phase = Phase.TRANSFERRING
        self._wait(now)
        return [
            StartCopy(
                self._copy_id,
                [page for page, _ in sources],
                [generation for _, generation in sources],
                [self.grant.pages[index] for index in self._copying],
                [self.grant.generations[index] for index in self._copying],
                self.deadline,
            )
        ]

    def _fail(self, code: str, message: str, now: float) -> list[Command]:
        """End without the pages; the first reason stays. The holder is not told of an end that it requested."""
        if self.has_ended:
            return []
        self.phase = Phase.FAILED
        self.failure = self._failed(code, message)
        self._announced.clear()
        self._settle(now)
        cancel: list[Command] = [CancelCopy(self._copy_id)] if self._copying else []
        return cancel + self._tell(self._outcome(), holder=not self.is_closed)

    def _settle(self, now: float) -> None:
        self._expires = now + self.limits.linger_s
        self.deadline = self._expires if self.is_closed else now + self.limits.resend_s

    def _wait(self, now: float) -> None:
        self.deadline = min(self._expires, self._state_deadline(now))

    def _state_deadline(self, now: float) -> float:
        if self.phase is Phase.TRANSFERRING:
            return now + self.limits.copy_s
        if self.phase is Phase.WAITING:
            return now + self.limits.waiting_s
        # Until the first announcement the prefill may be queued for long: only the grant's own deadline counts.
        return now + self.limits.map_s if self.source else self._expires

    def _tell(self, message: PagesPulled | TransferFailed, *, holder: bool) -> list[Command]:
        receivers = [self.grant.holder] if holder else []
        if self.sender and self.sender not in receivers:
            receivers.append(self.sender)
        return [Send(receiver, message) for receiver in receivers]

    def _progress(self) -> PagesPulled:
        return PagesPulled(
            grant_id=self.grant.grant_id, num_pages=self._num_first, complete=self.phase is Phase.SUCCESS
        )

    def _outcome(self) -> PagesPulled | TransferFailed:
        if self.phase is Phase.SUCCESS:
            return self._progress()
        return self.failure

    def _failed(self, code: str, message: str) -> TransferFailed:
        return TransferFailed(grant_id=self.grant.grant_id, code=code, message=message)
