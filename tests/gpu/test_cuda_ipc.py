"""Pages pulled out of another process's pool, on a real device."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import PagePool, PoolInfo, ShmHost
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Transfer
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.plan import Descriptor, coalesce, page_descriptors
from tests.gpu.gpu_pool import LAYOUT, Child, bytes_at, put_bytes, random_bytes

pytestmark = pytest.mark.process

SIZE = LAYOUT.page_bytes
NUM_PAGES = 257
NEVER = 1e9


def handle_at(path: str) -> PoolHandle:
    """A child's pool, which is opened by its path."""
    return PoolHandle(
        group="p", agent="", path=path, num_pages=NUM_PAGES, layout=LAYOUT, incarnation=1, device="cuda:0"
    )


class Pair:
    """A source pool of a process of its own, and a destination with a transport in this one."""

    def __init__(self, directory: Path, gather_from: int) -> None:
        self.child = Child("pool_process.py", directory)
        self.host = CudaHost(ShmHost(directory))
        path = self.child.ask("make", "kv-p", NUM_PAGES, 1)
        self.child.ask("fill", 5)
        self.source_bytes = random_bytes(5, NUM_PAGES * SIZE)
        info = PoolInfo(group="d", num_pages=NUM_PAGES, layout=LAYOUT, incarnation=1, device="cuda:0")
        self.pool: PagePool = self.host.create("kv-d", info)
        self.transport = CudaIpcTransport(self.host, gather_from=gather_from)
        self.transport.register(self.pool)
        self.peer = self.transport.connect(handle_at(path))

    def post(self, source: list[int], destination: list[int], deadline: float = NEVER) -> Transfer:
        parts = page_descriptors(coalesce(source, destination), SIZE)
        transfer = Transfer(self.pool, self.peer, parts, deadline)
        self.transport.post(transfer)
        return transfer

    def finish(self, limit_s: float = 10.0) -> list[Transfer]:
        ended: list[Transfer] = []
        end = time.monotonic() + limit_s
        while self.transport.num_posted and time.monotonic() < end:
            ended += self.transport.poll(0.0)
        return ended

    def page(self, page: int) -> bytes:
        return bytes_at(self.pool.device_pages, page * SIZE, SIZE)

    def close(self) -> None:
        self.transport.close()
        self.child.end()
        self.pool.close()


