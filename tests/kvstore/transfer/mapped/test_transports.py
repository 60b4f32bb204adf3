"""What every transport does that maps the pool it copies from."""

import msgspec
import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PagesElsewhere, PoolMissing, TransferError
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import MemoryHost
from kvstore.transfer.base import Transfer, Transport
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.mapped.peer import MappedPeer
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.plan import Descriptor
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import CopyEnded
from tests.kvstore.fake_devices import FakeCards, Process
from tests.kvstore.transfer.mapped.pairs import DevicePair, Pair, ShmPair
from tests.kvstore.transfer.transfers import DEVICE, NEVER, OUTSIDE, SIZE, Stranger, make_pool, pulling, start_copy

PAIRS = {"shm": ShmPair, "cuda_ipc": DevicePair}


@pytest.fixture(params=PAIRS)
def pair(tables: MemoryHost, request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param](tables)


@pytest.fixture
def puller(pair: Pair) -> PagePuller:
    return pulling(pair)


@pytest.mark.parametrize(("name", "kind"), [("shm", "cpu"), ("cuda_ipc", "cuda")])
def test_it_is_a_transport(tables: MemoryHost, name: str, kind: str) -> None:
    pair = PAIRS[name](tables)
    transport: Transport = pair.transport
    assert (transport.name, transport.kinds) == (name, {kind})
    with pytest.raises(PoolMissing):
        transport.connect(msgspec.structs.replace(handle_of(pair.source), path=pair.host.path("nothing")))
    transport.close()


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
        with pytest.raises(ValueError, match="in a table of 9"):
            pair.peer.generations(outside)


def test_pools_of_two_kinds_of_memory_do_not_meet(tables: MemoryHost) -> None:
    process = Process(tables, FakeCards())
    host_pool, device_pool = make_pool(process.host, "h"), make_pool(process.host, "d", DEVICE)
    for transport, stranger in ((CudaIpcTransport(process.host), host_pool), (ShmTransport(process.host), device_pool)):
        with pytest.raises(PagesElsewhere):
            transport.register(stranger)
        with pytest.raises(PagesElsewhere):
            transport.connect(handle_of(stranger))


def test_disconnecting_one_peer_leaves_the_others(pair: Pair) -> None:
    other = pair.transport.connect(handle_of(pair.source))
    handle = pair.post([Descriptor(0, 0, SIZE)])
    pair.transport.disconnect(other)
    assert pair.codes() == {handle: ""}
    with pytest.raises(ValueError, match="released"):
        other.generations([1])


def test_pages_are_pulled_and_compared(puller: PagePuller, pair: Pair) -> None:
    assert not puller.is_busy
    assert puller.start("grant", start_copy(), "d", [pair.peer]) is None
    assert puller.is_busy
    [ended] = puller.pump(0.0)
    assert (ended.grant_id, ended.event, ended.num_bytes) == ("grant", CopyEnded(1), 3 * SIZE)
    assert not puller.is_busy
    assert all(pair.has_copied(page, target) for page, target in ((2, 4), (3, 5), (5, 1)))


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_page_that_moved_on_fails_the_copy(puller: PagePuller, pair: Pair, side: str, when: str) -> None:
    pool, page = (pair.source, 3) if side == "source" else (pair.destination, 1)
    moved_on = PageEntry(PageState.RUNNING, generation=999)
    if when == "before":
        pool.table().write(page, moved_on)
    ended = puller.start("grant", start_copy(), "d", [pair.peer])
    if when == "before":
        assert not any(pair.to_bytes)
    else:
        assert ended is None
        pool.table().write(page, moved_on)
        [ended] = puller.pump(0.0)
    assert ended is not None
    assert ended.event.code == "stale_pages"
    assert f"{side} page {page} has generation 999 {when} the copy" in ended.event.message


def test_a_copy_that_cannot_begin_ends_at_once(puller: PagePuller, pair: Pair) -> None:
    refused = puller.start("grant", start_copy(), "d", [Stranger(pair)])
    absent = puller.start("grant", start_copy(pages=(2, 3, 99)), "d", [pair.peer])
    pair.transport.disconnect(pair.peer)
    unmapped = puller.start("grant", start_copy(), "d", [pair.peer])
    codes = [ended.event.code for ended in (refused, absent, unmapped) if ended is not None]
    assert codes == ["unsupported", "source_lost", "source_lost"]
    assert absent is not None
    assert "pages 2 to 99 are not all in a table of 9" in absent.event.message
    assert isinstance(pair.peer, MappedPeer)
