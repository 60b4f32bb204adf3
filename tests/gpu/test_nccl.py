"""NCCL on real devices: what one can show, and two ranks where there are two."""

import time
from collections.abc import Callable

import pytest
import torch
from gpu_pool import bytes_at, put_bytes, random_bytes

from kvstore.cuda_memory import load_cupy_memory
from kvstore.device import DevicePages
from kvstore.transfer.nccl_link import Broken, Moved, NcclLinks, News, PairLink, Ready, Stopped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

SIZE = 1 << 20


def until(link: PairLink, is_there: Callable[[list[News]], bool], limit_s: float = 30.0) -> list[News]:
    found: list[News] = []
    end = time.monotonic() + limit_s
    while not is_there(found):
        assert time.monotonic() < end, f"after {limit_s} s only {found}"
        found += link.news()
        time.sleep(0.001)
    return found


def test_an_end_that_stays_alone_can_be_aborted() -> None:
    """The deadline of initialising: nobody comes, the abort must get through, and the device must live on."""
    links = NcclLinks()
    link = links.link(0, links.unique_id(), 0)
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
    pair = [links.link(0, unique_id, rank) for rank in (0, 1)]
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
    receiver, sender = (links.link(device, unique_id, device) for device in (0, 1))
    for link in (receiver, sender):
        link.begin()
    for link in (receiver, sender):
        assert until(link, bool) == [Ready()]
    data = random_bytes(4, 2 * SIZE)
    put_bytes(areas[1], data)
    receiver.move(1, [(areas[0].pointer + SIZE, SIZE), (areas[0].pointer, SIZE)])
    sender.move(1, [(areas[1].pointer, SIZE), (areas[1].pointer + SIZE, SIZE)])
    for link in (receiver, sender):
        assert until(link, bool) == [Moved(1)]
    assert bytes_at(areas[0], 0, 2 * SIZE) == data[SIZE:] + data[:SIZE]
    receiver.move(2, [(areas[0].pointer, SIZE)])
    time.sleep(0.2)
    receiver.abort()
    until(receiver, lambda found: Stopped() in found)
    sender.stop()
    for area in areas:
        memory.free(area.device, area.pointer)
    links.close()
