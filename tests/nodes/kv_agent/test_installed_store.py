"""An agent whose pages are kept by a store that another package brings: found, restored, given up, and said."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import StoreUnmade
from kvstore.pool.page_pool import ShmHost
from kvstore.protocol import OpenStore, PagesPulled, PoolHandle, TransferFailed
from kvstore.store.installed.calls import BoundedCalls
from kvstore.store.installed.installed_pages import THREADS, InstalledPages
from kvstore.store.installed.plugins import InstalledStore
from kvstore.store.installed.values import PageValues
from kvstore.store.place import StoreIdentity
from mesh.address import Address
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import ConfigError, DiskConfig, InstalledStoreConfig
from nodes.kv_agent.stores.installed import open_installed
from nodes.kv_agent.stores.opening import GATHER_S, OpenedStore, feed_store
from nodes.protocol import ReleaseMemory
from nodes.protocol.stores import FlushStores, ListStores
from tests.kvstore.store.installed import distribution
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.test_disk import NAMES, NUMERICS, TimedLane, dropped, fill, stores, told
from tests.nodes.kv_agent.test_restoring import OTHERS, find, have, restore
from tests.nodes.kv_agent.two_schedulers import LAYOUT, SIZE, World, config, ranks_of
from tests.nodes.recording_context import RecordingContext

pytestmark = pytest.mark.virtual_time

MODULE = """
import time

def broken(context):
    raise OSError("no such server")

def slow(context):
    time.sleep(1.0)
    made.append(Late())
    return made[-1]

made = []

from kvstore.store.installed.plugins import InstalledStore

