from hypothesis import given
from hypothesis import strategies as st

from mesh.link.sequence import DUPLICATE, OTHER_CONNECTION, IncomingSequence, OutgoingSequence, connection_of


@given(st.lists(st.sampled_from(["send", "drop", "repeat", "late", "reconnect"]), max_size=60), st.booleans())
def test_repeats_and_gaps_are_seen(events, is_told):
    """Each message is accepted at most once, in order; the gaps reported are what was dropped on that connection.

    `is_told`: the receiver knows the connection's number before its first message, as from a hello.
    """
    connection, out, incoming = 1, OutgoingSequence(1), IncomingSequence(1 if is_told else 0)
    accepted, dropped = [], 0
    for event in events:
        if event == "reconnect":
            connection += 1
            out, incoming, dropped = OutgoingSequence(connection), IncomingSequence(connection), 0
            is_told = True
        elif event == "drop":
            out.take()
            dropped += 1
        elif event == "send":
            number = out.take()
            knows = is_told or bool(accepted)
            assert incoming.accept(number) == (dropped if knows else 0)
            assert connection_of(number) == connection
            dropped = 0
            accepted.append(number)
        elif accepted:
            assert incoming.accept(accepted[-1 if event == "repeat" else 0]) == DUPLICATE
    assert accepted == sorted(set(accepted))


def test_another_connection_needs_a_hello_first():
    incoming = IncomingSequence(3)
    assert incoming.accept((4 << 32) + 1) == OTHER_CONNECTION
    assert incoming.accept((3 << 32) + 1) == 0
    assert incoming.accept((2 << 32) + 9) == DUPLICATE


def test_a_number_can_be_given_back():
    out = OutgoingSequence(3)
    first = out.take()
    out.give_back()
    assert out.take() == first == (3 << 32) + 1


def test_zero_is_nobodys_number():
    assert IncomingSequence().accept(0) == DUPLICATE
