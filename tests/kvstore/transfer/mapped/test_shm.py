import random

import msgspec
import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PoolMissing, TransferError
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import MemoryHost
from kvstore.transfer.base import Transfer, Transport
from kvstore.transfer.mapped.peer import MappedPeer
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.plan import Descriptor
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import CopyEnded
from tests.kvstore.transfer.transfers import NEVER, OUTSIDE, SIZE, Stranger, make_pool, pulling, start_copy


class Pair:
    """A source pool with random content, and a destination with a transport."""

    def __init__(self, tables: MemoryHost, quantum_bytes: int = 4 << 20) -> None:
        self.source = make_pool(tables, "p")
        self.destination = make_pool(tables, "d")
        self.source.pages_view[:] = random.Random(1).randbytes(len(self.source.pages_view))
        self.transport = ShmTransport(tables, quantum_bytes)
        self.transport.register(self.destination)
        self.peer = self.transport.connect(handle_of(self.source))

    def post(self, parts: list[Descriptor], deadline: float = NEVER) -> Transfer:
        transfer = Transfer(self.destination, self.peer, parts, deadline)
        self.transport.post(transfer)
        return transfer


@pytest.fixture
def pair(tables: MemoryHost) -> Pair:
    return Pair(tables)


@pytest.fixture
def puller(pair: Pair) -> PagePuller:
    return pulling(pair)


def test_it_is_a_transport(tables: MemoryHost) -> None:
    transport: Transport = ShmTransport(tables)
    pool = make_pool(tables, "d")
    transport.register(pool)
    assert (transport.name, transport.kinds) == ("shm", {"cpu"})
    with pytest.raises(PoolMissing):
        transport.connect(msgspec.structs.replace(handle_of(pool), path=tables.path("nothing")))
    transport.close()


def test_bytes_arrive_in_quanta_and_transfers_take_turns(tables: MemoryHost) -> None:
    pair = Pair(tables, quantum_bytes=SIZE)
    long = pair.post([Descriptor(SIZE, 2 * SIZE, 3 * SIZE), Descriptor(5 * SIZE, 6 * SIZE, 10)])
    short = pair.post([Descriptor(7 * SIZE, SIZE, SIZE)])
    assert pair.transport.num_posted == 2
    ended: list[Transfer] = []
    polls = 0
    while pair.transport.num_posted:
        polls += 1
        for completion in pair.transport.poll(0.0):
            assert completion.error is None
            ended.append(completion)
    assert ended == [short, long]
    assert polls == 5
    view, source = pair.destination.pages_view, pair.source.pages_view
    assert view[SIZE : 4 * SIZE] == source[2 * SIZE : 5 * SIZE]
    assert view[5 * SIZE : 5 * SIZE + 10] == source[6 * SIZE : 6 * SIZE + 10]
    assert view[7 * SIZE : 8 * SIZE] == source[SIZE : 2 * SIZE]
    assert not any(view[:SIZE])
    assert not any(view[5 * SIZE + 10 : 7 * SIZE])
    assert pair.transport.poll(0.0) == []


@pytest.mark.parametrize("part", OUTSIDE)
def test_bytes_outside_the_pools_are_refused(pair: Pair, part: Descriptor) -> None:
    with pytest.raises(TransferError, match="outside the pools"):
        pair.post([Descriptor(0, 0, 4), part])
    assert pair.transport.num_posted == 0


def test_only_reading_from_what_it_mapped(pair: Pair) -> None:
    with pytest.raises(TransferError, match="only reads"):
        pair.transport.post(Transfer(pair.destination, Stranger(pair), [], NEVER))
    assert pair.peer.generations([1, 8, 0]) == [101, 108, 0]
    for outside in ([9], [3, -1]):
        with pytest.raises(ValueError, match="of a table of 9"):
            pair.peer.generations(outside)
    with pytest.raises(TypeError):
        pair.peer.pool.pages_view[0] = 1


def test_a_deadline_a_cancel_and_a_lost_source_each_end_a_transfer_once(tables: MemoryHost) -> None:
    pair = Pair(tables, quantum_bytes=8)
    late = pair.post([Descriptor(0, 0, SIZE)], deadline=1.0)
    unwanted = pair.post([Descriptor(0, 0, SIZE)])
    orphaned = pair.post([Descriptor(0, 0, SIZE)])
    assert pair.transport.poll(0.0) == []
    pair.transport.cancel(unwanted)
    pair.transport.cancel(unwanted)
    pair.transport.cancel(Transfer(pair.destination, pair.peer, [], NEVER))
    codes = {ended: ended.error.code for ended in pair.transport.poll(1.0) if ended.error}
    assert codes == {late: "deadline_exceeded", unwanted: "cancelled"}
    pair.transport.disconnect(pair.peer)
    codes = {ended: ended.error.code for ended in pair.transport.poll(1.0) if ended.error}
    assert codes == {orphaned: "source_lost"}
    assert pair.transport.num_posted == 0
    pair.transport.disconnect(pair.peer)


