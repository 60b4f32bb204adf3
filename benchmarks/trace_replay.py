"""Replays a trace of requests through the caches, disks and routing of several hosts: what is found, and where.

Each host has a pool (`PrefixCache`) and a disk of so many times its size (`StoreIndex`, written through); where a
request goes is what `RoutingCore` says, told of caches and loads. A host computes prompts one after the other at
`--rate`; no time is lost in anything else. Beside it: one LRU of all that memory and disk, and the optimum, which knows
what will be asked (both without hosts). A block of the trace, 512 tokens, is a page.

    python -m benchmarks.trace_replay TRACE --hosts 8 --disk 0,4,16
"""

import argparse
import heapq
import time
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.hashing import root_hash
from kvstore.store.index import PageName, StoreIndex
from mesh.membership.view import READY, Endpoint, Member
from nodes.protocol import Load
from nodes.roles import DETOKENIZER, SCHEDULER
from nodes.tokenizer.config import RoutingLimits
from nodes.tokenizer.routing.core import CacheChanged, LoadChanged, MembersChanged, RoutingCore

BLOCK: Final = 512
LEAST_S: Final = 1e-9


class Asked(msgspec.Struct):
    """A line of a trace: milliseconds since its start, and the chained ids of the prompt's blocks."""

    timestamp: int
    hash_ids: list[int]


class Hits(NamedTuple):
    """Shares of all blocks that were found in a pool, and on a disk."""

    cached: float
    restored: float
    seconds: float

    @property
    def all(self) -> float:
        return self.cached + self.restored


class Host:
    """A pool of `num_pages`, a disk of `num_slots`, and how long it has prompts to compute."""

    def __init__(self, name: str, num_pages: int, num_slots: int, *, is_told: bool) -> None:
        self.name = name
        self.cache = PrefixCache(num_pages + 1, BLOCK, group=name, epoch=1)
        self.disk = StoreIndex(num_slots) if num_slots else None
        # As the scheduler of a host with a disk sets it; without it tokenizers take what left the pool for gone.
        self.cache.events.is_on_disk = bool(num_slots) and is_told
        self.busy_until = 0.0

    def serve(self, tokens: "array[int]", now: float, rate: float) -> tuple[int, int]:
        """Blocks found in the pool, and blocks found on the disk; everything is in both afterwards, if it fits."""
        num_cached, hashes = self.cache.uncached(tokens)
        num_restored = 0
        if self.disk is not None:
            num_restored = len(self.disk.lookup(hashes)[0])
        computed = len(tokens) - (num_cached + num_restored) * BLOCK
        self.busy_until = max(now, self.busy_until) + computed / rate
        sequence = self.cache.start(tokens)
        if sequence.reserve(len(tokens)):
            sequence.advance(tokens[sequence.num_tokens : len(tokens) - 1])
        names = sequence.page_hashes
        sequence.release()
        if self.disk is not None:
            before = [root_hash(), *names[:-1]]
            # A request of a mesh tells of the pages that it published: those that were found are stored already.
            fresh = [PageName(*name) for name in zip(names, before, strict=True)][num_cached + num_restored :]
            for claim in self.disk.claim(fresh):
                self.disk.publish(claim, 1)
        return num_cached, num_restored


class Mesh:
    """Hosts of one group each, and the tokenizer that routes among them."""

    def __init__(self, num_hosts: int, num_pages: int, num_slots: int, rate: float, *, is_told: bool) -> None:
        names = [f"h{at}" for at in range(num_hosts)]
        self.hosts = {name: Host(name, num_pages, num_slots, is_told=is_told) for name in names}
        self.rate = rate
        self.num_pages = num_pages
        self.routing = RoutingCore(RoutingLimits(recent_s=LEAST_S))
        endpoint = Endpoint(control="", data="")
        schedulers = [
            Member(name, SCHEDULER, 1, endpoint, state=READY, attributes={"group": name, "page_size": BLOCK})
            for name in self.hosts
        ]
        self.routing.handle(MembersChanged([*schedulers, Member("detok", DETOKENIZER, 1, endpoint, state=READY)]))

    def serve(self, number: int, tokens: "array[int]", now: float) -> tuple[int, int]:
        for host in self.hosts.values():
            waiting = int(max(0.0, host.busy_until - now) * self.rate)
            # Pages that nobody holds are free to whoever comes.
            load = Load(
                num_running=0,
                num_waiting=0,
                num_free_pages=self.num_pages,
                num_pages=self.num_pages,
                num_waiting_tokens=waiting,
            )
            self.routing.handle(LoadChanged(host.name, load))
        route = self.routing.choose(str(number), tokens, "", (), now)
        host = self.hosts[route.decode]
        found = host.serve(tokens, now, self.rate)
        while (events := host.cache.events.drain_message()) is not None:
            self.routing.handle(CacheChanged(host.name, events))
        return found


