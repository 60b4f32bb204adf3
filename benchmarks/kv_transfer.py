"""Page transfer over `shm` against plain memcpy of the same bytes: `python -m benchmarks.kv_transfer`.

Two pools in files under /dev/shm; 64 MiB of pages are pulled through `PagePuller`, with generations compared before and
after, as the kv_agent does it, poll by poll. Interleaved with it in the same run: one memcpy of as many bytes between
the two pools' mappings, and one between two arrays on the heap. Neighbouring pages move as one copy, so one row is for
pages that all lie in one run, another for pages scattered one by one as after hours of use. Medians and the best of all
rounds; the ratio is of medians within the run. Last, how long one poll keeps the event loop from its messages.
"""

import argparse
import os
import random
import statistics
import time

import numpy as np

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.layout import KVLayout
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import PagePool, PoolInfo, ShmHost
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import StartCopy

GOAL = 0.8
MIB = 1 << 20
# Llama-3-8B, 2 MiB per page of 16 tokens, and Qwen2.5-0.5B, 192 KiB.
LARGE = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16)
SMALL = KVLayout(num_layers=24, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_size=16)


class Transfer:
    """Two pools and a puller between them, used again for every round."""

    def __init__(self, host: ShmHost, layout: KVLayout, total_bytes: int) -> None:
        self.num_pages = total_bytes // layout.page_bytes
        self.names = [f"kvmesh-bench-{os.getpid()}-{layout.page_bytes}-{side}" for side in ("source", "destination")]
        self.host = host
        self.source, self.destination = (self._pool(name, layout) for name in self.names)
        self.source.pages_view[:] = random.Random(0).randbytes(len(self.source.pages_view))
        self.puller = PagePuller(ShmTransport(host))
        self.puller.add("d", [self.destination])
        self.peer = self.puller.transport.connect(handle_of(self.source))
        self.polls_s: list[float] = []

    def _pool(self, name: str, layout: KVLayout) -> PagePool:
        info = PoolInfo(group=name, num_pages=self.num_pages + 1, layout=layout, incarnation=1)
        pool = self.host.create(name, info)
        table = pool.table()
        for page in range(1, pool.num_pages):
            table.write(page, PageEntry(PageState.RUNNING, generation=page))
        return pool

    def run(self, source_pages: list[int], pages: list[int]) -> float:
        """Seconds to pull `source_pages` into `pages`."""
        start = time.perf_counter()
        copy = StartCopy(1, source_pages, source_pages, pages, pages, start + 60)
        assert self.puller.start("grant", copy, "d", [self.peer]) is None
        while self.puller.is_busy:
            before = time.perf_counter()
            for ended in self.puller.pump(before):
                assert not ended.event.code, ended.event.message
            self.polls_s.append(time.perf_counter() - before)
        return time.perf_counter() - start

    def verify(self, source_pages: list[int], pages: list[int]) -> None:
        """Every page must have arrived."""
        for page, copied in zip(source_pages, pages, strict=True):
            assert self.source.page(page) == self.destination.page(copied)

    def close(self) -> None:
        """Remove both pools."""
        self.puller.transport.close()
        for pool in (self.source, self.destination):
            pool.close()
            self.host.unlink(pool.path)


def memcpy(source: memoryview, destination: memoryview) -> float:
    """Seconds for one plain memcpy, by numpy."""
    left, right = np.frombuffer(source, np.uint8), np.frombuffer(destination, np.uint8)
    start = time.perf_counter()
    np.copyto(right, left)
    return time.perf_counter() - start


def report(name: str, seconds: list[float], total_bytes: int, baseline: list[float]) -> float:
    """Print one line; returns the ratio of medians."""
    ratio = statistics.median(baseline) / statistics.median(seconds)
    rate = total_bytes / 1e9
    print(
        f"{name:44s} {statistics.median(seconds) * 1e3:8.2f} ms  {rate / statistics.median(seconds):6.2f} GB/s"
        f"  best {rate / min(seconds):6.2f} GB/s  {ratio:5.2f} of memcpy"
    )
    return ratio


def main() -> None:
    """Command line; exit status 1 if pages in a run miss the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    total_bytes = arguments.mib * MIB
    host = ShmHost()
    large, small = Transfer(host, LARGE, total_bytes), Transfer(host, SMALL, total_bytes)
    try:
        ordered = list(range(1, large.num_pages + 1))
        scattered = random.Random(1).sample(ordered, len(ordered))
        small_ordered = list(range(1, small.num_pages + 1))
        small_scattered = random.Random(2).sample(small_ordered, len(small_ordered))
        heap = [memoryview(bytearray(os.urandom(MIB) * arguments.mib)) for _ in range(2)]
        names = {
            "memcpy, shared memory": lambda: memcpy(
                large.source.pages_view[:total_bytes], large.destination.pages_view[:total_bytes]
            ),
            "memcpy, heap": lambda: memcpy(heap[0], heap[1]),
            f"shm transfer, {len(ordered)} pages in one run": lambda: large.run(ordered, ordered),
            f"shm transfer, {len(ordered)} pages scattered": lambda: large.run(ordered, scattered),
            f"shm transfer, {len(small_ordered)} pages in one run": lambda: small.run(small_ordered, small_ordered),
            f"shm transfer, {len(small_ordered)} pages scattered": lambda: small.run(small_ordered, small_scattered),
        }
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for round_number in range(arguments.rounds + 2):
            for name, work in names.items():
                took = work()
                if round_number >= 2:
                    seconds[name].append(took)
        small.verify(small_ordered, small_scattered)
        large.verify(ordered, scattered)
        print(
            f"{arguments.mib} MiB, {arguments.rounds} interleaved rounds, page {LARGE.page_bytes // 1024} KiB and "
            f"{SMALL.page_bytes // 1024} KiB"
        )
        baseline = seconds["memcpy, shared memory"]
        ratios = [report(name, values, total_bytes, baseline) for name, values in seconds.items()]
        polls = sorted(large.polls_s + small.polls_s)
        middle, late = polls[len(polls) // 2], polls[len(polls) * 99 // 100]
        print(
            f"one poll: median {middle * 1e3:.2f} ms, 99 % within {late * 1e3:.2f} ms, longest {polls[-1] * 1e3:.2f} ms"
        )
        print(f"goal: one run at least {GOAL} of memcpy: {'met' if ratios[2] >= GOAL else 'MISSED'}")
        raise SystemExit(ratios[2] < GOAL)
    finally:
        large.close()
        small.close()


if __name__ == "__main__":
    main()
