from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.protocol import OpenGrant, PagesPulled, PagesReady, StoredPages, TransferFailed
from kvstore.transfer.session import (
    Announced,
    CancelCopy,
    Command,
    CopyEnded,
    MapSource,
    Phase,
    Revoked,
    Send,
    SenderLost,
    SessionLimits,
    SourceMapped,
    SourceRefused,
    StartCopy,
    Tick,
    TransferSession,
)

DIGEST = b"d" * 16
LIMITS = SessionLimits(map_s=2, waiting_s=5, copy_s=3, resend_s=0.5, linger_s=10, max_pages_per_copy=2)
SOURCE = MapSource("agent-p", "prefill-0", 1)


def make_session(num_pages: int = 4, timeout_s: float = 20) -> TransferSession:
    grant = OpenGrant(
        grant_id="grant",
        group="decode-0",
        pages=[10 + index for index in range(num_pages)],
        generations=[100 + index for index in range(num_pages)],
        layout_digest=DIGEST,
        holder="D",
        holder_epoch=1,
        timeout_s=timeout_s,
    )
    return TransferSession(grant, 0.0, LIMITS)


def fed(session: TransferSession, *events: Any, now: float = 0.0) -> TransferSession:
    """After these events, all at one moment."""
    for event in events:
        session.handle(event, now)
    return session


def ready(first: int, count: int, /, **changes: Any) -> PagesReady:
    fields: dict[str, Any] = {
        "grant_id": "grant",
        "first": first,
        "total": 4,
        "source_group": "prefill-0",
        "source_agent": "agent-p",
        "source_incarnation": 1,
        "layout_digest": DIGEST,
        "pages": [20 + index for index in range(first, first + count)],
        "generations": [200 + index for index in range(first, first + count)],
    }
    return PagesReady(**(fields | changes))


def announced(first: int, count: int, /, **changes: Any) -> Announced:
    return Announced("P", 1, ready(first, count, **changes))


def pulled(num_pages: int, complete: bool = False) -> PagesPulled:
    return PagesPulled(grant_id="grant", num_pages=num_pages, complete=complete)


def copy(copy_id: int, first: int, count: int, deadline: float) -> StartCopy:
    indexes = range(first, first + count)
    return StartCopy(
        copy_id,
        [20 + index for index in indexes],
        [200 + index for index in indexes],
        [10 + index for index in indexes],
        [100 + index for index in indexes],
        deadline,
    )


MAPPED = SourceMapped(1, DIGEST)


def failures(commands: list[Command]) -> list[tuple[str, str]]:
    return [
        (command.receiver, command.message.code)
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, TransferFailed)
    ]


def both(code: str) -> list[tuple[str, str]]:
    """What `failures` says where holder and sender are told of one."""
    return [("D", code), ("P", code)]


@pytest.fixture
def session() -> TransferSession:
    return make_session()


@pytest.fixture
def mapping(session: TransferSession) -> TransferSession:
    """One page is announced, and its source is being mapped."""
    return fed(session, announced(0, 1))


@pytest.fixture
def copying(mapping: TransferSession) -> TransferSession:
    """And mapped: the page is being copied."""
    return fed(mapping, MAPPED)


def test_chunks_are_pulled_as_they_are_announced(session: TransferSession) -> None:
    assert session.phase is Phase.BOOTSTRAPPING
    assert session.handle(announced(0, 3), 1.0) == [SOURCE]
    assert session.handle(MAPPED, 1.5) == [copy(1, 0, 2, 4.5)]
    assert session.phase is Phase.TRANSFERRING
    assert session.num_copying == 2
    told = [Send("D", pulled(2)), Send("P", pulled(2))]
    assert session.handle(CopyEnded(1), 2.0) == [*told, copy(2, 2, 1, 5.0)]
    assert session.handle(CopyEnded(2), 3.0) == [Send("D", pulled(3)), Send("P", pulled(3))]
    assert session.phase is Phase.WAITING
    assert session.handle(announced(3, 1), 4.0) == [copy(3, 3, 1, 7.0)]
    assert session.handle(CopyEnded(3), 5.0) == [Send("D", pulled(4, True))]
    assert session.phase is Phase.SUCCESS
    assert session.is_quiesced


