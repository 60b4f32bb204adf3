"""Which refusals are logged."""

from mesh.address import Address
from mesh.errors import FrameRefused
from mesh.link.refusals import LogOnce

PEER = Address("peer", 2)
NO_HELLO, BAD_BODY = FrameRefused("no_hello"), FrameRefused("bad_body")


def test_each_kind_is_new_once_for_an_actor_whatever_its_epoch():
    log_once = LogOnce()
    assert log_once.is_new(PEER, NO_HELLO)
    assert not log_once.is_new(PEER, NO_HELLO)
    assert not log_once.is_new(Address("peer", 3), NO_HELLO)
    assert log_once.is_new(PEER, BAD_BODY)
    assert log_once.is_new(Address("other", 2), NO_HELLO)


def test_what_comes_late_is_not_worth_a_word_but_anything_else_is():
    log_once = LogOnce()
    log_once.link_ended(PEER)
    assert not log_once.is_new(PEER, NO_HELLO)
    assert log_once.is_new(PEER, BAD_BODY)
    assert not log_once.is_new(PEER, FrameRefused("wrong_epoch", known_epoch=7)), "so a successor is found"
    assert log_once.is_new(Address("peer", 3), NO_HELLO), "another incarnation never had a link"


def test_both_memories_are_bounded():
    log_once = LogOnce()
    log_once.link_ended(PEER)
    for number in range(2000):
        log_once.link_ended(Address("many", number))
    assert log_once.is_new(PEER, NO_HELLO), "the oldest is forgotten"
    assert not log_once.is_new(Address("many", 1999), NO_HELLO)
    said = sum(log_once.is_new(Address(f"stranger-{number}", 1), NO_HELLO) for number in range(2000))
    assert said == 1023
