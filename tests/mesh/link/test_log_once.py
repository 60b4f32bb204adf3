"""Which refusals are logged."""

from mesh.address import Address
from mesh.link.refusals import LogOnce

PEER = Address("peer", 2)


def test_each_kind_is_new_once_for_an_actor_whatever_its_epoch():
    log_once = LogOnce()
    assert log_once.is_new(PEER, "no_hello")
    assert not log_once.is_new(PEER, "no_hello")
    assert not log_once.is_new(Address("peer", 3), "no_hello")
    assert log_once.is_new(PEER, "bad_body")
    assert log_once.is_new(Address("other", 2), "no_hello")


def test_what_comes_late_is_not_worth_a_word_but_anything_else_is():
    log_once = LogOnce()
    log_once.link_ended(PEER)
    assert not log_once.is_new(PEER, "no_hello")
    assert log_once.is_new(PEER, "bad_body")
    assert log_once.is_new(Address("peer", 3), "no_hello"), "another incarnation never had a link"


def test_both_memories_are_bounded():
    log_once = LogOnce()
    log_once.link_ended(PEER)
    for number in range(2000):
        log_once.link_ended(Address("many", number))
    assert log_once.is_new(PEER, "no_hello"), "the oldest is forgotten"
    assert not log_once.is_new(Address("many", 1999), "no_hello")
    said = sum(log_once.is_new(Address(f"stranger-{number}", 1), "no_hello") for number in range(2000))
    assert said == 1023