def test_progress_counts_the_first_pages_without_a_gap(session: TransferSession) -> None:
    fed(session, announced(2, 2), MAPPED)
    assert session.handle(CopyEnded(1), 1.0) == [Send("D", pulled(0)), Send("P", pulled(0))]
    assert session.num_pages == 2
    session.handle(announced(0, 1), 2.0)
    assert session.handle(CopyEnded(2), 3.0) == [Send("D", pulled(1)), Send("P", pulled(1))]
    session.handle(announced(1, 1), 4.0)
    assert session.handle(CopyEnded(3), 5.0) == [Send("D", pulled(4, True))]


def test_a_success_closes_itself_and_answers_repeats() -> None:
    """Nobody asks for that: what lost the word of it are told again where the sender repeats what it announced."""
    session = fed(make_session(2), announced(0, 2, total=2), MAPPED, CopyEnded(1))
    assert (session.phase, session.is_closed) == (Phase.SUCCESS, True)
    assert session.handle(Tick(), 5.0) == [], "nothing is told without being asked"
    told = [Send("D", pulled(2, True)), Send("P", pulled(2, True))]
    assert session.handle(announced(0, 2, total=2), 5.5) == told
    assert session.handle(Revoked("grant_closed", "the handoff failed after all"), 6.0) == []
    assert session.handle(announced(0, 2, total=2), 6.5) == told
    assert not session.is_over(9.9)
    assert session.is_over(10.0)
    assert session.handle(Tick(), 10.0) == []


def test_a_success_that_nobody_would_ask_about_is_repeated_until_the_holder_closes() -> None:
    """Of pages that are stored here: the agent is the sender, and a lost tell would let the grant run out."""
    session = make_session(2)
    stored = StoredPages(source="kv-1", incarnation=1, slots=[20, 21], sequences=[200, 201])
    session.grant = msgspec.structs.replace(session.grant, stored=stored)
    fed(session, announced(0, 2, total=2), MAPPED)
    assert session.handle(CopyEnded(1), 0.0) == [Send("D", pulled(2, True))]
    assert session.is_quiesced, "its pages may be used at once"
    assert session.handle(Tick(), 0.4) == []
    assert session.handle(Tick(), 0.5) == [Send("D", pulled(2, True))]
    assert session.handle(Tick(), 1.0) == [Send("D", pulled(2, True))]
    assert session.handle(Revoked("grant_closed", "it has heard"), 1.2) == []
    assert session.handle(Tick(), 2.0) == []
    assert session.is_over(10.0)


def test_a_failure_is_repeated_until_the_holder_closes() -> None:
    session = fed(make_session(2), announced(0, 2, total=2))
    told = session.handle(SourceRefused("gone", ""), 0.0)
    assert failures(told) == both("gone")
    assert session.handle(Tick(), 0.4) == []
    assert failures(session.handle(Tick(), 0.5)) == [("D", "gone")]
    assert session.handle(Tick(), 0.6) == []
    assert failures(session.handle(Tick(), 1.0)) == [("D", "gone")]
    assert failures(session.handle(announced(0, 2, total=2), 1.2)) == [("P", "gone")]
    assert session.handle(Revoked("grant_closed", "done"), 1.4) == []
    assert session.handle(Tick(), 1.5) == []
    assert failures(session.handle(announced(0, 2, total=2), 1.6)) == [("P", "gone")], "also after the close"
    assert session.is_over(10.0)


