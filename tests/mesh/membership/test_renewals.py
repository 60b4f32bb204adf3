import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.address import Address
from mesh.membership.renewals import Renewals
from mesh.wire.frames import Renewed

BEAT_S = 0.5
SEEN = (1, 5)
A = Address("a", 1)


@pytest.fixture
def renewals():
    return Renewals(BEAT_S)


def test_who_was_heard_is_renewed_from_then_on(renewals):
    renewals.heard(A, SEEN, SEEN, 10.0)
    renewals.heard(Address("b", 2), SEEN, SEEN, 10.5)
    assert renewals.due(10.75) == [Renewed("a", 1, 750), Renewed("b", 2, 250)]
    assert renewals.due(11.5) == [Renewed("a", 1, 1500), Renewed("b", 2, 1000)]
    assert renewals.due(11.75) == [Renewed("b", 2, 1250)], "three beats are over: it may hang"
    renewals.heard(A, SEEN, SEEN, 12.0)
    assert renewals.due(12.25) == [Renewed("a", 1, 250)], "it is back"


def test_who_stays_behind_is_told_at_the_second_beat(renewals):
    assert not renewals.heard(A, SEEN, SEEN, 0.0)
    assert not renewals.heard(A, SEEN, (1, 6), 0.5), "the registry's word may be on its way"
    assert renewals.heard(A, SEEN, (1, 6), 1.0)
    assert renewals.heard(A, SEEN, (1, 7), 1.5), "until it has heard"
    assert renewals.heard(A, (1, 6), (1, 7), 2.0), "of all"
    assert not renewals.heard(A, (1, 8), (1, 7), 2.5), "who is ahead has missed nothing"
    assert not renewals.heard(A, (1, 8), (2, 1), 3.0)
    assert renewals.heard(A, (1, 8), (2, 1), 3.5), "another registry has come"


def test_who_has_not_joined_is_not_told_that_it_is_behind(renewals):
    for now in (0.0, 0.5, 1.0):
        assert not renewals.heard(A, (0, 0), SEEN, now)


def test_the_next_incarnation_takes_the_place_of_the_last(renewals):
    renewals.heard(A, SEEN, SEEN, 0.0)
    renewals.heard(Address("a", 2), SEEN, (1, 6), 0.1)
    assert A not in renewals
    assert not renewals.heard(A, SEEN, (1, 6), 0.2), "a late beat of the last"
    renewals.lost(A)
    assert renewals.due(0.2) == [Renewed("a", 2, 100)]
    assert renewals.unknown(["a", "x"]) == [Address("a", 2)]
    renewals.lost(Address("a", 2))
    assert not renewals.due(0.2)
    assert not renewals.unknown(["a"])


class AnySequence(RuleBasedStateMachine):
    """Whatever comes in whatever order: who is renewed was heard in time, in its latest incarnation."""

    def __init__(self):
        super().__init__()
        self.renewals = Renewals(BEAT_S)
        self.now = 0.0
        self.beats = {}
        self.latest = {}

    @rule(passes_s=st.floats(0.0, 3.0))
    def time_passes(self, passes_s):
        self.now += passes_s

    @rule(name=st.sampled_from("abc"), epoch=st.integers(1, 3), version=st.integers(0, 4), current=st.integers(0, 4))
    def beat(self, name, epoch, version, current):
        told = self.renewals.heard(Address(name, epoch), (1, version), (1, current), self.now)
        if epoch < self.latest.get(name, 0):
            assert not told
            return
        before = self.beats.get(name) if self.latest.get(name) == epoch else None
        assert told == (before is not None and version < before[1])
        self.latest[name], self.beats[name] = epoch, (self.now, current)

    @rule(name=st.sampled_from("abc"), epoch=st.integers(1, 3))
    def link_ends(self, name, epoch):
        self.renewals.lost(Address(name, epoch))
        if self.latest.get(name) == epoch:
            del self.latest[name], self.beats[name]

    @invariant()
    def only_who_was_heard_is_renewed(self):
        due = {one.actor_id: one for one in self.renewals.due(self.now)}
        assert due.keys() == {name for name, (at, _) in self.beats.items() if self.now - at <= 3 * BEAT_S}
        for name, one in due.items():
            assert one.epoch == self.latest[name]
            assert abs((self.now - self.beats[name][0]) * 1000 - one.age_ms) < 1


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
