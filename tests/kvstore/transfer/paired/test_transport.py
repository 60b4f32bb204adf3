"""The transport between two agents: their halves of it, over fake links and a courier that the test runs."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PagesElsewhere, TransferError
from kvstore.protocol import OfferPair, PagesSent, SendPages
from kvstore.transfer.base import SourcePages, Transfer, Transport
from kvstore.transfer.paired.link import Broken
from kvstore.transfer.paired.orders import Paired, RemotePeer
from kvstore.transfer.paired.transport import PairTransport
from kvstore.transfer.plan import Descriptor
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import CopyEnded
from tests.kvstore.fake_links import FakeLinks, FakeWire
from tests.kvstore.transfer.transfers import (
    DEVICE,
    LAYOUT,
    NEVER,
    NUM_PAGES,
    SIZE,
    Judge,
    Mail,
    World,
    make_pool,
    start_copy,
)


class Agent(Mail):
    """One agent's host, devices and transport."""

    def __init__(self, world: "PairWorld", name: str, group: str) -> None:
        super().__init__(world, name, None)
        self.pool = make_pool(self.host, group, DEVICE)
        self.bytes = self.bytes_of(self.pool)
        self.links = FakeLinks(world.wire, self.memory)
        self.inbox = self.transport = PairTransport(self.links, self, init_timeout_s=5.0)
        self.transport.register(self.pool)

    def attach(self, transport: Paired) -> None:
        assert transport.name == "nccl"


class PairWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.wire = FakeWire()
        self.near, self.far = Agent(self, "near", "d"), Agent(self, "far", "p")
        self.far.bytes[:] = random.Random(1).randbytes(len(self.far.bytes))
        self.peer = self.near.transport.connect(self.far.handle())

    def send(self, pages: list[int], deadline: float = NEVER, generations: list[int] | None = None) -> Transfer:
        """Pull `pages` into those at the other end of the pool."""
        parts = [Descriptor((NUM_PAGES - page) * SIZE, page * SIZE, SIZE) for page in pages]
        announced = SourcePages(pages, generations or [100 + page for page in pages])
        transfer = Transfer(self.near.pool, self.peer, parts, deadline, announced)
        self.near.transport.post(transfer)
        return transfer

    def has_arrived(self, pages: list[int]) -> bool:
        return all(
            self.near.bytes[(NUM_PAGES - page) * SIZE :][:SIZE] == self.far.bytes[page * SIZE :][:SIZE]
            for page in pages
        )


@pytest.fixture
def world() -> PairWorld:
    return PairWorld()


@pytest.fixture
def sending(world: PairWorld) -> Transfer:
    """A transfer of page 1 whose bytes are on the wire, and stay there."""
    world.wire.is_slow = True
    transfer = world.send([1])
    assert world.settle() == {}
    return transfer


def test_it_is_a_transport(world: PairWorld) -> None:
    transport: Transport = world.near.transport
    assert (transport.name, transport.kinds) == ("nccl", {"cuda"})
    assert world.peer.generations([1]) is None
    transport.close()


def test_pages_arrive_and_one_communicator_serves_many_transfers(world: PairWorld) -> None:
    first, second = world.send([1, 2]), world.send([5])
    assert world.settle() == {first: "", second: ""}
    assert world.has_arrived([1, 2, 5])
    assert world.end_of(world.send([7])) == ""
    assert world.wire.num_ids == 1
    assert (world.near.transport.num_posted, world.far.transport.num_posted) == (0, 0)


def test_both_ways_are_two_communicators(world: PairWorld) -> None:
    world.near.bytes[:SIZE] = b"n" * SIZE
    back = world.far.transport.connect(world.near.handle("d"))
    source = SourcePages([], [])
    world.far.transport.post(Transfer(world.far.pool, back, [Descriptor(SIZE, 0, SIZE)], NEVER, source))
    handle = world.send([3])
    assert world.settle() == {handle: ""}
    assert world.far.bytes[SIZE : 2 * SIZE] == b"n" * SIZE
    assert world.wire.num_ids == 2


def test_a_page_that_moved_on_before_it_was_sent_takes_the_pair_with_it(world: PairWorld) -> None:
    stale, behind = world.send([1], generations=[999]), world.send([2])
    assert world.settle() == {stale: "stale_pages", behind: "pair_aborted"}
    assert world.end_of(world.send([2])) == ""
    assert world.wire.num_ids == 2, "the next transfer makes another"


def test_a_page_that_moves_on_while_it_is_sent_fails_the_transfer_only(world: PairWorld) -> None:
    world.wire.is_slow = True
    handle, behind = world.send([1]), world.send([2])
    assert world.settle() == {}
    world.far.pool.table().write(1, PageEntry(PageState.RUNNING, generation=999))
    world.wire.step()
    assert world.settle() == {handle: "stale_pages"}
    world.wire.run()
    assert world.settle() == {behind: ""}
    assert world.wire.num_ids == 1


