"""The `tcp` transport between pools on a device: through page-locked buffers, over real connections."""

from collections.abc import Iterator

import pytest

from kvstore.pool.cuda.memory import load_cupy_memory
from kvstore.pool.device import CPU, DevicePages
from kvstore.transfer.paired.link import Memory, Moved, PairLink, Ready
from kvstore.transfer.paired.tcp.link import TcpLinks, TcpSettings
from tests.gpu.gpu_pool import bytes_at, put_bytes, random_bytes
from tests.kvstore.transfer.paired.links import until

SIZE = 48 << 20


class End:
    """One end of a pair, with `SIZE` bytes on a device or in host memory."""

    def __init__(self, kind: str) -> None:
        self.device = CPU if kind == "host" else "cuda:0"
        self.maker = TcpLinks(TcpSettings(num_streams=3), load_cupy_memory)
        self.memory: Memory = memoryview(bytearray(SIZE))
        if kind == "device":
            self.memory = DevicePages(0, load_cupy_memory().allocate(0, SIZE), SIZE)
        self.link: PairLink

    def bytes(self) -> bytes:
        return bytes_at(self.memory) if isinstance(self.memory, DevicePages) else bytes(self.memory)

    def put(self, data: bytes) -> None:
        if isinstance(self.memory, DevicePages):
            put_bytes(self.memory, data)
        else:
            self.memory[:] = data

    def close(self) -> None:
        self.link.stop()
        self.maker.close()
        if isinstance(self.memory, DevicePages):
            load_cupy_memory().free(0, self.memory.pointer)


@pytest.fixture(params=["device device", "host device", "device host"])
def ends(request: pytest.FixtureRequest) -> Iterator[list[End]]:
    """Whose first takes what the second gives."""
    ends = [End(kind) for kind in request.param.split()]
    rendezvous = ends[0].maker.unique_id()
    for rank, end in enumerate(ends):
        end.link = end.maker.link(end.device, rendezvous, rank)
        end.link.begin()
    for end in ends:
        assert until(end.link, bool) == [Ready()]
    yield ends
    for end in ends:
        end.close()


def test_bytes_arrive_where_they_belong_and_nowhere_else(ends: list[End]) -> None:
    target, source = ends
    data, held = random_bytes(1, SIZE), random_bytes(2, SIZE)
    source.put(data)
    target.put(held)
    # A run of 20 MiB, pieces of no particular size, and the last byte.
    sources = [(0, 20 << 20), (30_000_001, 1_234_567), (25_000_000, 64 << 10), (SIZE - 1, 1)]
    targets = [(20 << 20, 20 << 20), (3, 1_234_567), (10_000_000, 64 << 10), (SIZE - 1, 1)]
    for number in (1, 2, 3):
        target.link.move(number, target.memory, targets)
        source.link.move(number, source.memory, sources)
        for end in ends:
            assert until(end.link, bool) == [Moved(number)]
    expected = bytearray(held)
    for (to, size), (at, _) in zip(targets, sources, strict=True):
        expected[to : to + size] = data[at : at + size]
    assert target.bytes() == expected
    assert source.bytes() == data