def test_repeats_are_harmless_and_answered(session: TransferSession) -> None:
    session.handle(announced(0, 2), 0.0)
    assert session.handle(announced(0, 2), 0.0) == [], "already mapping, nothing copied yet"
    session.handle(MAPPED, 0.0)
    assert session.handle(MAPPED, 0.0) == []
    assert session.handle(announced(0, 2), 0.0) == [], "being copied"
    session.handle(CopyEnded(1), 0.0)
    assert session.handle(CopyEnded(1), 0.0) == []
    assert session.handle(announced(0, 2), 0.0) == [Send("P", pulled(2))]
    assert session.handle(announced(1, 0), 0.0) == [Send("P", pulled(2))], "an empty one asks how far it is"
    assert session.handle(announced(1, 2), 0.0) == [copy(2, 2, 1, 3.0)]


def test_pages_announced_anew_before_their_copy_replace_the_old(mapping: TransferSession) -> None:
    """The sender was preempted and computed them again elsewhere."""
    mapping.handle(announced(0, 1, pages=[77], generations=[777]), 0.0)
    [started] = mapping.handle(MAPPED, 0.0)
    assert isinstance(started, StartCopy)
    assert (started.source_pages, started.source_generations) == ([77], [777])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layout_digest": b"other"}, "layout_mismatch"),
        ({"total": 5}, "bad_announcement"),
        ({"first": -1}, "bad_announcement"),
        ({"first": 3}, "bad_announcement"),
        ({"generations": [1]}, "bad_announcement"),
    ],
)
def test_an_announcement_that_cannot_be_right_ends_the_transfer(
    session: TransferSession, changes: dict[str, Any], code: str
) -> None:
    commands = session.handle(Announced("P", 1, ready(0, 2, **changes)), 1.0)
    assert failures(commands) == both(code)
    assert failures(session.handle(announced(0, 2), 1.1)) == [("P", code)]
    assert failures(session.handle(Tick(), 1.5)) == [("D", code)]


def test_the_source_stays_the_same(mapping: TransferSession) -> None:
    assert failures(mapping.handle(announced(1, 1, source_incarnation=2), 0.0))[0][1] == "source_changed"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (SourceMapped(2, DIGEST), "source_changed"),
        (SourceMapped(1, b"other"), "layout_mismatch"),
        (SourceRefused("pool_missing", "gone"), "pool_missing"),
    ],
)
def test_a_source_that_is_not_what_was_announced(
    mapping: TransferSession, event: SourceMapped | SourceRefused, code: str
) -> None:
    assert failures(mapping.handle(event, 0.0)) == both(code)
    assert mapping.handle(MAPPED, 0.1) == mapping.handle(event, 0.1) == []


def test_a_grant_belongs_to_its_first_sender(mapping: TransferSession) -> None:
    for stranger in (Announced("Q", 1, ready(0, 4)), Announced("P", 2, ready(0, 4))):
        assert failures(mapping.handle(stranger, 0.0)) == [(stranger.sender, "grant_taken")]
    assert mapping.phase is Phase.BOOTSTRAPPING


def test_no_announcement_in_time() -> None:
    session = make_session(timeout_s=20)
    assert session.deadline == 20
    assert session.handle(Tick(), 19.9) == []
    [send] = session.handle(Tick(), 20.0)
    assert failures([send]) == [("D", "deadline_exceeded")]
    assert "waiting for a first announcement, 0 of 4 pages copied" in send.message.message


@pytest.mark.parametrize(("events", "deadline"), [([], 2.0), ([MAPPED], 3.0), ([MAPPED, CopyEnded(1)], 5.0)])
def test_every_state_has_its_deadline(mapping: TransferSession, events: list[Any], deadline: float) -> None:
    fed(mapping, *events)
    assert mapping.deadline == deadline
    commands = mapping.handle(Tick(), deadline)
    copying = events == [MAPPED]
    assert failures(commands) == both("deadline_exceeded")
    assert (commands[0] == CancelCopy(1)) == copying


