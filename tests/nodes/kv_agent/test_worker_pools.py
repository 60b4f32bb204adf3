"""Pages that workers make: one maker at a time, offered only while it lives, a new table for each."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address
from nodes.kv_agent.worker_pools.core import (
    Confirm,
    CopiesEnded,
    MakeAsked,
    MakerLost,
    MakeTable,
    Offer,
    OfferAsked,
    Refuse,
    TableMade,
    TellTable,
    Withdraw,
    WorkerPools,
)

FIRST, SECOND = Address("worker-g", 1), Address("worker-g", 2)


def made() -> WorkerPools:
    """Pages of incarnation 10, offered by the first worker."""
    core = WorkerPools([("g", 5)])
    assert core.handle(MakeAsked(1, "g", FIRST)) == [MakeTable("g")]
    assert core.handle(TableMade("g", 10)) == [TellTable(1, "g")]
    assert not core.is_offered("g")
    assert core.handle(OfferAsked(2, "g", FIRST, 10, b"h")) == [Offer(2, "g", b"h")]
    assert core.is_offered("g")
    return core


def test_repeats_are_answered_like_the_first() -> None:
    core = made()
    assert "g" in core
    assert "h" not in core
    assert core.handle(MakeAsked(3, "g", FIRST)) == [TellTable(3, "g")]
    assert core.handle(OfferAsked(4, "g", FIRST, 10, b"h")) == [Confirm(4, "g")]


def test_what_dies_with_its_maker_is_withdrawn_and_copies_are_waited_for() -> None:
    core = made()
    assert core.handle(MakerLost(Address("worker-h", 9))) == []
    assert core.handle(MakerLost(FIRST)) == [Withdraw("g")]
    assert not core.is_offered("g")
    assert core.handle(MakeAsked(3, "g", SECOND)) == [], "a copy may still read what was opened"
    assert core.handle(CopiesEnded("g")) == [MakeTable("g")]
    assert core.handle(TableMade("g", 11)) == [TellTable(3, "g")]
    (refused,) = core.handle(OfferAsked(4, "g", SECOND, 10, b"old"))
    assert isinstance(refused, Refuse)
    assert core.handle(OfferAsked(5, "g", SECOND, 11, b"new")) == [Offer(5, "g", b"new")]


def test_a_successor_shows_that_the_maker_is_gone() -> None:
    core = made()
    assert core.handle(MakeAsked(3, "g", SECOND)) == [Withdraw("g")]
    assert core.handle(CopiesEnded("g")) == [MakeTable("g")]
    assert core.handle(TableMade("g", 11)) == [TellTable(3, "g")]
    assert [type(one) for one in core.handle(MakeAsked(4, "g", FIRST))] == [Refuse], "it does not know that it is over"
    assert [type(one) for one in core.handle(OfferAsked(5, "g", FIRST, 10, b"h"))] == [Refuse]
    assert core.handle(MakerLost(FIRST)) == [], "old news"


def test_one_that_never_offered_leaves_nothing_to_wait_for() -> None:
    core = WorkerPools([("g", 5)])
    core.handle(MakeAsked(1, "g", FIRST))
    core.handle(TableMade("g", 10))
    assert core.handle(MakerLost(FIRST)) == []
    assert core.handle(MakeAsked(2, "g", SECOND)) == [MakeTable("g")]


def test_the_last_who_asks_is_served_and_who_dies_before_is_not() -> None:
    core = made()
    core.handle(MakerLost(FIRST))
    assert core.handle(MakeAsked(3, "g", SECOND)) == [], "copies are waited for"
    third = Address("worker-g", 3)
    (refused,) = core.handle(MakeAsked(4, "g", third))
    assert isinstance(refused, Refuse)
    assert refused.call == 3
    assert core.handle(MakerLost(third)) == []
    assert core.handle(CopiesEnded("g")) == [], "nobody is left who wants pages"
    assert core.handle(MakeAsked(5, "g", Address("worker-g", 4))) == [MakeTable("g")]


@given(st.lists(st.tuples(st.sampled_from(["make", "offer", "lost", "copies"]), st.integers(1, 4)), max_size=40))
def test_pages_are_offered_only_of_the_one_that_made_the_present_table(events: list[tuple[str, int]]) -> None:
    core = WorkerPools([("g", 0)])
    table, copying = 0, False
    maker: int | None = None
    lost: set[int] = set()
    told: dict[int, int] = {}
    open_calls: dict[int, int] = {}

    def perform(commands: list[Any]) -> None:
        nonlocal table, copying, maker
        for command in commands:
            match command:
                case Withdraw():
                    copying, maker = True, None
                case MakeTable():
                    assert not copying, "somebody copies from what it takes the place of"
                    table += 1
                    perform(core.handle(TableMade("g", table)))
                case TellTable():
                    told[open_calls.pop(command.call)] = table
                case Offer():
                    maker = open_calls.pop(command.call)
                    assert told[maker] == table
                    assert maker not in lost
                case Confirm():
                    assert open_calls.pop(command.call) == maker
                case Refuse():
                    del open_calls[command.call]

    for number, (what, epoch) in enumerate(events):
        worker = Address("worker-g", epoch)
        if what in ("make", "offer") and epoch not in lost:
            open_calls[number] = epoch
            asked = MakeAsked(number, "g", worker)
            offered = OfferAsked(number, "g", worker, told.get(epoch, -1), b"")
            perform(core.handle(asked if what == "make" else offered))
        elif what == "lost":
            lost |= set(range(1, epoch + 1))
            open_calls = {call: one for call, one in open_calls.items() if one not in lost}
            perform(core.handle(MakerLost(worker)))
        elif what == "copies" and copying:
            copying = False
            perform(core.handle(CopiesEnded("g")))
        assert core.is_offered("g") == (maker is not None)
        assert maker is None or maker not in lost
    assert all(one not in lost for one in open_calls.values())
    assert len(open_calls) <= 1, "one waits at most, and is answered when copies have ended"
