"""NCCL on real devices: what one can show, and two ranks where there are two."""

import time

import pytest
import torch

from kvstore.errors import PairUnmade
from kvstore.layout import KVLayout
from kvstore.pool.cuda.memory import load_cupy_memory
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.device import DevicePages
from kvstore.pool.page_pool import HeapHost, PoolInfo
from kvstore.protocol import OfferPair, PoolHandle, SendPages
from kvstore.transfer.base import SourcePages, Transfer
from kvstore.transfer.paired.link import Broken, Moved, Ready, Stopped
from kvstore.transfer.paired.nccl import NcclLinks
from kvstore.transfer.paired.orders import Paired
from kvstore.transfer.paired.transport import PairTransport
from kvstore.transfer.plan import Descriptor
from tests.gpu.gpu_pool import bytes_at, put_bytes, random_bytes
from tests.kvstore.transfer.paired.links import until

SIZE = 1 << 20


def test_a_lone_rank_sends_to_itself_in_one_group() -> None:
    """The calls of `NcclLink`, as far as one rank can make them: a group of sends and receives in a stream."""
    import cupy
    from cupy.cuda import nccl

    memory = load_cupy_memory()
    pages = DevicePages(0, memory.allocate(0, 4 * SIZE), 4 * SIZE)
    data = random_bytes(3, 2 * SIZE)
    put_bytes(pages, data)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    nccl.groupStart()
    for source, target in ((0, 3 * SIZE), (SIZE, 2 * SIZE)):
        communicator.send(pages.pointer + source, SIZE, nccl.NCCL_INT8, 0, stream.ptr)
        communicator.recv(pages.pointer + target, SIZE, nccl.NCCL_INT8, 0, stream.ptr)
    nccl.groupEnd()
    stream.synchronize()
    communicator.check_async_error()
    assert bytes_at(pages, 2 * SIZE) == data[SIZE:] + data[:SIZE]
    communicator.abort()
    memory.free(0, pages.pointer)


class Nobody:
    """A courier whose messages nobody answers."""

    name = "near@1"

    def __init__(self) -> None:
        self.said: list[str] = []

    def now(self) -> float:
        return time.monotonic()

    def attach(self, transport: Paired) -> None:
        self.paired = transport

    def offer(self, agent: str, offer: OfferPair) -> None:
        self.said.append(f"offer {len(offer.unique_id)}")

    def order(self, agent: str, order: SendPages) -> None:
        self.said.append("order")

    def close(self, agent: str, pair: str) -> None:
        self.said.append("close")


def test_a_pair_to_which_nobody_comes_ends_at_its_deadline() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16", page_size=16)
    info = PoolInfo(group="d", num_pages=8, layout=layout, incarnation=1, device="cuda:0")
    pool = CudaHost(HeapHost()).create("kv-d", info)
    courier = Nobody()
    transport = PairTransport(NcclLinks(), courier, init_timeout_s=2.0)
    transport.register(pool)
    handle = PoolHandle(group="p", agent="far", path="", num_pages=8, layout=layout, incarnation=1, device="cuda:0")
    peer = transport.connect(handle)
    begin = time.monotonic()
    source = SourcePages([1], [1])
    transport.post(Transfer(pool, peer, [Descriptor(0, 0, 64)], begin + 20, source))
    ended: list[Transfer] = []
    while transport.num_posted and time.monotonic() < begin + 30:
        ended += transport.poll(time.monotonic())
    print(f"the pair was given up and its thread ended after {time.monotonic() - begin:.2f} s")
    [completion] = ended
    assert isinstance(completion.error, PairUnmade)
    assert completion.error.code == "deadline_exceeded"
    assert courier.said == ["offer 128", "close"]
    transport.close()
    pool.close()


def test_an_end_that_stays_alone_can_be_aborted() -> None:
    """The deadline of initialising: nobody comes, the abort must get through, and the device must live on."""
    links = NcclLinks()
    link = links.link("cuda:0", links.unique_id(), 0)
    link.begin()
    time.sleep(1.0)
    assert not any(isinstance(news, Ready) for news in link.news())
    begin = time.monotonic()
    link.abort()
    until(link, lambda found: Stopped() in found)
    print(f"aborting an end that waited for the other took {time.monotonic() - begin:.2f} s")
    memory = load_cupy_memory()
    memory.free(0, memory.allocate(0, SIZE))
    links.close()


def test_two_ranks_on_one_device_are_refused_not_hung() -> None:
    links = NcclLinks()
    unique_id = links.unique_id()
    pair = [links.link("cuda:0", unique_id, rank) for rank in (0, 1)]
    for link in pair:
        link.begin()
    for link in pair:
        found = until(link, bool)
        print(found)
        if isinstance(found[0], Ready):
            pytest.skip("this NCCL takes several ranks on a device (NCCL_MULTI_RANK_GPU_ENABLE)")
        assert isinstance(found[0], Broken)
    for link in pair:
        link.stop()
    links.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_bytes_cross_between_two_devices_and_an_unmatched_receive_can_be_aborted() -> None:
    links, memory = NcclLinks(), load_cupy_memory()
    unique_id = links.unique_id()
    areas = [DevicePages(device, memory.allocate(device, 4 * SIZE), 4 * SIZE) for device in (0, 1)]
    receiver, sender = (links.link(f"cuda:{device}", unique_id, device) for device in (0, 1))
    for link in (receiver, sender):
        link.begin()
    for link in (receiver, sender):
        assert until(link, bool) == [Ready()]
    data = random_bytes(4, 2 * SIZE)
    put_bytes(areas[1], data)
    receiver.move(1, areas[0], [(SIZE, SIZE), (0, SIZE)])
    sender.move(1, areas[1], [(0, SIZE), (SIZE, SIZE)])
    for link in (receiver, sender):
        assert until(link, bool) == [Moved(1)]
    assert bytes_at(areas[0], 0, 2 * SIZE) == data[SIZE:] + data[:SIZE]
    receiver.move(2, areas[0], [(0, SIZE)])
    time.sleep(0.2)
    receiver.abort()
    until(receiver, lambda found: Stopped() in found)
    sender.stop()
    for area in areas:
        memory.free(area.device, area.pointer)
    links.close()
