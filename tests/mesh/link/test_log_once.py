"""Which refusals are logged."""

from mesh.address import Address
from mesh.errors import FrameRefused
from mesh.link.refusals import LogOnce

PEER = Address("peer", 2)
NO_HELLO, BAD_BODY = FrameRefused("no_hello"), FrameRefused("bad_body")


def test_each_kind_is_new_once_for_an_actor_whatever_its_epoch():
    log_once = LogOnce()
    assert log_once.is_new(PEER, NO_HELLO, 0.0)
    assert not log_once.is_new(PEER, NO_HELLO, 0.0)
    assert not log_once.is_new(Address("peer", 3), NO_HELLO, 0.0)
    assert log_once.is_new(PEER, BAD_BODY, 0.0)
    assert log_once.is_new(Address("other", 2), NO_HELLO, 0.0)


def test_what_comes_late_is_not_worth_a_word_but_anything_else_is():
    log_once = LogOnce()
    log_once.link_ended(PEER)
    assert not log_once.is_new(PEER, NO_HELLO, 0.0)
    assert log_once.is_new(PEER, BAD_BODY, 0.0)
    assert not log_once.is_new(PEER, FrameRefused("wrong_epoch", known_epoch=7), 0.0), "so a successor is found"
    assert log_once.is_new(Address("peer", 3), NO_HELLO, 0.0), "another incarnation never had a link"


def test_both_memories_are_bounded():
    log_once = LogOnce()
    log_once.link_ended(PEER)
    for number in range(2000):
        log_once.link_ended(Address("many", number))
    assert log_once.is_new(PEER, NO_HELLO, 0.0), "the oldest is forgotten"
    assert not log_once.is_new(Address("many", 1999), NO_HELLO, 0.0)
    said = sum(log_once.is_new(Address(f"stranger-{number}", 1), BAD_BODY, 0.0) for number in range(2000))
    assert said == 64


def test_who_invents_ids_keeps_nobody_else_out_of_the_log():
    log_once = LogOnce()
    strangers = (Address(f"stranger-{number}", 1) for number in range(10_000))
    said = [log_once.is_new(stranger, BAD_BODY, second) for second, stranger in enumerate(strangers)]
    assert sum(said) < 64 + 10_000 / 60 + 1, "nor does it fill the log"
    assert log_once.is_new(PEER, NO_HELLO, 10_000.0), "of another kind"
    assert log_once.is_new(PEER, BAD_BODY, 10_060.0), "of the same, soon after it has stopped"
    assert not log_once.is_new(PEER, BAD_BODY, 10_120.0)
