"""The transport between pools in host memory, which copies a quantum in each poll."""

import pytest

from kvstore.pool.page_pool import MemoryHost
from kvstore.transfer.base import Transfer
from kvstore.transfer.plan import Descriptor
from tests.kvstore.transfer.mapped.pairs import ShmPair
from tests.kvstore.transfer.transfers import NEVER, SIZE, pulling, start_copy

PAGE = [Descriptor(0, 0, SIZE)]


@pytest.fixture
def slow(tables: MemoryHost) -> ShmPair:
    """Eight bytes of a transfer in each poll."""
    return ShmPair(tables, quantum_bytes=8)


def test_bytes_arrive_in_quanta_and_transfers_take_turns(tables: MemoryHost) -> None:
    pair = ShmPair(tables, quantum_bytes=SIZE)
    long = pair.post([Descriptor(SIZE, 2 * SIZE, 3 * SIZE), Descriptor(5 * SIZE, 6 * SIZE, 10)])
    short = pair.post([Descriptor(7 * SIZE, SIZE, SIZE)])
    assert pair.transport.num_posted == 2
    assert [pair.codes() for _ in range(5)] == [{}, {short: ""}, {}, {}, {long: ""}]
    view, source = pair.to_bytes, pair.from_bytes
    assert view[SIZE : 4 * SIZE] == source[2 * SIZE : 5 * SIZE]
    assert view[5 * SIZE : 5 * SIZE + 10] == source[6 * SIZE : 6 * SIZE + 10]
    assert view[7 * SIZE : 8 * SIZE] == source[SIZE : 2 * SIZE]
    assert not any(view[:SIZE])
    assert not any(view[5 * SIZE + 10 : 7 * SIZE])
    assert pair.transport.poll(0.0) == []


def test_a_deadline_a_cancel_and_a_lost_source_each_end_a_transfer_once(slow: ShmPair) -> None:
    late = slow.post(PAGE, deadline=1.0)
    unwanted = slow.post(PAGE)
    orphaned = slow.post(PAGE)
    assert slow.transport.poll(0.0) == []
    slow.transport.cancel(unwanted)
    slow.transport.cancel(unwanted)
    slow.transport.cancel(Transfer(slow.destination, slow.peer, [], NEVER))
    assert slow.codes(1.0) == {late: "deadline_exceeded", unwanted: "cancelled"}
    slow.transport.disconnect(slow.peer)
    assert slow.codes(1.0) == {orphaned: "source_lost"}
    assert slow.transport.num_posted == 0
    slow.transport.disconnect(slow.peer)


def test_a_pool_closed_under_a_transfer_is_an_error_not_a_crash(slow: ShmPair) -> None:
    slow.post(PAGE)
    slow.transport.poll(0.0)
    slow.peer.pool.close()
    [completion] = slow.transport.poll(0.0)
    assert completion.error is not None
    assert (completion.error.code, completion.num_bytes) == ("pool_closed", 8)


def test_draining_ends_everything_at_once(slow: ShmPair) -> None:
    handles = [slow.post(PAGE) for _ in range(3)]
    ended = slow.transport.drain()
    assert ended == handles
    assert {completion.error.code for completion in ended if completion.error} == {"cancelled"}
    assert slow.transport.poll(0.0) == []
    slow.transport.close()


def test_cancelling_a_copy_still_says_when_it_ended(slow: ShmPair) -> None:
    puller = pulling(slow)
    puller.start("grant", start_copy(1), "d", [slow.peer])
    puller.start("other", start_copy(1), "d", [slow.peer])
    puller.pump(0.0)
    puller.cancel("grant", 1)
    puller.cancel("grant", 2)
    puller.cancel("nobody", 1)
    [ended] = puller.pump(0.0)
    assert (ended.grant_id, ended.event.code, ended.num_bytes) == ("grant", "cancelled", 8)
    assert puller.is_busy


def test_the_source_is_mapped_to_be_read_only(tables: MemoryHost) -> None:
    with pytest.raises(TypeError):
        ShmPair(tables).peer.pool.pages_view[0] = 1
