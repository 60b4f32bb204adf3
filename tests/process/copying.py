"""Copies pages between processes on a device of software, and says what arrived: started by `test_software_copies.py`.

kernel   out of another process's pool, scattered, by the kernel of `kvstore/pool/cuda/gather.py`
calls    the same, each page by a call
tcp      out of another process's pool, over raw connections and page-locked memory at both ends
source   the other end of `tcp`: reads the rendezvous from stdin
"""

import random
import subprocess
import sys
import time
from pathlib import Path

from kvstore.pool.cuda.memory import load_cupy_memory
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import PagePool, PoolInfo, ShmHost
from kvstore.protocol import PoolHandle
from kvstore.transfer.base import Transfer
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.paired.link import Broken, LinkMaker, Moved, News, PairLink, Ready
from kvstore.transfer.paired.nccl import NcclLinks
from kvstore.transfer.paired.tcp.link import TcpLinks, TcpSettings
from kvstore.transfer.plan import coalesce, page_descriptors
from tests.gpu.gpu_pool import LAYOUT, Child, bytes_at, put_bytes, random_bytes

SIZE = LAYOUT.page_bytes
NUM_PAGES = 17
SEED = 5


def make(directory: Path, name: str) -> PagePool:
    info = PoolInfo(group=name, num_pages=NUM_PAGES, layout=LAYOUT, incarnation=1, device="cuda:0")
    return CudaHost(ShmHost(directory)).create(name, info)


def say(pool: PagePool, pages: list[int], targets: list[int]) -> None:
    """Whether those pages are there, and nothing anywhere else."""
    source = random_bytes(SEED, NUM_PAGES * SIZE)
    expected = bytearray(NUM_PAGES * SIZE)
    for page, target in zip(pages, targets, strict=True):
        expected[target * SIZE : (target + 1) * SIZE] = source[page * SIZE : (page + 1) * SIZE]
    print("arrived" if bytes_at(pool.device_pages) == bytes(expected) else "not what was sent")


def pull(directory: Path, gather_from: int) -> None:
    child = Child("pool_process.py", directory)
    path = child.ask("make", "kv-p", NUM_PAGES, 1)
    child.ask("fill", SEED)
    pool = make(directory, "kv-d")
    host = CudaHost(ShmHost(directory))
    transport = CudaIpcTransport(host, gather_from=gather_from)
    transport.register(pool)
    info = pool.info
    there = PoolHandle(
        group="p", agent="", path=path, num_pages=NUM_PAGES, layout=info.layout, incarnation=1, device=info.device
    )
    peer = transport.connect(there)
    pages, targets = (random.Random(seed).sample(range(1, NUM_PAGES), 12) for seed in (1, 2))
    parts = page_descriptors(coalesce(pages, targets), SIZE)
    transport.post(Transfer(pool, peer, parts, float("inf")))
    ends_at = time.monotonic() + 20
    while transport.num_posted and time.monotonic() < ends_at:
        for ended in transport.poll(0.0):
            assert ended.error is None, ended.error
    say(pool, pages, targets)
    transport.close()
    child.end()
    pool.close()


def until(link: PairLink, wanted: News) -> None:
    ends_at = time.monotonic() + 20
    while time.monotonic() < ends_at:
        for news in link.news():
            assert not isinstance(news, Broken), news.message
            if news == wanted:
                return
        time.sleep(0.001)
    sys.exit(f"no {wanted}")


def parts_of(pages: list[int]) -> list[tuple[int, int]]:
    return [(page * SIZE, SIZE) for page in pages]


PAGES, TARGETS = [3, 9, 4, 16], [1, 2, 12, 7]


def make_links(way: str) -> LinkMaker:
    return NcclLinks() if way == "nccl" else TcpLinks(TcpSettings(num_streams=2, chunk_bytes=1 << 20), load_cupy_memory)


def receive(directory: Path, way: str) -> None:
    maker = make_links(way)
    unique_id = maker.unique_id()
    link = maker.link("cuda:0", unique_id, 0)
    pool = make(directory, "kv-d")
    words = [sys.executable, __file__, "source", str(directory), way]
    source = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
    assert source.stdin
    source.stdin.write(unique_id.hex() + "\n")
    source.stdin.flush()
    link.begin()
    until(link, Ready())
    link.move(1, pool.device_pages, parts_of(TARGETS))
    until(link, Moved(1))
    say(pool, PAGES, TARGETS)
    source.stdin.close()
    source.wait(20)
    link.stop()
    maker.close()
    pool.close()


def send(directory: Path, way: str) -> None:
    pool = make(directory, "kv-p")
    put_bytes(pool.device_pages, random_bytes(SEED, NUM_PAGES * SIZE))
    link = make_links(way).link("cuda:0", bytes.fromhex(sys.stdin.readline()), 1)
    link.begin()
    until(link, Ready())
    link.move(1, pool.device_pages, parts_of(PAGES))
    sys.stdin.read()
    link.stop()
    pool.close()


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    if what in ("tcp", "nccl"):
        receive(directory, what)
    elif what == "source":
        send(directory, sys.argv[3])
    else:
        pull(directory, 4 if what == "kernel" else 0)


if __name__ == "__main__":
    main()
