"""The transport between pools on devices, over a fake device whose copies run when the test lets them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import DeviceHandleInvalid, DeviceUnavailable
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import HeapHost, MemoryHost
from kvstore.transfer.base import Transfer
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.plan import Descriptor
from tests.kvstore.fake_devices import FakeCards, Process
from tests.kvstore.transfer.mapped.pairs import DevicePair
from tests.kvstore.transfer.transfers import (
    DEVICE,
    NEVER,
    NUM_PAGES,
    SIZE,
    Judge,
    make_pool,
)


def scattered(*pages: int) -> list[Descriptor]:
    """Pages that no copy can take together."""
    return [Descriptor(page * SIZE, (NUM_PAGES - page) * SIZE, SIZE) for page in pages]


@pytest.fixture
def pair(tables: MemoryHost) -> DevicePair:
    return DevicePair(tables)


@pytest.fixture
def held(tables: MemoryHost) -> DevicePair:
    """Its copies are done when the test says so."""
    return DevicePair(tables, copies_per_look=0)


@pytest.mark.parametrize("is_same", [False, True], ids=["of two agents", "of one agent"])
def test_pages_arrive(tables: MemoryHost, is_same: bool) -> None:
    pair = DevicePair(tables, is_same=is_same)
    assert pair.here.memory.num_open == (0 if is_same else 1)
    handle = pair.post([Descriptor(SIZE, 2 * SIZE, 3 * SIZE), Descriptor(5 * SIZE, 6 * SIZE, 10)])
    assert pair.codes() == {handle: ""}
    assert handle.num_bytes == 3 * SIZE + 10
    assert all(pair.has_copied(page, page - 1) for page in (2, 3, 4))
    assert pair.to_bytes[5 * SIZE : 5 * SIZE + 10] == pair.from_bytes[6 * SIZE : 6 * SIZE + 10]
    assert not any(pair.to_bytes[:SIZE])
    assert not any(pair.to_bytes[5 * SIZE + 10 :])
    assert pair.transport.num_posted == 0
    pair.transport.close()
    assert pair.here.memory.num_open == 0


def test_a_poll_begins_a_bounded_number_of_copies_and_transfers_take_turns(tables: MemoryHost) -> None:
    pair = DevicePair(tables, copies_per_poll=2, copies_per_look=0)
    long, short = pair.post(scattered(1, 2, 3)), pair.post(scattered(5))
    stream_counts: list[int] = []
    for _ in range(3):
        assert pair.transport.poll(0.0) == []
        stream_counts.append(pair.cards.num_waiting)
    assert stream_counts == [2, 4, 4]
    pair.cards.run(2)
    assert pair.codes() == {}
    pair.cards.run()
    assert pair.codes() == {long: "", short: ""}


def test_a_poll_never_waits_and_says_when_to_come_again(held: DevicePair) -> None:
    handle = held.post(scattered(1))
    for _ in range(1000):
        assert held.transport.poll(0.0) == []
    assert held.transport.pause_s == 0.0
    for _ in range(100):
        held.transport.poll(0.0)
    assert held.transport.pause_s == 0.001
    held.post(scattered(2))
    assert held.transport.pause_s == 0.0, "there is something new to do"
    held.cards.run()
    assert handle in held.codes()


def test_scattered_pages_are_copied_by_one_kernel(tables: MemoryHost) -> None:
    pair = DevicePair(tables, gather_from=3)
    [stream] = pair.cards.streams
    assert stream.gathers, "its kernel is compiled when the pool is registered"
    few, many = pair.post(scattered(1, 2)), pair.post(scattered(4, 5, 6))
    pair.cards.copies_per_look = 0
    assert pair.codes() == {}
    assert (stream.num_launches, pair.cards.num_waiting) == (1, 5)
    pair.cards.run()
    assert pair.codes() == {few: "", many: ""}
    assert all(pair.has_copied(NUM_PAGES - page, page) for page in (1, 2, 4, 5, 6))


def test_a_kernel_takes_less_of_a_poll_than_its_copies_would(tables: MemoryHost) -> None:
    pair = DevicePair(tables, copies_per_poll=1, gather_from=2, copies_per_look=0)
    pair.post([Descriptor(8 * number, 16 * number, 4) for number in range(20)])
    waiting: list[int] = []
    for _ in range(3):
        pair.transport.poll(0.0)
        waiting.append(pair.cards.num_waiting)
    assert waiting == [8, 16, 20]
    assert pair.cards.streams[0].num_launches == 3


@pytest.mark.parametrize(("num_parts", "num_launches"), [(143, 1), (144, 2)])
def test_a_long_transfer_begins_before_all_of_it_is_laid_out(
    tables: MemoryHost, num_parts: int, num_launches: int
) -> None:
    """In one poll: its first launch is small, and the device works while the host makes the table of the rest."""
    pair = DevicePair(tables, gather_from=2, copies_per_look=0)
    handle = pair.post([Descriptor(8 * number, 16 * number, 4) for number in range(num_parts)])
    pair.transport.poll(0.0)
    assert (pair.cards.streams[0].num_launches, pair.cards.num_waiting) == (num_launches, num_parts)
    pair.cards.run()
    assert pair.codes() == {handle: ""}


def test_no_poll_puts_in_single_copies_because_kernels_are_slow(tables: MemoryHost) -> None:
    pair = DevicePair(tables, gather_from=3)
    [stream] = pair.cards.streams
    stream.has_tables = False
    handle = pair.post(scattered(1, 2, 3, 4))
    assert pair.codes() == {}
    assert pair.cards.num_waiting == 0
    few = pair.post(scattered(5))
    assert pair.codes() == {few: ""}, "what is no kernel's goes on"
    stream.has_tables = True
    assert pair.codes() == {handle: ""}
    assert stream.num_launches == 1


def test_pages_of_another_device_are_not_read_by_a_kernel(tables: MemoryHost) -> None:
    pair = DevicePair(tables, gather_from=1)
    elsewhere = make_pool(pair.there.host, "q", "cuda:1")
    peer = pair.transport.connect(handle_of(elsewhere))
    pair.transport.post(Transfer(pair.destination, peer, scattered(1, 2, 3), NEVER))
    assert list(pair.codes().values()) == [""]
    assert sum(stream.num_launches for stream in pair.cards.streams) == 0


def test_a_device_for_which_the_kernel_cannot_be_compiled(tables: MemoryHost) -> None:
    process = Process(tables, FakeCards())
    process.memory.has_no_compiler = True
    pool = make_pool(process.host, "d", DEVICE)
    with pytest.raises(DeviceUnavailable, match="cannot be compiled"):
        CudaIpcTransport(process.host).register(pool)
    CudaIpcTransport(process.host, gather_from=0).register(pool)


def test_the_pool_of_a_dead_agent_cannot_be_connected(pair: DevicePair) -> None:
    pair.transport.disconnect(pair.peer)
    pair.there.memory.die()
    with pytest.raises(DeviceHandleInvalid):
        pair.transport.connect(handle_of(pair.source))


def test_what_is_in_the_stream_is_waited_for_however_a_transfer_ends(tables: MemoryHost) -> None:
    pair = DevicePair(tables, copies_per_poll=2, copies_per_look=0)
    late = pair.post(scattered(1, 2, 3), deadline=1.0)
    pair.transport.poll(0.0)
    unwanted = pair.post(scattered(4))
    orphaned = pair.post(scattered(5))
    assert pair.codes(1.0) == {}, "two of its copies are still in the stream"
    pair.transport.cancel(unwanted)
    pair.transport.cancel(unwanted)
    pair.transport.cancel(Transfer(pair.destination, pair.peer, [], NEVER))
    pair.transport.disconnect(pair.peer)
    assert pair.here.memory.num_open == 1, "copies in the stream still read through it"
    before = bytes(pair.to_bytes)
    pair.cards.run()
    assert bytes(pair.to_bytes) != before
    assert pair.codes(1.0) == {late: "deadline_exceeded", unwanted: "cancelled", orphaned: "source_lost"}
    assert not any(pair.to_bytes[3 * SIZE : 4 * SIZE]), "nothing was put in after the deadline"
    assert pair.here.memory.num_open == 0
    pair.transport.disconnect(pair.peer)


def test_a_pool_closed_under_a_transfer_is_an_error_not_a_crash(tables: MemoryHost) -> None:
    pair = DevicePair(tables, copies_per_poll=1)
    handle = pair.post(scattered(1, 2))
    assert pair.codes() == {}
    pair.cards.run()
    pair.peer.pool.close()
    assert pair.codes() == {handle: "pool_closed"}


def test_a_device_that_fails_ends_all_transfers_and_takes_no_more(tables: MemoryHost) -> None:
    pair = DevicePair(tables, copies_per_poll=1, copies_per_look=0)
    running, waiting = pair.post(scattered(1)), pair.post(scattered(2))
    pair.transport.poll(0.0)
    pair.cards.fault = "an illegal address"
    codes = pair.codes() | pair.codes()
    assert codes == {running: "device_fault", waiting: "device_fault"}
    late = pair.post(scattered(3))
    assert pair.codes() == {late: "device_fault"}
    pair.transport.close()


def test_draining_a_device_that_has_failed_says_so(held: DevicePair) -> None:
    handle = held.post(scattered(1))
    held.transport.poll(0.0)
    held.cards.fault = "an illegal address"
    assert [(ended, ended.error and ended.error.code) for ended in held.transport.drain()] == [(handle, "device_fault")]


def test_a_stream_for_each_destination_device(tables: MemoryHost) -> None:
    cards = FakeCards(num_devices=2)
    here, there = Process(tables, cards), Process(tables, cards)
    source = make_pool(there.host, "p", "cuda:1")
    near, far = make_pool(here.host, "n", "cuda:1"), make_pool(here.host, "f", "cuda:0")
    there.bytes_of(source)[:] = random.Random(2).randbytes(len(there.bytes_of(source)))
    transport = CudaIpcTransport(here.host)
    for pool in (near, far):
        transport.register(pool)
    peer = transport.connect(handle_of(source))
    for pool in (near, far, near):
        transport.post(Transfer(pool, peer, [Descriptor(0, 0, NUM_PAGES * SIZE)], NEVER))
    assert [ended.error for ended in transport.poll(0.0)] == [None] * 3
    assert len(cards.streams) == 2
    assert here.bytes_of(near) == here.bytes_of(far) == there.bytes_of(source)


# puller


# whatever happens in whatever order


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.lists(st.integers(1, NUM_PAGES - 1), min_size=1, max_size=5, unique=True)),
        st.tuples(st.just("poll"), st.integers(0, 3)),
        st.tuples(st.just("run"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(1, 6)),
        st.tuples(st.just("reconnect"), st.none()),
        st.tuples(st.just("fault"), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    copies_per_poll=st.integers(1, 3),
    gather_from=st.integers(0, 2),
    ends=st.sampled_from(["polls", "drain"]),
)
def test_every_transfer_ends_once_and_writes_nothing_afterwards(
    steps, copies_per_poll: int, gather_from: int, ends: str
) -> None:
    pair = DevicePair(HeapHost(), copies_per_poll=copies_per_poll, gather_from=gather_from, copies_per_look=0)
    transport, now = pair.transport, 0.0
    judge = Judge(
        lambda page: bytes(pair.to_bytes[page * SIZE :][:SIZE]),
        lambda page: bytes(pair.from_bytes[(NUM_PAGES - page) * SIZE :][:SIZE]),
    )
    for what, value in steps:
        if what == "post" and (pages := judge.free(value)):
            judge.targets[pair.post(scattered(*pages), deadline=now + 4.0)] = pages
        elif what == "poll":
            now += value
            judge.take(transport.poll(now))
        elif what == "run":
            pair.cards.run(value)
        elif what == "cancel":
            for transfer in judge.cancelled(value):
                transport.cancel(transfer)
        elif what == "reconnect" and not pair.cards.fault:
            transport.disconnect(pair.peer)
            pair.peer = transport.connect(handle_of(pair.source))
        elif what == "fault":
            pair.cards.fault = "an illegal address"
            for stream in pair.cards.streams:
                stream.waiting.clear()
        judge.check()
    if ends == "polls":
        pair.cards.copies_per_look = None
        for _ in range(40):
            judge.take(transport.poll(now))
    else:
        judge.take(transport.drain())
    assert judge.ended == judge.targets.keys()
    assert (transport.num_posted, pair.cards.num_waiting) == (0, 0)
    transport.close()
    assert pair.cards.fault or pair.here.memory.num_open == 0