def test_the_lease_caps_every_deadline_and_can_be_renewed() -> None:
    session = fed(make_session(timeout_s=1), announced(0, 1), now=0.5)
    assert session.deadline == 1.0
    session.renew(20, 0.9)
    assert session.deadline == pytest.approx(2.9)
    fed(session, MAPPED, CopyEnded(1, "stale_pages", "moved on"), now=1.0)
    session.renew(20, 1.0)
    assert session.phase is Phase.FAILED


def test_a_failed_copy_ends_the_transfer(copying: TransferSession) -> None:
    assert failures(copying.handle(CopyEnded(1, "stale_pages", "generation 3"), 0.0)) == both("stale_pages")


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_what_a_failed_copy_has_brought_before_the_wrong_page_is_told_first(num_good: int) -> None:
    session = fed(make_session(), announced(0, 4), MAPPED, CopyEnded(1))
    told = session.handle(CopyEnded(2, "corrupt_pages", "slot 3", num_good), 1.0)
    before = [Send("D", pulled(2 + num_good))] if num_good else []
    assert told[: len(before)] == before
    assert failures(told) == both("corrupt_pages")
    assert session.num_pages == 2 + num_good
    assert session.phase is Phase.FAILED


def test_what_came_beside_a_gap_is_not_told() -> None:
    session = fed(make_session(), announced(2, 2), MAPPED)
    told = session.handle(CopyEnded(1, "corrupt_pages", "slot 3", 1), 1.0)
    assert [type(command.message) for command in told if isinstance(command, Send)] == [TransferFailed] * 2


def test_closing_while_a_copy_runs_waits_for_its_end(copying: TransferSession) -> None:
    commands = copying.handle(Revoked("grant_closed", "no longer wanted"), 1.0)
    assert commands[0] == CancelCopy(1)
    assert failures(commands) == [("P", "grant_closed")]
    assert copying.has_ended
    assert not copying.is_quiesced
    assert not copying.is_over(1000)
    assert copying.handle(Tick(), 1000.0) == [], "the holder asked; it hears from the answer to that"
    assert copying.handle(CopyEnded(1, "cancelled", ""), 1001.0) == []
    assert copying.is_quiesced
    assert copying.handle(Revoked("grant_closed", "again"), 1002.0) == []


def test_a_failure_is_repeated_until_its_grant_is_closed(copying: TransferSession) -> None:
    copying.handle(Tick(), 3.0)
    assert failures(copying.handle(Tick(), 3.5)) == [("D", "deadline_exceeded")]
    assert failures(copying.handle(Tick(), 60.0)) == [("D", "deadline_exceeded")]
    copying.handle(CopyEnded(1), 61.0)
    assert failures(copying.handle(Tick(), 61.5)) == [("D", "deadline_exceeded")]


def test_a_lost_sender_ends_what_it_has_not_announced(session: TransferSession) -> None:
    session.handle(announced(0, 3), 0.0)
    assert failures(session.handle(SenderLost("P is gone"), 0.0)) == both("source_lost")
    whole = make_session()
    for event in (announced(0, 4), MAPPED):
        whole.handle(event, 0.0)
        assert whole.handle(SenderLost("P is gone"), 0.0) == []
    assert fed(whole, CopyEnded(1), CopyEnded(2)).phase is Phase.SUCCESS


def test_a_scheduler_that_prefills_for_itself_hears_once() -> None:
    session = fed(make_session(2), Announced("D", 1, ready(0, 2, total=2)), MAPPED)
    assert session.handle(CopyEnded(1), 0.0) == [Send("D", pulled(2, True))]


