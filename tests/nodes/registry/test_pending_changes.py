"""Changes that are told as one say what they say one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address, Endpoint
from mesh.membership.view import Member, Membership
from mesh.wire.frames import Departed, MembersChanged
from nodes.registry.pending_changes import PendingChanges

IDS = st.sampled_from(["a", "b", "c"])
EPOCHS = st.integers(1, 3)
STATES = st.sampled_from(["starting", "ready", "gone"])


def member(actor_id: str, epoch: int, state: str) -> Member:
    return Member(actor_id=actor_id, role="r", epoch=epoch, endpoint=Endpoint("c", "d"), state=state)


def apply(view: Membership, change: MembersChanged):
    left = [one.address for one in change.left]
    return view.apply(change.registry_epoch, change.version, change.upserted, left, change.follows)


@given(st.lists(st.tuples(IDS, EPOCHS, STATES), max_size=12), st.integers(0, 12))
def test_one_change_does_what_several_do(words, num_known):
    pending, one_by_one, at_once = PendingChanges(1), Membership(), Membership()
    # The registry's own rule: an incarnation that a later one has replaced never comes again.
    newest: dict[str, int] = {}
    for view in (one_by_one, at_once):
        view.reset(1, 1, [member("c", 1, "ready")])
    for version, (actor_id, epoch, state) in enumerate(words, 2):
        epoch = newest[actor_id] = max(epoch, newest.get(actor_id, 0))
        left = [Departed(actor_id=actor_id, epoch=epoch)] if state == "gone" else []
        upserted = [] if left else [member(actor_id, epoch, state)]
        change = MembersChanged(registry_epoch=1, version=version, upserted=upserted, left=left)
        pending.add(change)
        assert apply(one_by_one, change) is not None
        # Who has had some of them already is told all the same.
        if version - 2 < num_known:
            assert apply(at_once, change) is not None
    merged = pending.take()
    if not words:
        assert merged is None
        return
    assert merged.follows == 1
    assert apply(at_once, merged) is not None
    assert at_once.all() == one_by_one.all()
    assert at_once.version == one_by_one.version == pending.version
    assert pending.take() is None


def test_who_comes_again_at_once_has_not_left():
    pending = PendingChanges(4)
    pending.add(MembersChanged(registry_epoch=1, version=5, left=[Departed(actor_id="a", epoch=1)]))
    pending.add(MembersChanged(registry_epoch=1, version=6, upserted=[member("a", 1, "ready")]))
    merged = pending.take()
    assert merged == MembersChanged(registry_epoch=1, version=6, upserted=[member("a", 1, "ready")], follows=4)
    assert Address("a", 1) not in [one.address for one in merged.left]