class Late(InstalledStore):
    is_closed = False
    def contains(self, hashes): return []
    def get(self, hashes, buffers): return []
    def put(self, hashes, values): return []
    def remove(self, hashes): pass
    def close(self): self.is_closed = True
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("path")
    for path in distribution.write_example(folder / "example"):
        monkeypatch.syspath_prepend(path)
    distribution.write(folder / "bad", {"broken": "brought:broken", "slow": "brought:slow"})
    (folder / "bad" / "brought.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder / "bad")
    for name in ("brought", "kvmesh_folder_store"):
        monkeypatch.delitem(sys.modules, name, raising=False)


class Kept(InstalledStore):
    """In a dictionary."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.is_closed = False

    @override
    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        return [one in self.values for one in hashes]

    @override
    def get(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for one, buffer in zip(hashes, buffers, strict=True):
            buffer[:] = self.values[one]
        return [True] * len(hashes)

    @override
    def put(self, hashes: Sequence[bytes], values: Sequence[memoryview]) -> list[bool]:
        self.values.update(zip(hashes, map(bytes, values), strict=True))
        return [True] * len(hashes)

    @override
    def remove(self, hashes: Sequence[bytes]) -> None:
        for one in hashes:
            del self.values[one]

    @override
    def close(self) -> None:
        self.is_closed = True


class CallLane(TimedLane):
    """A thread for calls, which is not waited for."""

    @override
    def close(self) -> None:
        pass


class Server:
    """Opens the same store again and again, on virtual time; `is_stuck`: its calls do not return."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.lanes: list[TimedLane] = []
        self.waited_s = 0.0
        self.is_stuck = False
        self.key = b""

    async def open(self, config: Any, identity: StoreIdentity, wake: Callable[[], None]) -> OpenedStore:
        assert identity.host == "", "what one host has put, others may get"
        loop = asyncio.get_running_loop()
        calls = BoundedCalls(
            THREADS, config.deadline_s, lambda: loop.time() + self.waited_s, loop.call_later, wake, self.thread, self
        )
        self.copying = TimedLane()
        page_bytes = identity.page_bytes * identity.tp_size
        return feed_store(
            InstalledPages(self.kept, PageValues(identity, self.key), page_bytes, calls, self.copying), config
        )

    def thread(self, name: str) -> CallLane:
        self.lanes.append(CallLane())
        self.lanes[-1].is_stuck = self.is_stuck
        return self.lanes[-1]

    def stick(self, *, is_stuck: bool = True) -> None:
        self.is_stuck = is_stuck
        for lane in self.lanes:
            lane.is_stuck = is_stuck

    # what an agent that blocks waits for
    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        ready = [lane for lane in (self.copying, *self.lanes) if lane.waiting and not lane.is_stuck]
        if ready:
            ready[0].step()
        else:
            assert timeout is not None
            self.waited_s += timeout
        return True


DEADLINE_S = 2.0


def named() -> InstalledStoreConfig:
    return InstalledStoreConfig(name="folder", deadline_s=DEADLINE_S)


async def agent_of(world: World, server: Server, *groups: str, **changes: Any) -> KVAgent:
    agent = KVAgent(config(*groups, store=named(), **changes), world.host, open_store=server.open)
    await world.start(agent)
    return agent


async def stored(world: World, server: Server) -> tuple[KVAgent, Any]:
    """An agent whose store has `NAMES`, and its group's pool, which has nothing of them."""
    agent = await agent_of(world, server, "d")
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    fill([pool], OTHERS)
    return agent, pool


def calls(agent: KVAgent) -> dict[tuple[str, str], float]:
    """Of each name and outcome; only those that there were."""
    begins = "mesh_kv_store_calls_total"
    figures = {tuple(name.split('"')[1::2]): number for name, number in agent.stats().items() if begins in name}
    assert len(figures) == 20, "all of them are there from the start"
    return {name: number for name, number in figures.items() if number}


async def test_pages_are_kept_and_restored(world: World) -> None:
    server = Server()
    agent, pool = await stored(world, server)
    assert {name.page_hash for name in NAMES} == set(server.kept.values)
    found = await find(world)
    assert [len(prefix.slots) for prefix in found.found] == [6, 0]
    assert [miss.why for miss in found.found[1].missed] == ["never_stored"]
    await restore(world, found, [3, 4, 2])
    end = await world.d.ends()
    assert end == PagesPulled(grant_id=end.grant_id, num_pages=3, complete=True)
    assert have(pool, [3, 4, 2], NAMES[:3])
    assert have(pool, [1, 5, 6], [OTHERS[0], *OTHERS[4:6]]), "no other page was written"
    assert agent.transports.pulled_bytes["store"] == 3 * SIZE
    assert calls(agent) == {("contains", "done"): 1, ("get", "done"): 1, ("put", "done"): 1}
    await agent.stop()
    assert server.kept.is_closed


async def test_pages_of_all_ranks_are_one_value(world: World) -> None:
    server = Server()
    agent = await agent_of(world, server, pools=ranks_of("d", 2))
    handle, _ = await world.pool(world.d, "agent-0", "d")
    fill(agent.ranks["d"], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    assert {len(value) for value in server.kept.values.values()} == {64 + SIZE}


async def test_a_value_that_is_another_page_s_fails_its_copy_and_is_removed(world: World) -> None:
    server = Server()
    agent, pool = await stored(world, server)
    found = await find(world)
    server.kept.values[NAMES[1].page_hash] = server.kept.values[NAMES[2].page_hash]
    await restore(world, found, [3, 4, 2])
    assert await world.d.fails() == "corrupt_pages"
    await until(lambda: NAMES[1].page_hash not in server.kept.values, 5.0)
    assert have(pool, [4], [OTHERS[3]]), "memory of the pool has nothing of it"
    assert agent.stats()["mesh_kv_disk_corrupt_pages_total"] == 1
    found = await find(world)
    assert len(found.found[0].slots) == 1
    assert found.found[0].missed[0].why == "corrupt"


async def test_a_value_that_nobody_of_the_mesh_has_sealed_is_told_from_a_broken_one(world: World) -> None:
    server = Server()
    server.key = b"k" * 32
    agent, pool = await stored(world, server)
    found = await find(world)
    # Whoever reaches the store knows how values are made: name and checksum are right.
    (identity,) = agent.stores.stores.opened
    forged = bytes(PageValues(identity).seal(NAMES[1].page_hash, [memoryview(bytes(SIZE))]))
    server.kept.values[NAMES[1].page_hash] = forged
    await restore(world, found, [3, 4, 2])
    assert await world.d.fails() == "unsigned_pages"
    await until(lambda: NAMES[1].page_hash not in server.kept.values, 5.0)
    assert have(pool, [4], [OTHERS[3]]), "memory of the pool has nothing of it"
    figures = agent.stats()
    assert figures["mesh_kv_store_unsigned_pages_total"] == 1
    assert figures["mesh_kv_disk_corrupt_pages_total"] == 0
    assert (await find(world)).found[0].missed[0].why == "unsigned"


async def test_a_store_that_hangs_is_a_miss_in_time_and_then_off(world: World) -> None:
    server = Server()
    agent, pool = await stored(world, server)
    found = await find(world)
    server.stick()
    for number in range(1, 4):
        begun = agent.ctx.now()
        # Its asker gives up after 2 s, which is as long.
        with pytest.raises(Exception, match="deadline_exceeded"):
            await find(world)
        assert agent.ctx.now() - begun < 2.5
        await until(lambda number=number: calls(agent).get(("contains", "abandoned")) == number, 5.0)
    assert agent.stats()["mesh_kv_store_off"] == 0
    await restore(world, found, [3, 4, 2])
    assert (await world.d.until(lambda message: isinstance(message, TransferFailed))).code in (
        "read_failed",
        "deadline_exceeded",
    )
    await until(lambda: agent.core.num_live == 0, 5.0)
    assert have(pool, [3, 4, 2], [OTHERS[2], OTHERS[3], OTHERS[1]])
    assert agent.stats()["mesh_kv_store_off"] == 1
    server.stick(is_stuck=False)
    await asyncio.sleep(1.0)
    begun, num_calls = agent.ctx.now(), sum(calls(agent).values())
    assert (await find(world)).found[0].slots == []
    assert agent.ctx.now() - begun < 0.1, "nothing is asked any more"
    handle, _ = await world.pool(world.d, "agent-0", "d")
    world.d.ctx.tell("agent-0", told(handle, OTHERS))
    await until(lambda: dropped(agent) == {"read_only": 6}, 5.0)
    assert sum(calls(agent).values()) == num_calls + 1
    assert calls(agent)["contains", "not_made"] == 1
    (kept,) = (await world.ask(world.d, "agent-0", ListStores())).agents
    assert "4 calls were given up" in kept.stores[0].why_off


async def test_memory_is_released_while_the_store_hangs_with_pages_of_it(world: World) -> None:
    server = Server()
    agent, _ = await stored(world, server)
    server.stick()
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], OTHERS)
    world.d.ctx.tell("agent-0", told(handle, OTHERS))
    await asyncio.sleep(1.5 * GATHER_S)
    assert agent.stores is not None
    assert not agent.stores.is_writing("d"), "what hangs has copies"
    answer = await world.ask(world.d, "agent-0", ReleaseMemory(groups=["d"], keep_weights=True))
    assert [group.group for group in answer.groups] == ["d"]
    await until(lambda: dropped(agent) == {"write_failed": 6}, 5.0)