class SessionMachine(RuleBasedStateMachine):
    """Any events in any order, with time: the end comes, once, is told to both sides, and nothing is written after."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.session = make_session(4, timeout_s=30)
        self.running: StartCopy | None = None
        self.cancelled = False
        self.heard: dict[str, list[PagesPulled | TransferFailed]] = {"D": [], "P": [], "Q": []}
        self.outcome: Phase | None = None
        self.written: dict[int, int] = {}
        self.is_mapping = False
        self.sender_told_of_end = False

    def feed(self, event: Any) -> None:
        ended_before = self.session.has_ended
        for command in self.session.handle(event, self.now):
            match command:
                case StartCopy():
                    assert self.running is None, "one copy at a time"
                    assert not ended_before
                    assert not self.session.has_ended
                    assert self.now < command.deadline <= self.now + LIMITS.copy_s
                    assert 0 < len(command.pages) <= LIMITS.max_pages_per_copy
                    assert not set(command.pages) & set(self.written), "no page is written twice"
                    self.running, self.cancelled = command, False
                case CancelCopy(copy_id):
                    assert self.running is not None
                    assert self.running.copy_id == copy_id
                    self.cancelled = True
                case Send(receiver, message):
                    self.heard[receiver].append(message)
                case MapSource():
                    assert not self.is_mapping
                    self.is_mapping = True
        if self.outcome is None and self.session.has_ended:
            self.outcome = self.session.phase

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule(first=st.integers(0, 3), count=st.integers(0, 4), shift=st.sampled_from([0, 0, 0, 50]))
    def announce(self, first: int, count: int, shift: int) -> None:
        count = min(count, 4 - first)
        pages = [20 + shift + index for index in range(first, first + count)]
        self.feed(announced(first, count, pages=pages))

    @rule(changes=st.sampled_from([{"total": 7}, {"layout_digest": b""}, {"source_group": "other"}]))
    def announce_nonsense(self, changes: dict[str, Any]) -> None:
        self.feed(announced(0, 1, **changes))

    @rule()
    def a_stranger_announces(self) -> None:
        self.feed(Announced("Q", 1, ready(0, 2)))

    @rule(event=st.sampled_from([MAPPED, MAPPED, SourceMapped(9, DIGEST), SourceRefused("pool_missing", "")]))
    def mapping_ends(self, event: Any) -> None:
        if self.is_mapping:
            self.feed(event)

    @rule(code=st.sampled_from(["", "", "", "stale_pages"]))
    def copy_ends(self, code: str) -> None:
        if self.running is not None:
            running, self.running = self.running, None
            if not code:
                self.written.update(zip(running.pages, running.source_pages, strict=True))
            self.feed(CopyEnded(running.copy_id, code))
            self.feed(CopyEnded(running.copy_id, code))

    @rule()
    def revoke(self) -> None:
        self.feed(Revoked("grant_closed", ""))

    @rule()
    def sender_lost(self) -> None:
        if self.session.sender:
            self.feed(SenderLost(""))

    @rule()
    def renew(self) -> None:
        self.session.renew(30, self.now)

    @invariant()
    def ends_stay_and_are_told(self) -> None:
        session = self.session
        if self.outcome is not None:
            assert session.phase is self.outcome
            assert session.is_quiesced == (self.running is None)
            if self.running is not None:
                assert self.cancelled
        if self.outcome is Phase.SUCCESS:
            assert len(self.written) == 4
        for receiver in ("D", "P"):
            ends = [m for m in self.heard[receiver] if isinstance(m, TransferFailed) or m.complete]
            assert len({isinstance(end, TransferFailed) for end in ends}) <= 1, "never both"
            # The sender hears of a success by the holder's cancel, or as the answer to what it repeats.
            who_hears = {Phase.SUCCESS: session.grant.holder, Phase.FAILED: session.sender}
            if self.outcome is not None and receiver == who_hears[self.outcome]:
                assert ends
        assert session.deadline > self.now - 4.0 or session.is_over(self.now)

    def teardown(self) -> None:
        """Left alone, it ends within its lease, and is forgotten some time after."""
        for _ in range(2000):
            if self.session.is_over(self.now):
                break
            self.now = max(self.now, self.session.deadline)
            if self.running is not None and self.cancelled:
                running, self.running = self.running, None
                self.feed(CopyEnded(running.copy_id, "cancelled"))
            self.feed(Tick())
        assert self.session.is_over(self.now)
        assert not self.session.is_closed or self.session.has_ended


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
