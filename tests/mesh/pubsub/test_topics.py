from hypothesis import given
from hypothesis import strategies as st

from mesh.pubsub.topics import Arrival, Subscription, TopicLog


def test_replay_is_what_the_ring_holds():
    log = TopicLog(3, 1000)
    assert log.replay(1) == (1, False, [])
    for payload in "abcde":
        log.append(payload)
    assert log.last == 5
    assert log.replay(6) == (6, False, [])
    assert log.replay(4) == (4, False, ["d", "e"])
    assert log.replay(3) == (3, False, ["c", "d", "e"])
    assert log.replay(2) == (6, True, [])
    assert log.replay(7) == (6, True, [])
    assert log.replay(0) == (6, True, [])


def test_the_ring_is_bounded_by_bytes_too():
    log = TopicLog(100, 10)
    for payload in ("aaaa", "bbbb", "cc"):
        log.append(payload)
    assert (log.num_bytes, log.replay(1).payloads) == (10, ["aaaa", "bbbb", "cc"])
    log.append("d")
    assert (log.num_bytes, log.replay(1).reset, log.replay(2).payloads) == (7, True, ["bbbb", "cc", "d"])
    log.append("e" * 11)
    assert (log.num_bytes, log.replay(5)) == (0, (6, True, []))
    log.append("f")
    assert log.replay(6) == (6, False, ["f"])


@given(st.lists(st.sampled_from(["publish", "lose", "repeat", "renew", "restart"]), max_size=80), st.integers(1, 6))
def test_a_subscriber_misses_nothing_that_the_ring_holds(events, capacity):
    """Between resets everything is delivered in order, exactly once; what was lost comes again by replay."""
    epoch, log = 1, TopicLog(capacity, 10_000)
    subscription, delivered, last = Subscription(), [], None

    def subscribe():
        asked_epoch, sequence = subscription.request(epoch)
        replay = log.replay(sequence if asked_epoch == epoch else 1)
        if subscription.confirmed(epoch, replay.first, replay.reset):
            delivered.clear()
        for offset, payload in enumerate(replay.payloads):
            arrive(replay.first + offset, payload)

    def arrive(sequence, payload):
        match subscription.arrived(epoch, sequence):
            case Arrival.NEXT:
                delivered.append((epoch, sequence, payload))
            case Arrival.GAP:
                subscribe()

    subscribe()
    for event in events:
        if event in ("publish", "lose"):
            last = (log.append(f"{epoch}/{log.last + 1}"), f"{epoch}/{log.last}")
            if event == "publish":
                arrive(*last)
        elif event == "repeat" and last is not None:
            arrive(*last)
        elif event == "renew":
            subscribe()
        elif event == "restart":
            epoch, log, last = epoch + 1, TopicLog(capacity, 10_000), None
            subscribe()
    subscribe()
    sequences = [sequence for _, sequence, _ in delivered]
    assert all(e == epoch for e, _, _ in delivered)
    assert all(payload == f"{e}/{s}" for e, s, payload in delivered)
    if sequences:
        assert sequences == list(range(sequences[0], log.last + 1))
    assert subscription.next_sequence == log.last + 1


def test_nothing_is_delivered_while_waiting_or_from_another_epoch():
    subscription = Subscription()
    assert subscription.arrived(1, 1) is Arrival.REPEAT
    assert subscription.request(1) == (1, 1)
    assert subscription.confirmed(1, 1, False)
    assert subscription.arrived(2, 1) is Arrival.REPEAT
    assert subscription.arrived(1, 1) is Arrival.NEXT
    assert subscription.request(1) == (1, 2)
    assert not subscription.confirmed(1, 2, False)
    assert subscription.arrived(1, 4) is Arrival.GAP
    assert subscription.request(2) == (2, 1)