async def test_an_agent_ends_in_time_whatever_hangs(world: World) -> None:
    server = Server()
    agent, _ = await stored(world, server)
    found = await find(world)
    server.stick()
    await restore(world, found, [3, 4, 2])
    await agent.stop()
    assert 2.0 <= server.waited_s <= 3 * DEADLINE_S
    assert not server.kept.is_closed


async def test_what_an_operator_is_told_of_it(world: World) -> None:
    agent, _ = await stored(world, Server())
    (kept,) = (await world.ask(world.d, "agent-0", ListStores())).agents
    assert (kept.directory, kept.size_bytes) == ("the installed store folder", 0)
    (store,) = kept.stores
    assert (store.num_pages, store.num_slots, store.num_bytes, store.is_loaded) == (6, 0, 0, True)
    with pytest.raises(RemoteError, match="emptied by its own means") as refused:
        await world.ask(world.d, "agent-0", FlushStores())
    assert refused.value.code == "store_not_flushed"
    assert agent.stats()["mesh_kv_disk_slots"] == 0


def test_settings_of_a_store_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match=r"\(installed: broken, folder, (mooncake, )?slow\), not 'foldr'"):
        InstalledStoreConfig(name="foldr")
    with pytest.raises(ConfigError, match="above 0"):
        InstalledStoreConfig(name="folder", deadline_s=0)
    with pytest.raises(ConfigError, match="pools on devices cannot be stored"):
        config(pools=ranks_of("d", 1, "cuda"), store=named())
    with pytest.raises(ConfigError, match="both set"):
        config("d", store=named(), disk=DiskConfig(directory="/d", size_bytes=1))


