from mesh.address import Address
from mesh.liveness import LivenessMonitor

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
