"""Pools on a CUDA device, between real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import DeviceExhaustedMemory, DeviceHandleInvalid
from kvstore.pool.cuda.memory import load_cupy_memory
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import PagePool, PoolInfo, ShmHost
from tests.gpu.gpu_pool import LAYOUT, Child, bytes_at, digest

pytestmark = pytest.mark.process

NUM_PAGES = 9
INFO = PoolInfo(group="d", num_pages=NUM_PAGES, layout=LAYOUT, incarnation=1, device="cuda:0")


@pytest.fixture
def host(tmp_path: Path) -> CudaHost:
    return CudaHost(ShmHost(tmp_path))


@pytest.fixture
def pool(host: CudaHost) -> Iterator[PagePool]:
    pool = host.create("kv-d", INFO)
    yield pool
    pool.close()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child("pool_process.py", tmp_path)
    yield child
    child.end()


def test_a_pool_is_zeroed_and_its_handle_has_64_bytes(host: CudaHost, pool: PagePool) -> None:
    assert not any(bytes_at(pool.device_pages))
    assert len(host.open(pool.path, writable=False).info.ipc_handle) == 64
    assert pool.device_pages.pointer % (2 << 20) == 0, "the handle names the base of the allocation"


def test_another_process_sees_the_same_bytes(pool: PagePool, child: Child) -> None:
    assert int(child.ask("open", pool.path)) == INFO.pages_bytes
    assert child.ask("fill", 1) == digest(bytes_at(pool.device_pages)) == child.ask("hash")


def test_pages_survive_the_death_of_a_worker(pool: PagePool, child: Child, tmp_path: Path) -> None:
    child.ask("open", pool.path)
    written = child.ask("fill", 2)
    child.kill()
    assert digest(bytes_at(pool.device_pages)) == written
    following = Child("pool_process.py", tmp_path)
    following.ask("open", pool.path)
    assert following.ask("hash") == written
    following.end()


def test_the_pages_of_a_killed_agent_cannot_be_opened(host: CudaHost, child: Child) -> None:
    path = child.ask("make", "kv-p", NUM_PAGES, 1)
    child.kill()
    late = host.open(path, writable=False)
    with pytest.raises(DeviceHandleInvalid):
        _ = late.device_pages
    late.close()
    assert load_cupy_memory().usage(0)[1] > 0, "the error leaves the device usable"
    host.create("kv-p", INFO).close()


def test_a_mapping_outlives_the_death_of_its_maker_until_it_is_closed(host: CudaHost, child: Child) -> None:
    """What a worker does between its agent's death and its own end: it must not fault the device."""
    path = child.ask("make", "kv-p", NUM_PAGES, 1)
    written = child.ask("fill", 3)
    mapped = host.open(path, writable=False)
    assert digest(bytes_at(mapped.device_pages)) == written
    child.kill()
    assert digest(bytes_at(mapped.device_pages)) == written
    mapped.close()


def test_memory_comes_back_when_a_pool_is_closed(host: CudaHost) -> None:
    big = PoolInfo(group="b", num_pages=300, layout=LAYOUT, incarnation=1, device="cuda:0")
    host.create("kv-warm", INFO).close()
    before, total = host.memory.usage(0)
    pool = host.create("kv-b", big)
    during, _ = host.memory.usage(0)
    pool.close()
    after, _ = host.memory.usage(0)
    assert before - during >= big.pages_bytes
    assert abs(after - before) < 64 << 20, "others on the device may move this a little"
    assert 0 < before < total


def test_a_pool_that_does_not_fit_says_the_figures(host: CudaHost) -> None:
    _, total = host.memory.usage(0)
    huge = PoolInfo(group="h", num_pages=2 * total // LAYOUT.page_bytes, layout=LAYOUT, incarnation=1, device="cuda:0")
    with pytest.raises(DeviceExhaustedMemory) as caught:
        host.create("kv-h", huge)
    assert caught.value.needed_bytes >= huge.pages_bytes
    assert 0 < caught.value.available_bytes < total


def test_a_scheduler_never_loads_cupy(pool: PagePool, child: Child) -> None:
    assert child.ask("tables", pool.path) == "not loaded"