def test_a_communicator_that_does_not_come_about_in_time(world: PairWorld) -> None:
    world.wire.is_deaf = True
    handle = world.send([1])
    assert world.settle() == {}
    world.now = 5.0
    [late] = world.near.transport.poll(5.0)
    assert late.error is not None
    assert (late, late.error.code) == (handle, "deadline_exceeded")
    assert world.settle() == {}
    assert world.far.transport.num_posted == 0, "the other end has given up, too"


def test_a_transfer_that_does_not_end_is_over_when_the_engine_has_stopped(world: PairWorld) -> None:
    world.wire.is_slow = world.wire.is_stuck = True
    handle = world.send([1], deadline=3.0)
    world.settle()
    world.now = 3.0
    assert world.settle() == {}, "its kernel may still write"
    assert world.near.transport.num_posted == 1
    for link in world.wire.links:
        link.stop()
    assert world.settle() == {handle: "deadline_exceeded"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"group": "x"}, "unknown_group"),
        ({"incarnation": 2}, "source_changed"),
        ({"layout": msgspec.structs.replace(LAYOUT, fingerprint="other")}, "layout_mismatch"),
    ],
)
def test_a_pool_that_is_another_one_is_refused(world: PairWorld, change: dict, code: str) -> None:
    world.peer = world.near.transport.connect(msgspec.structs.replace(world.far.handle(), **change))
    handle = world.send([1])
    assert world.settle() == {handle: code}


def test_a_host_without_nccl(world: PairWorld) -> None:
    world.far.links.is_missing = True
    assert world.end_of(world.send([1])) == "device_unavailable"
    world.near.links.is_missing = True
    with pytest.raises(TransferError, match="finds no NCCL"):
        world.send([1])


def test_what_cannot_be_posted_or_reached(world: PairWorld) -> None:
    transport, source = world.near.transport, SourcePages([1], [101])
    for parts in ([Descriptor(0, 0, 0)], [Descriptor(-1, 0, 4)], [Descriptor(0, NUM_PAGES * SIZE - 3, 4)]):
        with pytest.raises(TransferError, match="outside the pools"):
            transport.post(Transfer(world.near.pool, world.peer, parts, NEVER, source))
    with pytest.raises(TransferError, match="only reads announced pages"):
        transport.post(Transfer(world.near.pool, world.peer, [], NEVER))
    host_handle = msgspec.structs.replace(world.far.handle(), device="cpu")
    with pytest.raises(PagesElsewhere):
        transport.connect(host_handle)
    info = msgspec.structs.replace(world.near.pool.info, device="cpu", ipc_handle=b"")
    with pytest.raises(PagesElsewhere):
        transport.register(world.near.host.create("kv-h", info))
    assert world.wire.num_ids == 0


def test_there_is_a_bound_on_communicators(world: PairWorld) -> None:
    for number in range(64):
        offer = OfferPair(f"p{number}", b"%d" % number, "p", 1, LAYOUT.digest, timeout_s=9.0)
        for _ in range(2):
            world.far.transport.take_offer("near", offer)
    assert world.end_of(world.send([1])) == "too_many_pairs"


@pytest.mark.parametrize(
    "order",
    [
        {"pair": "nobody's"},
        {"offsets": [0, 1]},
        {"offsets": [-1]},
        {"sizes": [NUM_PAGES * SIZE + 1]},
        {"pages": [99], "generations": [1]},
        {"incarnation": 7},
        {"offsets": [0] * 65537, "sizes": [4] * 65537},
    ],
)
def test_orders_that_cannot_be_carried_out_are_answered(world: PairWorld, order: dict) -> None:
    world.send([1])
    world.deliver(1)
    (name,) = world.near.offered
    answers: list[PagesSent] = []
    asked = {"offsets": [0], "sizes": [4], "pages": [1], "generations": [101]}
    sound = SendPages(pair=name, number=9, group="p", incarnation=1, timeout_s=9.0, **asked)
    world.far.transport.take_order("near", msgspec.structs.replace(sound, **order), answers.append)
    world.far.transport.take_order("a stranger", sound, answers.append)
    assert [(answer.is_sent, bool(answer.code)) for answer in answers] == [(False, True)] * 2


def test_a_pool_that_is_withdrawn_or_made_again_is_not_sent_from(world: PairWorld) -> None:
    world.wire.is_slow = True
    running, behind = world.send([1]), world.send([2])
    assert world.settle() == {}
    assert world.far.transport.is_sending("p")
    world.far.transport.withdraw("p")
    assert world.far.transport.is_sending("p")
    world.wire.run()
    # The word after the copy cannot be had any more, so it is not given.
    assert world.settle() == {running: "unknown_group", behind: "unknown_group"}
    assert not world.far.transport.is_sending("p")
    info = msgspec.structs.replace(world.far.pool.info, incarnation=2, ipc_handle=b"")
    again = world.far.host.create("kv-p-again", info)
    again.table().write(1, PageEntry(PageState.RUNNING, generation=101))
    world.far.transport.register(again)
    assert world.end_of(world.send([1])) == "source_changed"
    world.peer = world.near.transport.connect(msgspec.structs.replace(world.far.handle(), incarnation=2))
    world.wire.is_slow = False
    assert world.end_of(world.send([1])) == ""


