"""Pools on a device, over a fake of it: who opens what, when, and what is left afterwards."""

from pathlib import Path

import msgspec
import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import (
    DeviceExhaustedMemory,
    DeviceHandleInvalid,
    DeviceUnavailable,
    PagesElsewhere,
    PoolBusy,
    PoolClosed,
    PoolExhaustedMemory,
)
from kvstore.layout import KVLayout
from kvstore.pool.cuda.memory import HANDLE_BYTES
from kvstore.pool.device import DevicePages, cuda_ordinal, memory_kind
from kvstore.pool.page_pool import MemoryHost, PagePool, PoolInfo, ShmHost
from tests.kvstore.fake_devices import FakeCards, Process

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, fingerprint="weights")
INFO = PoolInfo(group="decode-0", num_pages=5, layout=LAYOUT, incarnation=7, device="cuda:0")


@pytest.fixture
def cards() -> FakeCards:
    return FakeCards()


@pytest.fixture
def agent(tables: MemoryHost, cards: FakeCards) -> Process:
    return Process(tables, cards)


@pytest.fixture
def worker(tables: MemoryHost, cards: FakeCards) -> Process:
    return Process(tables, cards)


@pytest.fixture
def made(agent: Process) -> PagePool:
    return agent.host.create("kv-a", INFO)


@pytest.mark.parametrize(("name", "ordinal"), [("cuda", 0), ("cuda:0", 0), ("cuda:7", 7)])
def test_names_of_devices(name: str, ordinal: int) -> None:
    assert (cuda_ordinal(name), memory_kind(name), memory_kind("cpu")) == (ordinal, "cuda", "cpu")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1000", "CPU"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DeviceUnavailable, match="give 'cpu' or 'cuda:N'"):
        memory_kind(name)


def test_the_file_has_no_pages_and_the_header_says_where_they_are(tables: MemoryHost, made: PagePool) -> None:
    assert INFO.file_bytes == INFO.pages_offset
    assert INFO.pages_bytes == 5 * LAYOUT.page_bytes
    header = tables.open(made.path, writable=False).info
    assert len(header.ipc_handle) == HANDLE_BYTES
    assert msgspec.structs.replace(header, ipc_handle=b"") == INFO
    if isinstance(tables, ShmHost):
        assert Path(made.path).stat().st_size == INFO.pages_offset


def test_a_pool_is_one_memory_for_all_who_open_it(
    agent: Process, worker: Process, made: PagePool, cards: FakeCards
) -> None:
    mapped = worker.host.open(made.path, writable=True)
    assert worker.num_loads == 0, "until pages are used, a mapping is of header and page table only"
    mapped.table().write(3, PageEntry(PageState.RUNNING, 4, 2))
    assert made.table().read(3) == PageEntry(PageState.RUNNING, 4, 2)
    pages = mapped.device_pages
    assert pages.num_bytes == INFO.pages_bytes
    assert pages.pointer != made.device_pages.pointer, "each process has an address of its own"
    worker.memory.view(pages.pointer)[:3] = b"abc"
    assert bytes(agent.memory.view(made.device_pages.pointer)[:4]) == b"abc\0"
    assert mapped.device_pages == pages
    for pool in (mapped, made):
        pool.close()
        pool.close()
        with pytest.raises(PoolClosed):
            _ = pool.device_pages
    assert (worker.memory.num_open, cards.allocations) == (0, [])


def test_many_mappings_of_a_process_open_the_handle_once(worker: Process, made: PagePool) -> None:
    pools = [worker.host.open(made.path, writable=False) for _ in range(3)]
    assert len({pool.device_pages for pool in pools}) == 1
    assert worker.memory.num_open == 1
    pools[0].close()
    pools[2].close()
    assert worker.memory.num_open == 1
    assert worker.memory.view(pools[1].device_pages.pointer)
    pools[1].close()
    assert worker.memory.num_open == 0
    made.close()


def test_the_process_that_made_a_pool_uses_it_directly(agent: Process, made: PagePool) -> None:
    again = agent.host.open(made.path, writable=False)
    assert again.device_pages == made.device_pages
    assert agent.memory.num_open == 0
    made.close()
    with pytest.raises(PoolClosed, match="freed by its owner"):
        _ = again.device_pages
    again.close()