IDENTITY = StoreIdentity(host="", layout_digest=LAYOUT.digest, page_bytes=SIZE, numerics=NUMERICS)


def test_one_that_cannot_be_made_is_said_to_who_opens_it() -> None:
    for name, why in (("broken", "no such server"), ("folder", "KeyError")):
        with pytest.raises(StoreUnmade, match=why):
            asyncio.run(open_installed(InstalledStoreConfig(name=name), IDENTITY, lambda: None))


def test_one_that_is_made_too_late_is_closed() -> None:
    begun = time.monotonic()
    with pytest.raises(StoreUnmade, match="was not made within"):
        asyncio.run(too_late())
    assert time.monotonic() - begun < 10.0


async def too_late() -> None:
    try:
        await open_installed(InstalledStoreConfig(name="slow"), IDENTITY, lambda: None, load_s=0.1)
    finally:
        brought = sys.modules["brought"]
        while not brought.made or not brought.made[0].is_closed:
            await asyncio.sleep(0.01)


def test_the_example_in_a_folder(tmp_path: Path) -> None:
    """Real files, real threads: a second agent finds what the first one stored."""
    (tmp_path / "pages").mkdir()
    store = InstalledStoreConfig(name="folder", options={"path": str(tmp_path / "pages")})
    host = ShmHost(tmp_path)

    async def life() -> tuple[dict[str, float], int]:
        agent = KVAgent(config("d", store=store, directory=str(tmp_path)), host)
        agent.ctx = RecordingContext(Address("agent-0", 1), None)  # type: ignore[arg-type]
        await agent.start()
        assert agent.stores is not None
        (pool,) = agent.ranks["d"]
        for page in range(1, pool.num_pages):
            pool.table().write(page, PageEntry(PageState.RUNNING, generation=7))
        fill([pool], NAMES)
        opened = await agent.stores.stores.open(agent.stores.stores.identity("d", NUMERICS))
        assert isinstance(opened, OpenedStore)
        before = asyncio.get_running_loop().create_future()
        opened.store.find([[name.page_hash for name in NAMES]], before.set_result)
        found = len((await before)[0].slots)
        handle = PoolHandle(group="d", agent="", path="", num_pages=1, layout=LAYOUT, incarnation=pool.info.incarnation)
        agent.stores.on_pages(told(handle))
        await agent.drain()
        figures = agent.stats()
        await agent.stop()
        return figures, found

    figures, found = asyncio.run(life())
    assert (figures["mesh_kv_disk_stored_pages_total"], found) == (6, 0)
    figures, found = asyncio.run(life())
    assert (figures["mesh_kv_disk_stored_pages_total"], found) == (0, 6)
    assert figures["mesh_kv_store_off"] == 0
