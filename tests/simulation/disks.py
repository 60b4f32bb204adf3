"""Scenarios in which agents keep pages on disk: whatever dies, each page that is stored is what its hash says.

The disk is one of `tests/kvstore/store`, which outlives agents; its threads are timers of the agent's process. Nothing
is read back while the mesh runs: what lies there is compared at the end.
"""

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import override

from kvstore.hashing import page_hash
from kvstore.store.heads import are_sound, decode_heads
from kvstore.store.page_store import PageStore
from kvstore.store.place import HEAD_BYTES, StoreIdentity
from kvstore.store.pool_writes import PoolWrites
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import DiskConfig, KVAgentConfig
from nodes.kv_agent.disk import DiskStores, OpenedStore, feed_store
from nodes.scheduler.config import SchedulerConfig
from tests.kvstore.store.faulty_files import FaultyFiles, SteppedLane
from tests.simulation import scenario
from tests.simulation.planting import Bug, bug
from tests.simulation.whole_mesh import SimulatedMesh

PAGE_SIZE = 16
MOST_SLOTS = 200


class DiskLane(SteppedLane):
    """Each piece of work takes a while, and is not done if the process dies before."""

    def __init__(self, draw: random.Random, most_s: float) -> None:
        super().__init__()
        self.draw, self.most_s = draw, most_s

    @override
    def submit(self, work: Callable[[], None]) -> None:
        super().submit(work)
        asyncio.get_running_loop().call_later(self.draw.uniform(0.0, self.most_s), self._step)

    def _step(self) -> None:
        # All were done when the store was closed.
        if self.waiting:
            self.step()


class DiskMesh(SimulatedMesh):
    """A mesh whose agents have one disk each; `files` are what lies on them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draw = random.Random(f"disk/{self.seed}")
        self.files: dict[StoreIdentity, FaultyFiles] = {}
        self.most_s = self.draw.choice((0.001, 0.3, 3.0))
        self.num_slots = self.draw.choice((5, 40, MOST_SLOTS))
        self.stores = self.draw.choice(("write_through", "write_through", "write_through_selective"))

    @override
    def _agent_config(self, groups: list[str]) -> KVAgentConfig:
        disk = DiskConfig(directory="/disk", size_bytes=1, bytes_per_s=self.draw.choice((0.0, 0.0, 4096.0)))
        return msgspec.structs.replace(super()._agent_config(groups), disk=disk)

    @override
    def _agent(self, agent: str, groups: list[str]) -> KVAgent:
        return KVAgent(self._agent_config(groups), self.memory_of(agent), open_store=self._open)

    @override
    def _scheduler(self, group: str, spec: Any) -> SchedulerConfig:
        return msgspec.structs.replace(super()._scheduler(group, spec), stores=self.stores)

    async def _open(self, config: DiskConfig, identity: StoreIdentity, wake: Callable[[], None]) -> OpenedStore:
        await asyncio.sleep(self.draw.uniform(0.0, 2 * self.most_s))
        page_bytes = identity.page_bytes * identity.tp_size
        files = self.files.setdefault(identity, FaultyFiles(self.num_slots, page_bytes, self.draw))
        first, second, third = (DiskLane(self.draw, self.most_s) for _ in range(3))
        return feed_store(PageStore(files, page_bytes, wake, lanes=(first, second, third)), config)

    @override
    async def stop(self) -> None:
        await super().stop()
        for identity, files in self.files.items():
            self.moments.counts["pages stored"] += require_right(identity, files)


def require_right(identity: StoreIdentity, files: FaultyFiles) -> int:
    """How many pages lie there. Each holds the tokens that its hash names, at one multiple of a page, at all ranks."""
    rows = decode_heads(bytes(files.seen["heads"]))
    num_stored = 0
    for slot, is_sound in enumerate(are_sound(rows, 0)):
        head = bytes(files.seen["heads"][slot * HEAD_BYTES :][:HEAD_BYTES])
        assert is_sound or not any(head), f"the head of slot {slot} is torn"
        if not any(head):
            continue
        num_stored += 1
        whole = files.seen["pages"][slot * files.page_bytes :][: files.page_bytes]
        for rank in range(identity.tp_size):
            words = array("I", bytes(whole[rank * identity.page_bytes :][: identity.page_bytes]))
            tokens, positions = words[:PAGE_SIZE], words[PAGE_SIZE:]
            assert page_hash(head[16:32], tokens.tobytes()) == head[:16], f"slot {slot} has another page's bytes"
            first = positions[0]
            assert first % PAGE_SIZE == 0
            assert list(positions) == list(range(first, first + PAGE_SIZE)), f"slot {slot} is a mixture"
    return num_stored


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    return scenario.run_seed(seed, suite="disks", kind=DiskMesh)


# planted bugs


def _never_compared(_: Any, _self: PoolWrites, _name: str, pages: Any) -> list[bool]:
    return [True] * len(pages)


def _compared_once(are_current: Any, self: PoolWrites, name: str, pages: Any) -> list[bool]:
    is_first = not any(pages == batch.pages for batch in self._batches.values())
    return are_current(self, name, pages) if is_first else [True] * len(pages)


def _of_any_pool(on_pages: Any, self: DiskStores, message: Any) -> None:
    pools = self._pools.get(message.group)
    if pools is not None:
        message = msgspec.structs.replace(message, incarnation=pools[0].info.incarnation)
    on_pages(self, message)


DISKS: dict[str, Bug] = {
    "generations are not compared before a write": bug(12, (PoolWrites, "_are_current", _never_compared)),
    "generations are not compared after a write": bug(12, (PoolWrites, "_are_current", _compared_once)),
}  # fmt: skip