@pytest.fixture(params=[4, 0], ids=["gather", "memcpy"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Scattered pages by one kernel, or each by a call of its own."""
    pair = Pair(tmp_path, request.param)
    yield pair
    pair.close()


def test_pages_arrive_as_they_are_and_nothing_else_changes(pair: Pair) -> None:
    pages = random.Random(1).sample(range(1, NUM_PAGES), 64)
    targets = random.Random(2).sample(range(1, NUM_PAGES), 64)
    pair.post(pages, targets)
    [completion] = pair.finish()
    assert (completion.error, completion.num_bytes) == (None, 64 * SIZE)
    for page, target in zip(pages, targets, strict=True):
        assert pair.page(target) == pair.source_bytes[page * SIZE : (page + 1) * SIZE]
    untouched = next(page for page in range(NUM_PAGES) if page not in targets)
    assert not any(pair.page(untouched))


def test_pieces_of_any_size_and_alignment(pair: Pair) -> None:
    source = random.Random(4)
    parts: list[Descriptor] = []
    free = SIZE
    while len(parts) < 300:
        size = source.choice([1, 15, 16, 100, 4096, 33_000, 100_001])
        parts.append(Descriptor(free, source.randrange(0, 200 * SIZE), size))
        free += size + source.choice([0, 1, 16])
    pair.transport.post(Transfer(pair.pool, pair.peer, parts, NEVER))
    [completion] = pair.finish()
    assert completion.error is None
    expected = bytearray(free)
    for part in parts:
        piece = pair.source_bytes[part.remote_offset : part.remote_offset + part.num_bytes]
        expected[part.local_offset : part.local_offset + part.num_bytes] = piece
    assert bytes_at(pair.pool.device_pages, 0, free) == bytes(expected)


def test_pools_of_one_process_are_copied_without_a_handle(pair: Pair) -> None:
    info = PoolInfo(group="q", num_pages=3, layout=LAYOUT, incarnation=1, device="cuda:0")
    own = pair.host.create("kv-q", info)
    put_bytes(own.device_pages, random_bytes(9, 3 * SIZE))
    peer = pair.transport.connect(handle_of(own))
    pair.transport.post(Transfer(pair.pool, peer, [Descriptor(SIZE, 2 * SIZE, SIZE)], NEVER))
    [completion] = pair.finish()
    assert completion.error is None
    assert pair.page(1) == random_bytes(9, 3 * SIZE)[2 * SIZE :]
    pair.transport.disconnect(peer)
    own.close()


def test_a_cancelled_transfer_writes_nothing_after_its_completion(pair: Pair) -> None:
    pages = list(range(1, NUM_PAGES))
    posted = pair.post(pages, pages[::-1])
    # A device at leisure may have finished before the first poll ends.
    ended = pair.transport.poll(0.0)
    pair.transport.cancel(posted)
    [completion] = ended or pair.finish()
    assert completion is posted
    before = bytes_at(pair.pool.device_pages)
    time.sleep(0.05)
    assert bytes_at(pair.pool.device_pages) == before


def test_a_poll_does_not_wait_for_the_device(pair: Pair) -> None:
    pages = list(range(1, NUM_PAGES))
    pair.post(pages, pages[::-1])
    pair.finish()
    pair.post(pages, pages[::-1])
    slowest = 0.0
    while pair.transport.num_posted:
        begin = time.perf_counter()
        pair.transport.poll(0.0)
        slowest = max(slowest, time.perf_counter() - begin)
    print(f"slowest poll, {NUM_PAGES - 1} scattered pages: {slowest * 1e3:.2f} ms")
    assert slowest < 0.02


def test_the_death_of_the_source_ends_transfers_and_leaves_the_device_usable(pair: Pair) -> None:
    pages = list(range(1, NUM_PAGES))
    posted = pair.post(pages, pages)
    began = pair.transport.poll(0.0)
    pair.child.kill()
    pair.transport.disconnect(pair.peer)
    ended = began or pair.finish()
    assert ended == [posted]
    assert posted.error is None or posted.error.code == "source_lost"
    put_bytes(pair.pool.device_pages, b"alive")
    assert bytes_at(pair.pool.device_pages, 0, 5) == b"alive"


@pytest.mark.parametrize("order", ["in a run", "scattered"])
def test_bandwidth_beside_a_plain_copy(pair: Pair, order: str) -> None:
    """The goal is 0.8 of a device-to-device copy of as many bytes; scattered pages, 1.75 MiB each, need the kernel."""
    pages = list(range(1, NUM_PAGES))
    targets = pages if order == "in a run" else random.Random(3).sample(pages, len(pages))
    num_bytes = len(pages) * SIZE

    parts = page_descriptors(coalesce(pages, targets), SIZE)

    def pull() -> float:
        begin = time.perf_counter()
        pair.transport.post(Transfer(pair.pool, pair.peer, parts, NEVER))
        [completion] = pair.finish()
        assert completion.error is None
        return time.perf_counter() - begin

    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)

    def plain() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    pull(), plain()
    pulled, copied = min(pull() for _ in range(10)), min(plain() for _ in range(10))
    fraction = copied / pulled
    print(f"{num_bytes >> 20} MiB {order}: {num_bytes / pulled / 1e9:.0f} GB/s, {fraction:.2f} of a plain copy")
    is_gathered = pair.transport._gather_from > 0
    # A call for each page takes the host 4.7 us, as long as the device needs for 7 MB, and laying out what one launch
    # copies 0.1 to 0.2 ms, most of what the device needs for all: this was 0.7 on one host, and 0.41 on a slower one.
    assert fraction > (0.8 if order == "in a run" else 0.35 if is_gathered else 0.1)
