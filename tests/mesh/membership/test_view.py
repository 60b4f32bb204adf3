import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address, Endpoint
from mesh.membership.view import (
    DRAINING,
    READY,
    STARTING,
    LearningBootstrap,
    Member,
    MemberChange,
    Membership,
    StaticBootstrap,
)

HERE = Endpoint("c", "d")


def member(actor_id, epoch=1, role="worker", state=READY, **attributes):
    return Member(actor_id=actor_id, role=role, epoch=epoch, endpoint=HERE, state=state, attributes=attributes)


def ids(change):
    return tuple([str(m.address) for m in members] for members in change)


@pytest.fixture
def view():
    return Membership()


def test_snapshot_and_changes(view):
    assert ids(view.reset(1, 5, [member("b"), member("a")])) == (["a#1", "b#1"], [], [])
    assert [m.actor_id for m in view.all()] == ["a", "b"]
    assert ids(view.apply(1, 6, [member("a", state=DRAINING)], [])) == ([], [], ["a#1"])
    assert ids(view.apply(1, 7, [member("a", 2)], [])) == (["a#2"], ["a#1"], [])
    assert ids(view.apply(1, 8, [], [Address("b", 1)])) == ([], ["b#1"], [])
    assert ids(view.reset(2, 1, [member("a", 2), member("c")])) == (["c#1"], [], [])
    assert ids(view.reset(2, 2, [member("c")])) == ([], ["a#2"], [])
    assert (view.registry_epoch, view.version) == (2, 2)


def test_a_missed_change_is_seen_and_a_known_one_is_empty(view):
    view.reset(1, 5, [])
    assert view.apply(1, 7, [], []) is None
    assert view.apply(2, 6, [], []) is None
    assert view.apply(1, 9, [], [], 6) is None
    assert view.version == 5
    assert not view.apply(1, 5, [member("a")], [])
    assert view.get("a") is None


def test_an_old_incarnation_changes_nothing(view):
    view.reset(1, 1, [member("a", 3)])
    assert not view.apply(1, 2, [member("a", 2)], [])
    assert not view.apply(1, 3, [], [Address("a", 2)])
    assert not view.forget(Address("b", 1))
    assert view.get("a").epoch == 3
    assert ids(view.forget(Address("a", 3))) == ([], ["a#3"], [])


def test_roles_and_readiness(view):
    view.reset(1, 1, [member("b"), member("a"), member("c", state=STARTING), member("d", role="gateway")])
    assert [m.actor_id for m in view.by_role("worker")] == ["a", "b"]
    assert [m.actor_id for m in view.by_role("worker", ready=False)] == ["a", "b", "c"]
    assert ids(view.mark_draining(Address("a", 1))) == ([], [], ["a#1"])
    assert not view.mark_draining(Address("a", 1))
    assert not view.mark_draining(Address("b", 2))
    assert not view.mark_draining(Address("x", 2))
    assert [m.actor_id for m in view.by_role("worker")] == ["b"]


def test_a_static_bootstrap_is_always_the_same():
    assert StaticBootstrap(Address("r", 1), HERE).lookup() == (Address("r", 1), HERE)
    assert not MemberChange([], [], [])


class Told:
    target = None

    def lookup(self):
        return self.target


def test_what_a_registry_says_of_itself_stands_until_something_later_is_told():
    told, there = Told(), Endpoint("x", "y")
    bootstrap = LearningBootstrap(told)
    assert bootstrap.lookup() is None
    assert not bootstrap.learn(Address("r", 5)), "nobody was dialed"
    told.target = Address("r", 0), HERE
    assert not bootstrap.learn(Address("x", 5))
    for epoch, is_news in ((5, True), (5, False), (4, False), (6, True)):
        assert bootstrap.learn(Address("r", epoch)) == is_news
    assert bootstrap.lookup() == (Address("r", 6), HERE)
    for target in ((Address("r", 7), HERE), (Address("r", 2), there), None):
        told.target = target
        assert bootstrap.lookup() == target
    told.target = Address("r", 6), HERE
    assert bootstrap.lookup() == told.target


MEMBERS = st.builds(member, st.sampled_from("abc"), st.integers(1, 3), state=st.sampled_from([READY, DRAINING]))


@given(
    st.lists(
        st.tuples(
            st.lists(MEMBERS, max_size=3),
            st.lists(st.builds(Address, st.sampled_from("abc"), st.integers(1, 3)), max_size=2),
        ),
        max_size=20,
    )
)
def test_changes_told_add_up_to_the_view(updates):
    """Whoever follows only what `apply` returns knows the same members; epochs only grow until a member leaves."""
    view, followed = Membership(), {}
    view.reset(1, 0, [])
    for version, (upserted, left) in enumerate(updates, 1):
        change = view.apply(1, version, upserted, left)
        for gone in change.left:
            if followed.get(gone.actor_id) is not None and followed[gone.actor_id].epoch == gone.epoch:
                del followed[gone.actor_id]
        for m in change.joined + change.changed:
            assert m.actor_id not in followed or followed[m.actor_id].epoch <= m.epoch
            followed[m.actor_id] = m
        assert {m.actor_id: m.address for m in view.all()} == {k: m.address for k, m in followed.items()}
