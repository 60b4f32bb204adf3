"""Any order of calls that end, fail, are refused or given up: none starves, none is started twice, the room is kept."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodes.engine.feeder import MAX_PAUSE_S, Feeder, Ticket

MOST = 40


class Feeding(RuleBasedStateMachine):
    """A mesh that has room for `mesh_room` requests of ours, which changes."""

    def __init__(self) -> None:
        super().__init__()
        self.feeder = Feeder(MOST)
        self.now = 0.0
        self.mesh_room = MOST
        self.running: list[Ticket] = []
        self.order: list[Ticket] = []
        self.ended = 0
        self.entered = 0

    def begin(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            assert ticket not in self.running, "started twice"
            assert ticket is self.order[0], "out of turn"
            self.order.pop(0)
            self.running.append(ticket)

    @rule(size=st.integers(1, 2 * MOST))
    def enter(self, size: int) -> None:
        ticket = Ticket(size)
        self.order.append(ticket)
        self.entered += 1
        self.begin(self.feeder.enter(ticket, self.now))

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms(use_true_random=False), went_well=st.booleans())
    def end(self, pick, went_well: bool) -> None:
        ticket = self.running.pop(pick.randrange(len(self.running)))
        self.ended += 1
        self.begin(self.feeder.leave(ticket, self.now, went_well=went_well))

    @precondition(lambda self: self.running)
    @rule(pick=st.randoms(use_true_random=False))
    def refuse(self, pick) -> None:
        ticket = self.running.pop(pick.randrange(len(self.running)))
        self.order.insert(0, ticket)
        self.begin(self.feeder.refuse(ticket, self.now))

    @precondition(lambda self: self.order)
    @rule(pick=st.randoms(use_true_random=False))
    def give_up(self, pick) -> None:
        ticket = self.order.pop(pick.randrange(len(self.order)))
        self.ended += 1
        self.begin(self.feeder.leave(ticket, self.now, went_well=False))

    @rule(seconds=st.floats(0.0, 2.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.begin(self.feeder.tick(self.now))

    @invariant()
    def counts_are_right(self) -> None:
        assert self.feeder.num_requests == sum(ticket.size for ticket in self.running)
        assert self.feeder.num_waiting == len(self.order)
        assert 1 <= self.feeder.room <= MOST
        # Alone, a call larger than the room is tried; beside others none is.
        assert len(self.running) <= 1 or self.feeder.num_requests <= MOST

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not self.order:
            assert self.feeder.next_deadline() is None
        elif not self.running:
            deadline = self.feeder.next_deadline()
            assert deadline is not None
            assert deadline <= self.now + MAX_PAUSE_S

    def teardown(self) -> None:
        for _ in range(10 * self.entered):
            if not self.running and not self.order:
                break
            if self.running:
                self.end_first()
            else:
                self.now = self.feeder.next_deadline() or self.now
                self.begin(self.feeder.tick(self.now))
        assert self.ended == self.entered

    def end_first(self) -> None:
        ticket = self.running.pop(0)
        self.ended += 1
        self.begin(self.feeder.leave(ticket, self.now, went_well=True))


TestFeeding = Feeding.TestCase


def test_refusals_make_the_room_as_large_as_what_runs_and_successes_larger_again() -> None:
    feeder = Feeder(100)
    tickets = [Ticket(10) for _ in range(12)]
    started = [one for ticket in tickets for one in feeder.enter(ticket, 0.0)]
    assert started == tickets[:10]
    assert feeder.refuse(tickets[9], 0.0) == []
    assert (feeder.room, feeder.num_requests) == (90, 90)
    # One that fails makes no more room than it had.
    assert feeder.leave(tickets[0], 0.0, went_well=False) == [tickets[9]]
    assert feeder.room == 90
    assert feeder.leave(tickets[1], 0.0, went_well=True) == [tickets[10]]
    assert feeder.room == 91
    assert feeder.leave(tickets[2], 0.0, went_well=True) == [tickets[11]]
    for ticket in tickets[3:]:
        feeder.leave(ticket, 0.0, went_well=True)
    assert (feeder.room, feeder.num_requests) == (100, 0)


def test_alone_a_refused_call_is_tried_again_after_pauses_that_grow() -> None:
    feeder, ticket, now = Feeder(10), Ticket(1), 0.0
    feeder.enter(ticket, now)
    pauses = []
    for _ in range(8):
        assert feeder.refuse(ticket, now) == []
        deadline = feeder.next_deadline()
        assert deadline is not None
        assert feeder.tick(deadline - 0.001) == []
        pauses.append(deadline - now)
        now = deadline
        assert feeder.tick(now) == [ticket]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S)
    assert ticket.refused_since == 0.0
