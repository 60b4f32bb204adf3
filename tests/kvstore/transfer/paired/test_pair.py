"""The state machine of a communicator of two ranks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import TransferError
from kvstore.transfer.paired.pair import Abort, Command, Finished, Initialise, Pair, PairPhase, Run

CANCELLED = TransferError("cancelled", "nobody wants it")
STALE = TransferError("stale_pages", "they moved on")


def ready(*, is_receiver: bool = True) -> Pair:
    pair = Pair(is_receiver=is_receiver)
    assert pair.start(10.0) == [Initialise()]
    assert pair.initialised() == []
    return pair


def ends(commands: list[Command]) -> dict[int, str]:
    return {one.number: one.error.code if one.error else "" for one in commands if isinstance(one, Finished)}


def test_transfers_wait_for_the_communicator_and_run_in_order() -> None:
    pair = Pair(is_receiver=False)
    assert pair.queue(1, 9.0) == pair.queue(2, 9.0) == []
    assert pair.start(5.0) == [Initialise()]
    assert pair.start(5.0) == []
    assert pair.initialised() == [Run(1)]
    assert pair.initialised() == []
    assert pair.moved(2) == []
    assert pair.moved(1) == [Finished(1, None), Run(2)]
    assert pair.moved(2) == [Finished(2, None)]
    assert not pair.is_busy


def test_a_receiver_waits_for_bytes_and_for_the_senders_word() -> None:
    pair = ready()
    assert pair.queue(1, 9.0) == [Run(1)]
    assert pair.moved(1) == []
    assert pair.source_verified(1, None, is_sent=True) == [Finished(1, None)]
    assert pair.queue(2, 9.0) == [Run(2)]
    assert pair.source_verified(2, STALE, is_sent=True) == []
    assert ends(pair.moved(2)) == {2: "stale_pages"}
    assert pair.phase is PairPhase.READY, "its bytes came, so the order of both ends is the same still"


def test_what_is_not_sent_takes_the_pair_with_it() -> None:
    pair = ready()
    pair.queue(1, 9.0)
    pair.queue(2, 9.0)
    commands = pair.source_verified(1, STALE, is_sent=False)
    assert Abort() in commands
    assert ends(commands) == {2: "pair_aborted"}
    assert pair.moved(1) == []
    assert ends(pair.stopped()) == {1: "stale_pages"}
    assert ends(pair.queue(3, 9.0)) == {3: "pair_aborted"}


def test_a_running_transfer_is_waited_for_when_it_is_cancelled() -> None:
    pair = ready(is_receiver=False)
    pair.queue(1, 9.0)
    pair.queue(2, 9.0)
    assert pair.cancel(1, CANCELLED) == []
    assert pair.cancel(2, CANCELLED) == [Finished(2, CANCELLED)]
    assert pair.cancel(7, CANCELLED) == []
    assert pair.moved(1) == [Finished(1, CANCELLED)]


def test_deadlines() -> None:
    slow = Pair(is_receiver=True)
    slow.start(5.0)
    slow.queue(1, 3.0)
    slow.queue(2, 99.0)
    assert slow.tick(2.9) == []
    assert ends(slow.tick(3.0)) == {1: "deadline_exceeded"}
    commands = slow.tick(5.0)
    assert Abort() in commands
    assert ends(commands) == {2: "deadline_exceeded"}
    assert slow.initialised() == slow.tick(99.0) == []
    stuck = ready()
    stuck.queue(1, 3.0)
    assert stuck.tick(3.0) == [Abort()]
    assert stuck.is_busy
    assert ends(stuck.stopped()) == {1: "deadline_exceeded"}
    assert not stuck.is_busy


def test_a_pair_that_never_began_has_nothing_to_stop() -> None:
    pair = Pair(is_receiver=True)
    pair.queue(1, 9.0)
    assert ends(pair.fail("the other end refused")) == {1: "pair_aborted"}
    assert pair.fail("again") == pair.stopped() == pair.start(9.0) == []
    assert pair.phase is PairPhase.ABORTED


class PairMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, each transfer ends once, one runs at a time, and in the order of queueing."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(is_receiver=True)
        self.now = 0.0
        self.queued: list[int] = []
        self.ended: dict[int, TransferError | None] = {}
        self.begun: list[int] = []
        self.moved: set[int] = set()
        self.source_verified: set[int] = set()
        self.is_aborting = False
        self.has_stopped = False

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Run):
                assert not self.is_aborting
                assert all(number in self.ended for number in self.begun), "one runs at a time"
                self.begun.append(command.number)
            elif isinstance(command, Abort):
                assert not self.is_aborting
                self.is_aborting = True
            elif isinstance(command, Finished):
                assert command.number in self.queued
                assert command.number not in self.ended
                if command.number in self.begun and not self.has_stopped:
                    assert command.number in self.moved & self.source_verified, "it may still write"
                if command.error is None:
                    assert command.number in self.moved & self.source_verified
                self.ended[command.number] = command.error

    @property
    def current(self) -> int | None:
        return next((number for number in self.begun if number not in self.ended), None)

    @rule(after=st.floats(0.5, 20))
    def start(self, after: float) -> None:
        self.take(self.pair.start(self.now + after))

    @precondition(lambda self: not self.is_aborting)
    @rule()
    def initialised(self) -> None:
        self.take(self.pair.initialised())

    @rule(after=st.floats(0, 20))
    def queue(self, after: float) -> None:
        number = len(self.queued) + 1
        self.queued.append(number)
        self.take(self.pair.queue(number, self.now + after))

    @rule()
    def move(self) -> None:
        if self.current is not None:
            self.moved.add(self.current)
            self.take(self.pair.moved(self.current))

    @rule(is_stale=st.booleans(), is_sent=st.booleans())
    def vouch(self, is_stale: bool, is_sent: bool) -> None:
        if self.current is not None:
            self.source_verified.add(self.current)
            self.take(self.pair.source_verified(self.current, STALE if is_stale else None, is_sent=is_sent))

    @rule(number=st.integers(1, 12))
    def late_news(self, number: int) -> None:
        if number != self.current:
            self.take(self.pair.moved(number) + self.pair.source_verified(number, None, is_sent=True))

    @rule(number=st.integers(1, 12))
    def cancel(self, number: int) -> None:
        self.take(self.pair.cancel(number, CANCELLED))

    @rule(passed=st.floats(0, 8))
    def tick(self, passed: float) -> None:
        self.now += passed
        self.take(self.pair.tick(self.now))

    @rule()
    def fail(self) -> None:
        self.take(self.pair.fail("the engine failed"))

    @precondition(lambda self: self.is_aborting)
    @rule()
    def stop(self) -> None:
        self.has_stopped = True
        self.take(self.pair.stopped())

    @invariant()
    def is_busy_while_something_may_come(self) -> None:
        open_ones = [number for number in self.queued if number not in self.ended]
        assert self.begun == sorted(self.begun)
        if open_ones:
            assert self.pair.is_busy

    def teardown(self) -> None:
        self.take(self.pair.fail("the end"))
        self.has_stopped = True
        self.take(self.pair.stopped())
        assert set(self.ended) == set(self.queued)


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