def test_who_maps_page_tables_only_never_touches_the_device(tables: MemoryHost, made: PagePool) -> None:
    scheduler = tables.open(made.path, writable=True)
    assert scheduler.table().read(3) is not None
    with pytest.raises(PagesElsewhere, match="on cuda:0 are not mapped here"):
        _ = scheduler.device_pages
    for use in (lambda: scheduler.pages_view, lambda: scheduler.page(1)):
        with pytest.raises(PagesElsewhere, match="are on cuda:0"):
            use()
    scheduler.close()
    made.close()


def test_pools_in_host_memory_pass_through(agent: Process) -> None:
    pool = agent.host.create("kv-a", msgspec.structs.replace(INFO, device="cpu"))
    assert pool.path == agent.host.path("kv-a")
    again = agent.host.open(pool.path, writable=False)
    pool.page(2)[:2] = b"ab"
    assert bytes(again.page(2)[:2]) == b"ab"
    with pytest.raises(PagesElsewhere, match="are in its file"):
        _ = again.device_pages
    agent.host.unlink(pool.path)
    assert agent.num_loads == 0


def test_a_device_without_room_says_the_figures_and_leaves_nothing(tables: MemoryHost) -> None:
    cards = FakeCards(num_bytes=1000)
    with pytest.raises(DeviceExhaustedMemory, match="cuda:0 has 1000 of its 1000 bytes free") as caught:
        Process(tables, cards).host.create("kv-a", INFO)
    assert isinstance(caught.value, PoolExhaustedMemory), "callers that end with `no memory` see it as such"
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (INFO.pages_bytes, 1000)
    assert cards.allocations == []


def test_a_device_that_is_not_there(agent: Process) -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:3"):
        agent.host.create("kv-a", msgspec.structs.replace(INFO, device="cuda:3"))


def test_pages_are_freed_if_the_file_cannot_be_made(cards: FakeCards, tmp_path: Path) -> None:
    first, second = Process(ShmHost(tmp_path), cards), Process(ShmHost(tmp_path), cards)
    made = first.host.create("kv-a", INFO)
    with pytest.raises(PoolBusy):
        second.host.create("kv-a", INFO)
    assert len(cards.allocations) == 1
    made.close()


def test_the_pages_of_a_dead_process_cannot_be_opened(agent: Process, worker: Process, made: PagePool) -> None:
    agent.memory.die()
    late = worker.host.open(made.path, writable=True)
    with pytest.raises(DeviceHandleInvalid):
        _ = late.device_pages
    late.close()
    assert worker.memory.num_open == 0


def test_a_header_without_a_handle(tables: MemoryHost, worker: Process) -> None:
    tables.create("kv-a", INFO)
    with pytest.raises(DeviceHandleInvalid, match="no handle"):
        _ = worker.host.open(tables.path("kv-a"), writable=True).device_pages


def test_two_makings_of_a_pool_are_two_memories(tmp_path: Path) -> None:
    cards, tables = FakeCards(), ShmHost(tmp_path)
    first, second, worker = (Process(tables, cards) for _ in range(3))
    made = first.host.create("kv-a", INFO)
    old = worker.host.open(made.path, writable=True)
    _ = old.device_pages
    tables.unlink(made.path)
    remade = second.host.create("kv-a", msgspec.structs.replace(INFO, incarnation=8))
    new = worker.host.open(remade.path, writable=True)
    assert isinstance(new.device_pages, DevicePages)
    assert new.device_pages != old.device_pages
    assert worker.memory.num_open == 2
    old.close()
    assert worker.memory.num_open == 1
    new.close()
    remade.close()


def test_pages_that_cannot_be_exported_leave_nothing(agent: Process, cards: FakeCards) -> None:
    agent.memory.export = lambda *_: (_ for _ in ()).throw(DeviceHandleInvalid("no"))  # type: ignore[method-assign]
    with pytest.raises(DeviceHandleInvalid):
        agent.host.create("kv-a", INFO)
    assert cards.used(0) == 0
