"""Which refusals are warned of."""

from mesh.address import Address
from mesh.link.complaints import Complaints

PEER = Address("peer", 2)


def test_each_kind_is_new_once_for_an_actor_whatever_its_epoch():
    complaints = Complaints()
    assert complaints.is_new(PEER, "no_hello")
    assert not complaints.is_new(PEER, "no_hello")
    assert not complaints.is_new(Address("peer", 3), "no_hello")
    assert complaints.is_new(PEER, "bad_body")
    assert complaints.is_new(Address("other", 2), "no_hello")


def test_what_comes_late_is_not_worth_a_word_but_anything_else_is():
    complaints = Complaints()
    complaints.link_ended(PEER)
    assert not complaints.is_new(PEER, "no_hello")
    assert complaints.is_new(PEER, "bad_body")
    assert complaints.is_new(Address("peer", 3), "no_hello"), "another incarnation never had a link"


def test_both_memories_are_bounded():
    complaints = Complaints()
    complaints.link_ended(PEER)
    for number in range(2000):
        complaints.link_ended(Address("many", number))
    assert complaints.is_new(PEER, "no_hello"), "the oldest is forgotten"
    assert not complaints.is_new(Address("many", 1999), "no_hello")
    said = sum(complaints.is_new(Address(f"stranger-{number}", 1), "no_hello") for number in range(2000))
    assert said == 1023
