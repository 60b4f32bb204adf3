import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.address import Address
from mesh.calls.table import Admission, CallTable, Mailbox, PendingCalls
from mesh.errors import MailboxFull

PEERS = [Address(name, 1) for name in "abc"]
IDS = st.integers(1, 30)


class Pending(RuleBasedStateMachine):
    """Every call is settled exactly once, whatever comes first: answer, deadline, loss of the peer, cancel."""

    def __init__(self):
        super().__init__()
        self.table = PendingCalls(8)
        self.model = {}
        self.settled = set()
        self.now = 0.0
        self.next_id = 0

    @rule(peer=st.sampled_from(PEERS), timeout=st.integers(0, 5))
    def open(self, peer, timeout):
        self.next_id += 1
        if len(self.model) == 8:
            with pytest.raises(MailboxFull):
                self.table.open(self.next_id, peer, self.now, "x")
            return
        self.table.open(self.next_id, peer, self.now + timeout, self.next_id)
        self.model[self.next_id] = (peer, self.now + timeout)

    @rule(message_id=IDS, peer=st.sampled_from(PEERS))
    def answer(self, message_id, peer):
        expected = self.model.get(message_id)
        right = expected is not None and expected[0] == peer
        assert self.table.answered(message_id, peer) == (message_id if right else None)
        if right:
            self.settle(message_id)

    @rule(message_id=IDS)
    def cancel(self, message_id):
        value = self.table.settle(message_id)
        assert value == (message_id if message_id in self.model else None)
        if value is not None:
            self.settle(message_id)

    @rule(peer=st.sampled_from(PEERS))
    def lose(self, peer):
        lost = self.table.lose(peer)
        assert lost == [i for i, (p, _) in self.model.items() if p == peer]
        for message_id in lost:
            self.settle(message_id)

    @rule(by=st.integers(0, 3))
    def pass_time(self, by):
        self.now += by
        expired = self.table.expire(self.now)
        assert {i for i, _, _ in expired} == {i for i, (_, d) in self.model.items() if d <= self.now}
        assert [self.model[i] for i, _, _ in expired] == sorted(
            (self.model[i] for i, _, _ in expired), key=lambda m: m[1]
        )
        for message_id, peer, value in expired:
            assert self.model[message_id][0] == peer
            assert value == message_id
            self.settle(message_id)

    def settle(self, message_id):
        del self.model[message_id]
        assert message_id not in self.settled
        self.settled.add(message_id)

    @invariant()
    def agrees(self):
        assert len(self.table) == len(self.model)
        for message_id, (peer, _) in self.model.items():
            assert self.table.peer_of(message_id) == peer
            assert self.table.get(message_id) == message_id

    @invariant()
    def timer_is_right(self):
        deadline = self.table.next_deadline()
        assert deadline == min((d for _, d in self.model.values()), default=None)


TestPending = Pending.TestCase


def test_quick_calls_with_long_deadlines_leave_nothing():
    table = CallTable(4)
    for key in range(10_000):
        table.add(key, PEERS[0], 1e9 + key, "x")
        assert table.settle(key) == "x"
    # By a private name: what else shows it is memory.
    assert len(table._heap) < 100
    assert table.next_deadline() is None
    assert table.peer_of(3) is None
    assert table.get(3) is None


def test_a_deadline_of_a_settled_key_is_not_the_new_ones():
    table = CallTable(4)
    table.add("k", PEERS[0], 5.0, 1)
    table.settle("k")
    table.add("k", PEERS[0], 9.0, 2)
    assert table.expire(6.0) == []
    assert table.expire(9.0) == [("k", PEERS[0], 2)]


def test_misuse_is_an_assertion():
    table = CallTable(1)
    table.add(1, PEERS[0], 1.0, "x")
    with pytest.raises(AssertionError):
        table.add(1, PEERS[0], 1.0, "x")
    with pytest.raises(AssertionError):
        table.add(2, PEERS[0], 1.0, "x")
    assert table.close() == ["x"]


class Mail(RuleBasedStateMachine):
    """The mailbox never holds more than it may, of all or of one sender, and frees what it held."""

    def __init__(self):
        super().__init__()
        self.box = Mailbox(6)
        self.model = {}
        self.now = 0.0

    @rule(sender=st.sampled_from(PEERS), message_id=IDS, timeout=st.integers(0, 5))
    def admit(self, sender, message_id, timeout):
        key = (sender, message_id)
        mine = sum(s == sender for s, _ in self.model)
        admission = self.box.admit(sender, message_id, self.now + timeout, key)
        if key in self.model:
            assert admission is Admission.REPEATED
        elif admission is Admission.TAKEN:
            assert len(self.model) < 6
            assert mine < self.box.per_sender
            self.model[key] = self.now + timeout
        elif admission is Admission.OVERLOADED:
            assert len(self.model) == 6 or mine == self.box.per_sender

    @rule(sender=st.sampled_from(PEERS), message_id=IDS)
    def settle(self, sender, message_id):
        key = (sender, message_id)
        assert self.box.settle(key) == (key if key in self.model else None)
        self.model.pop(key, None)

    @rule(sender=st.sampled_from(PEERS), message_id=IDS)
    def cancel(self, sender, message_id):
        key = (sender, message_id)
        assert self.box.cancel(key) == (key if key in self.model else None)
        self.model.pop(key, None)

    @rule(sender=st.sampled_from(PEERS))
    def lose(self, sender):
        assert sorted(self.box.lose(sender)) == sorted(k for k in self.model if k[0] == sender)
        self.model = {k: d for k, d in self.model.items() if k[0] != sender}

    @rule(by=st.integers(0, 3))
    def pass_time(self, by):
        self.now += by
        expired = {key for key, _, _ in self.box.expire(self.now)}
        assert expired == {k for k, d in self.model.items() if d <= self.now}
        self.model = {k: d for k, d in self.model.items() if k not in expired}

    @invariant()
    def agrees(self):
        assert len(self.box) == len(self.model)


TestMail = Mail.TestCase


def test_a_cancel_that_comes_first_wins():
    box = Mailbox(4)
    assert box.cancel((PEERS[0], 7)) is None
    assert box.admit(PEERS[0], 7, 1.0, "x") is Admission.CANCELLED
    assert box.admit(PEERS[0], 8, 1.0, "x") is Admission.TAKEN
    for message_id in range(1000, 2000):
        box.cancel((PEERS[1], message_id))
    forgotten, known = (box.admit(PEERS[1], message_id, 1.0, "y") for message_id in (1743, 1744))
    assert (forgotten, known) == (Admission.TAKEN, Admission.CANCELLED), "the last 256"
    assert box.close() == ["x", "y"]
    assert len(box) == 0