def test_a_device_that_fails_is_the_failure_of_the_agent_that_has_it(world: PairWorld, sending: Transfer) -> None:
    """The other end gives the transfer up, and does not take the device for its own."""
    world.wire.links[1].found.append(Broken("an illegal address", "device_fault"))
    ended = world.settle()
    assert world.far.transport.device_failure == "an illegal address"
    assert list(ended) == [sending]
    assert ended[sending] not in ("", "device_fault")
    assert world.near.transport.device_failure == ""


@pytest.mark.parametrize("way", ["answer", "pair"])
def test_another_ends_device_fault_is_a_source_that_failed(world: PairWorld, sending: Transfer, way: str) -> None:
    (name,) = world.near.offered
    if way == "answer":
        refusal = PagesSent(pair=name, number=1, is_sent=False, code="device_fault", message="theirs")
        world.near.transport.sent(refusal)
    else:
        world.near.transport.pair_failed(name, "device_fault", "theirs")
    world.wire.run()
    assert world.settle() == {sending: "source_failed"}
    assert world.near.transport.device_failure == ""


def test_a_lost_agent_ends_its_transfers(world: PairWorld, sending: Transfer) -> None:
    world.near.transport.agent_lost("far")
    world.far.transport.agent_lost("near")
    assert world.settle() == {sending: "source_lost"}
    assert world.far.transport.num_posted == 0


def test_draining_aborts_what_runs(world: PairWorld, sending: Transfer) -> None:
    waiting = world.send([2])
    world.settle()
    ended = world.near.transport.drain()
    assert {one: one.error and one.error.code for one in ended} == {sending: "cancelled", waiting: "cancelled"}


def test_a_pulled_copy_is_compared_at_both_ends(world: PairWorld) -> None:
    puller = PagePuller(world.near.transport)
    puller.add("d", [world.near.pool])

    def pumped() -> list[CopyEnded]:
        ended: list[CopyEnded] = []
        for _ in range(5):
            world.deliver()
            world.far.transport.poll(0.0)
            ended += [one.event for one in puller.pump(0.0)]
        return ended

    assert puller.start("grant", start_copy(pages=(2, 3), targets=(4, 5)), "d", [world.peer]) is None
    world.wire.is_slow = True
    assert pumped() == []
    world.near.pool.table().write(5, PageEntry(PageState.RUNNING, generation=999))
    world.wire.run()
    (ended,) = pumped()
    assert ended.code == "stale_pages"
    assert "destination page 5" in ended.message
    assert isinstance(world.peer, RemotePeer)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.lists(st.integers(1, NUM_PAGES - 1), min_size=1, max_size=3, unique=True)),
        st.tuples(st.just("poll"), st.floats(0, 2)),
        st.tuples(st.just("deliver"), st.integers(1, 3)),
        st.tuples(st.just("lose"), st.none()),
        st.tuples(st.just("move"), st.none()),
        st.tuples(st.just("cancel"), st.integers(1, 6)),
        st.tuples(st.just("stale"), st.integers(1, NUM_PAGES - 1)),
        st.tuples(st.just("agent lost"), st.none()),
        st.tuples(st.just("disconnect"), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, is_stuck=st.booleans(), ends=st.sampled_from(["polls", "drain"]))
def test_every_transfer_ends_once_and_writes_nothing_afterwards(steps, is_stuck: bool, ends: str) -> None:
    world = PairWorld()
    world.wire.is_slow, world.wire.is_stuck = True, is_stuck
    judge = Judge(
        lambda page: bytes(world.near.bytes[(NUM_PAGES - page) * SIZE :][:SIZE]),
        lambda page: bytes(world.far.bytes[page * SIZE :][:SIZE]),
    )
    for what, value in steps:
        if what == "post" and (pages := judge.free(value)):
            judge.targets[world.send(pages, deadline=world.now + 6.0)] = pages
        elif what == "poll":
            world.now += value
            judge.take(world.poll())
        elif what == "deliver":
            world.deliver(value)
        elif what == "lose" and world.post:
            world.post.popleft()[1]()
        elif what == "move":
            world.wire.step()
        elif what == "cancel":
            for transfer in judge.cancelled(value):
                world.near.transport.cancel(transfer)
        elif what == "stale":
            world.far.pool.table().write(value, PageEntry(PageState.RUNNING, generation=999))
        elif what == "agent lost":
            world.near.transport.agent_lost("far")
        elif what == "disconnect":
            world.near.transport.disconnect(world.peer)
            world.peer = world.near.transport.connect(world.far.handle())
        judge.check()
    if ends == "drain":
        judge.take(world.near.transport.drain())
    else:
        world.now += 100.0
        for _ in range(30):
            judge.take(world.poll())
            world.deliver()
            for link in world.wire.links:
                if (link.is_aborted and link.waiting) or (link.is_aborted and is_stuck):
                    link.stop()
            judge.take(world.poll())
    assert judge.ended == judge.targets.keys()
    assert world.near.transport.num_posted == 0