def test_disconnecting_one_peer_leaves_the_others(pair: Pair) -> None:
    other = pair.transport.connect(handle_of(pair.source))
    pair.post([Descriptor(0, 0, SIZE)])
    pair.transport.disconnect(other)
    [completion] = pair.transport.poll(0.0)
    assert completion.error is None
    with pytest.raises(ValueError, match="released"):
        other.generations([1])


def test_a_pool_closed_under_a_transfer_is_an_error_not_a_crash(tables: MemoryHost) -> None:
    pair = Pair(tables, quantum_bytes=8)
    pair.post([Descriptor(0, 0, SIZE)])
    pair.transport.poll(0.0)
    pair.peer.pool.close()
    [completion] = pair.transport.poll(0.0)
    assert completion.error is not None
    assert (completion.error.code, completion.num_bytes) == ("pool_closed", 8)


def test_draining_ends_everything_at_once(tables: MemoryHost) -> None:
    pair = Pair(tables, quantum_bytes=8)
    handles = [pair.post([Descriptor(0, 0, SIZE)]) for _ in range(3)]
    ended = pair.transport.drain()
    assert ended == handles
    assert {completion.error.code for completion in ended if completion.error} == {"cancelled"}
    assert pair.transport.poll(0.0) == []
    pair.transport.close()


# puller


def test_pages_are_pulled_and_compared(puller: PagePuller, pair: Pair) -> None:
    assert not puller.is_busy
    assert puller.start("grant", start_copy(), "d", [pair.peer]) is None
    assert puller.is_busy
    [ended] = puller.pump(0.0)
    assert (ended.grant_id, ended.event, ended.num_bytes) == ("grant", CopyEnded(1), 3 * SIZE)
    assert not puller.is_busy
    for page, copied in ((2, 4), (3, 5), (5, 1)):
        assert pair.destination.page(copied) == pair.source.page(page)


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_page_that_moved_on_fails_the_copy(puller: PagePuller, pair: Pair, side: str, when: str) -> None:
    table = (pair.source if side == "source" else pair.destination).table()
    page = 3 if side == "source" else 1

    def move_on() -> None:
        table.write(page, PageEntry(PageState.RUNNING, generation=999))

    if when == "before":
        move_on()
        ended = puller.start("grant", start_copy(), "d", [pair.peer])
        assert ended is not None
        assert not any(pair.destination.pages_view)
    else:
        assert puller.start("grant", start_copy(), "d", [pair.peer]) is None
        move_on()
        [ended] = puller.pump(0.0)
    assert ended.event.code == "stale_pages"
    assert f"{side} page {page} is of generation 999 {when} the copy" in ended.event.message


def test_pages_that_are_not_there_fail_the_copy(puller: PagePuller, pair: Pair) -> None:
    ended = puller.start("grant", start_copy(pages=(2, 3, 99)), "d", [pair.peer])
    assert ended is not None
    assert ended.event.code == "source_lost"
    assert "pages 2 to 99 of a table of 9" in ended.event.message


def test_cancelling_a_copy_still_says_when_it_ended(tables: MemoryHost) -> None:
    pair = Pair(tables, quantum_bytes=8)
    puller = pulling(pair)
    puller.start("grant", start_copy(1), "d", [pair.peer])
    puller.start("other", start_copy(1), "d", [pair.peer])
    puller.pump(0.0)
    puller.cancel("grant", 1)
    puller.cancel("grant", 2)
    puller.cancel("nobody", 1)
    [ended] = puller.pump(0.0)
    assert (ended.grant_id, ended.event.code, ended.num_bytes) == ("grant", "cancelled", 8)
    assert puller.is_busy


def test_a_copy_that_the_transport_refuses_ends_at_once(puller: PagePuller, pair: Pair) -> None:

    ended = puller.start("grant", start_copy(), "d", [Stranger(pair)])
    assert ended is not None
    assert ended.event.code == "unsupported"


def test_a_source_unmapped_under_a_copy_fails_it(puller: PagePuller, pair: Pair) -> None:
    pair.transport.disconnect(pair.peer)
    ended = puller.start("grant", start_copy(), "d", [pair.peer])
    assert ended is not None
    assert ended.event.code == "source_lost"
    assert isinstance(pair.peer, MappedPeer)
