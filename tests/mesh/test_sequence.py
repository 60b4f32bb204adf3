from hypothesis import given
from hypothesis import strategies as st

from mesh.sequence import DUPLICATE, IncomingSequence, OutgoingSequence


@given(st.lists(st.sampled_from(["send", "drop", "repeat", "late", "reconnect"]), max_size=60))
def test_repeats_and_gaps_are_seen(events):
    """Each message is accepted at most once, in order; the gaps reported are what was dropped on that connection."""
    connection, out, incoming = 1, OutgoingSequence(1), IncomingSequence()
    accepted, sent, dropped, missing = [], [], 0, 0
    for event in events:
        if event == "reconnect":
            connection += 1
            out, dropped = OutgoingSequence(connection), 0
        elif event == "drop":
            out.take()
            dropped += 1
        elif event == "send":
            number = out.take()
            gap = incoming.accept(number)
            assert gap >= 0
            same_connection = bool(accepted) and accepted[-1] >> 32 == number >> 32
            assert gap == (dropped if same_connection else 0)
            missing += gap
            dropped = 0
            accepted.append(number)
            sent.append(number)
        elif sent:
            number = sent[-1] if event == "repeat" else sent[0]
            assert incoming.accept(number) == DUPLICATE
    assert accepted == sorted(set(accepted))


def test_a_number_can_be_given_back():
    out = OutgoingSequence(3)
    first = out.take()
    out.give_back()
    assert out.take() == first == (3 << 32) + 1


def test_zero_is_nobodys_number():
    assert IncomingSequence().accept(0) == DUPLICATE
