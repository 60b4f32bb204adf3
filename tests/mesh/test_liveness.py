from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address
from mesh.membership.liveness import LivenessMonitor

A, B = Address("a", 1), Address("b", 1)


def test_silence_is_suspected_after_the_allowed_misses():
    monitor = LivenessMonitor(0.5, 3)
    monitor.watch(A, 0.0)
    monitor.watch(B, 0.0)
    lost = []
    for tick in range(1, 9):
        now = tick * 0.5
        monitor.heard(B, now)
        lost += [(now, peer) for peer in monitor.tick(now)]
    assert lost == [(2.0, A)]


def test_who_overslept_forgives():
    monitor = LivenessMonitor(0.5, 3)
    monitor.watch(A, 0.0)
    assert monitor.tick(0.5) == []
    assert monitor.tick(60.0) == []
    assert monitor.num_overslept == 1
    assert monitor.tick(60.5) == []
    assert monitor.tick(61.0) == []
    assert monitor.tick(61.5) == []
    assert monitor.tick(62.0) == [A]


def test_only_who_is_watched_is_missed():
    monitor = LivenessMonitor(0.5, 1)
    monitor.heard(A, 0.0)
    monitor.watch(B, 0.0)
    monitor.watch(B, 5.0)
    monitor.forget(B)
    monitor.forget(A)
    assert [monitor.tick(now) for now in (1.0, 1.5, 2.0)] == [[], [], []]


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["watch", "heard", "forget"]), st.sampled_from([A, B])),
    # Exact in binary: sums of others would differ from themselves in the last bit, just where limits are compared.
    st.tuples(st.just("tick"), st.sampled_from([0.5, 0.875, 1.0, 30.0])),
)


@given(st.lists(EVENTS, max_size=60))
def test_exactly_the_silent_are_suspected_and_only_by_who_was_awake(events):
    monitor = LivenessMonitor(0.5, 3)
    heard, now, was_ticked = {}, 0.0, False
    for kind, what in events:
        if kind == "tick":
            now += what
            suspected = monitor.tick(now)
            if was_ticked and what > 1.0:
                assert suspected == []
                heard = dict.fromkeys(heard, now)
            else:
                assert suspected == sorted(peer for peer, at in heard.items() if now - at > 1.5)
                heard = {peer: at for peer, at in heard.items() if peer not in suspected}
            was_ticked = True
        elif kind == "forget":
            monitor.forget(what)
            heard.pop(what, None)
        elif kind == "watch":
            monitor.watch(what, now)
            heard.setdefault(what, now)
        else:
            monitor.heard(what, now)
            if what in heard:
                heard[what] = now
