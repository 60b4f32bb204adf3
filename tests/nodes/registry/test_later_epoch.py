"""When a registry is over by the word of those who knew a later one."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.address import MAX_EPOCH, MAX_HEARD_EPOCH
from nodes.registry.later_epoch import LaterEpoch

LEASE = 5.0
HOSTS = st.sets(st.sampled_from("bcdefg"))


def says(later, host, joined, now=LEASE, epoch=9):
    return later.is_believed(epoch, f"x.{host}", "head", [f"y.{one}" for one in joined], now)


@given(HOSTS, HOSTS, st.permutations("bcdefg"))
def test_those_that_say_so_have_to_be_more_than_those_that_have_joined(sayers, joined, order):
    later = LaterEpoch(0.0, LEASE)
    believed = [says(later, host, {*joined, "head"}) for host in order if host in sayers]
    assert any(believed) == (len(sayers) > len(joined - sayers))


def test_one_host_never_ends_what_others_have_joined_however_often_it_says_so():
    later = LaterEpoch(0.0, LEASE)
    assert not any(says(later, "d", "e", now) for now in range(100))
    # Not even before the others have had the time to join.
    assert not says(LaterEpoch(0.0, LEASE), "d", "", 0.9 * LEASE)


def test_who_is_of_the_registrys_own_host_is_believed_at_once():
    for name in ("x.head", "x"):
        assert LaterEpoch(0.0, LEASE).is_believed(9, name, "head", ["y.d", "y.e"], 0.0)


def test_no_epoch_is_believed_that_the_next_registry_could_not_go_above():
    later = LaterEpoch(0.0, LEASE)
    for epoch in (MAX_HEARD_EPOCH + 1, MAX_EPOCH, 1 << 63):
        assert not says(later, "d", "", epoch=epoch)
        assert not later.is_believed(epoch, "x.head", "head", [], LEASE)
    assert says(later, "d", "", epoch=MAX_HEARD_EPOCH)