def replay(
    trace: list[Asked], num_hosts: int, num_pages: int, times: int, rate: float, *, is_told: bool = True
) -> Hits:
    """`is_told`: tokenizers hear which pages went from a pool to its host's disk."""
    mesh = Mesh(num_hosts, num_pages, times * num_pages, rate, is_told=is_told)
    num_cached = num_restored = 0
    began = time.perf_counter()
    for number, asked in enumerate(trace):
        # Each block as tokens of one id, and one more, which is computed in any case.
        tokens = array("i", [0]) * 0
        for block in asked.hash_ids:
            tokens.extend(array("i", [block]) * BLOCK)
        tokens.append(0)
        cached, restored = mesh.serve(number, tokens, asked.timestamp / 1000)
        num_cached += cached
        num_restored += restored
    num_blocks = sum(len(asked.hash_ids) for asked in trace)
    return Hits(num_cached / num_blocks, num_restored / num_blocks, time.perf_counter() - began)


def lru(trace: list[Asked], capacity: int) -> float:
    """Hits of one LRU, in which a prompt's last block is older than its first."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for asked in trace:
        hits += _leading(asked.hash_ids, held)
        for block in reversed(asked.hash_ids):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits / sum(len(asked.hash_ids) for asked in trace)


def optimum(trace: list[Asked], capacity: int) -> float:
    """Hits if always that block goes which is asked for latest."""
    uses: dict[int, list[int]] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace[number].hash_ids:
            uses.setdefault(block, []).append(number)
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for asked in trace:
        hits += _leading(asked.hash_ids, held)
        for block in asked.hash_ids:
            uses[block].pop()
            after = uses[block][-1] if uses[block] else len(trace)
            held[block] = after
            heapq.heappush(heap, (-after, block))
        while len(held) > capacity:
            after, block = heapq.heappop(heap)
            # An entry of an earlier use says nothing any more.
            if held.get(block) == -after:
                del held[block]
    return hits / sum(len(asked.hash_ids) for asked in trace)


def _leading(blocks: list[int], held: "OrderedDict[int, None] | dict[int, int]") -> int:
    return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))


def main() -> None:
    """Prints one line for each size of the disks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="JSON lines with timestamp (ms) and hash_ids, as Mooncake's")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--pages", default="1250,5000", help="blocks in the pool of one host, several sizes")
    parser.add_argument("--disk", default="0,4,16", help="times as many on its disk")
    parser.add_argument("--rate", type=float, default=20_000.0, help="tokens that a host computes in a second")
    parser.add_argument("--untold", action="store_true", help="tokenizers do not know what is on disks")
    arguments = parser.parse_args()
    trace = [msgspec.json.decode(line, type=Asked) for line in arguments.trace.read_bytes().splitlines()]
    num_blocks = sum(len(asked.hash_ids) for asked in trace)
    print(f"{len(trace)} requests, {num_blocks} blocks; {arguments.hosts} hosts, {arguments.rate:.0f} tokens/s each")
    print("pages/host  disk   cached  restored  hits    one LRU  optimum   replayed in")
    for num_pages in map(int, arguments.pages.split(",")):
        for times in map(int, arguments.disk.split(",")):
            is_told = not arguments.untold
            hits = replay(trace, arguments.hosts, num_pages, times, arguments.rate, is_told=is_told)
            # The pool's pages are on the disk as well, so the larger of the two is what there is.
            capacity = arguments.hosts * num_pages * max(1, times)
            print(
                f"{num_pages:10}  x{times:<3}  {hits.cached:7.3f}  {hits.restored:7.3f}  {hits.all:6.3f}  "
                f"{lru(trace, capacity):7.3f}  {optimum(trace, capacity):7.3f}   {hits.seconds:5.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
