import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.calls.credit import Arrival, CreditGate, CreditWindow


class Stream(RuleBasedStateMachine):
    """A sender and a receiver with a lossy, repeating path for credit between them."""

    def __init__(self):
        super().__init__()
        self.window = CreditWindow(4)
        self.gate = CreditGate(4)
        self.limits = []
        self.under_way = []
        self.read = 0

    @precondition(lambda self: self.gate.is_open)
    @rule()
    def send(self):
        self.under_way.append(self.gate.take())

    @precondition(lambda self: self.under_way)
    @rule()
    def arrive(self):
        assert self.window.receive(self.under_way.pop(0)) is Arrival.NEXT

    @precondition(lambda self: self.window.consumed < self.window.received)
    @rule()
    def consume(self):
        limit = self.window.consume()
        self.read += 1
        if limit is not None:
            self.limits.append(limit)

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def grant(self, data):
        """Any limit said so far comes, perhaps an old one, perhaps again."""
        self.gate.grant(data.draw(st.sampled_from(self.limits)))

    @invariant()
    def bounded(self):
        assert self.gate.sent <= self.gate.limit <= self.window.limit
        assert self.window.consumed <= self.window.received <= self.window.limit
        assert self.window.limit <= self.window.consumed + self.window.window
        assert len(self.under_way) + self.window.received - self.window.consumed <= 4

    @invariant()
    def never_stuck(self):
        """Whoever has read everything has said a limit that lets the sender go on."""
        if self.window.consumed == self.gate.sent and not self.under_way:
            assert self.window.limit > self.gate.sent


TestStream = Stream.TestCase


def test_positions_that_do_not_follow():
    window = CreditWindow(4)
    assert window.receive(1) is Arrival.GAP
    assert window.receive(0) is Arrival.NEXT
    assert window.receive(0) is Arrival.REPEAT
    assert window.receive(4) is Arrival.WITHOUT_CREDIT
    assert window.receive(1) is Arrival.NEXT


def test_credit_is_said_once_per_half_window():
    window = CreditWindow(8)
    said = []
    for position in range(8):
        window.receive(position)
        limit = window.consume()
        if limit:
            said.append((position, limit))
    assert said == [(3, 12), (7, 16)]


def test_grants_open_a_closed_gate_only():
    gate = CreditGate(1)
    assert not gate.grant(2)
    gate.take()
    gate.take()
    assert not gate.is_open
    assert not gate.grant(1)
    assert gate.grant(3)
    assert CreditGate(-5).limit == 0


@given(st.integers(max_value=0))
def test_a_window_has_room(window):
    with pytest.raises(ValueError, match="at least 1"):
        CreditWindow(window)


def test_misuse_is_an_assertion():
    with pytest.raises(AssertionError):
        CreditGate(0).take()
    with pytest.raises(AssertionError):
        CreditWindow(1).consume()
