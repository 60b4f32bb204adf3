"""An agent that keeps pages on disk: what schedulers tell it, what becomes of that, and how it ends."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import StoreBusy, StoreError, StoreExhaustedSpace
from kvstore.pool.page_pool import PagePool, ShmHost
from kvstore.protocol import OpenStore, PoolHandle, StoreOpened, StorePages
from kvstore.store.index import PageName
from kvstore.store.page_store import PageStore
from kvstore.store.place import StoreIdentity
from mesh.address import Address
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import ConfigError, DiskConfig
from nodes.kv_agent.stores.opening import AGAIN_S, GATHER_S, OpenedStore, feed_store
from nodes.protocol import ReleaseMemory, ResumeMemory
from tests.kvstore.store.faulty_files import FaultyFiles, SteppedLane
from tests.kvstore.store.pages import blank, chain, content
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.two_schedulers import LAYOUT, SIZE, Holder, World, becomes, config, ranks_of
from tests.nodes.recording_context import RecordingContext

pytestmark = pytest.mark.virtual_time

NUMERICS = "torch/avx2"
NAMES = chain("a", 6)
DISK = DiskConfig(directory="/disk", size_bytes=1 << 20, host="one")


class TimedLane(SteppedLane):
    """Each piece of work is done a millisecond after it was given, or when the disk no longer `is_stuck`."""

    is_stuck = False

    @override
    def submit(self, work: Callable[[], None]) -> None:
        super().submit(work)
        asyncio.get_running_loop().call_later(0.001, self._step_once)

    def _step_once(self) -> None:
        if self.is_stuck:
            asyncio.get_running_loop().call_later(0.001, self._step_once)
        elif self.waiting:
            self.step()


class Disk:
    """Opens stores in memory; what one has written is there for the next that opens it."""

    def __init__(self, num_slots: int = 32) -> None:
        self.num_slots = num_slots
        self.files: dict[StoreIdentity, FaultyFiles] = {}
        self.lanes: list[TimedLane] = []
        self.refusal: StoreError | None = None
        self.num_opened = 0
        self.takes_s = 0.0

    async def open(self, config: DiskConfig, identity: StoreIdentity, wake: Callable[[], None]) -> OpenedStore:
        await asyncio.sleep(self.takes_s)
        if self.refusal is not None:
            raise self.refusal
        self.num_opened += 1
        page_bytes = identity.page_bytes * identity.tp_size
        files = self.files.setdefault(identity, FaultyFiles(self.num_slots, page_bytes))
        lanes = TimedLane(), TimedLane(), TimedLane()
        self.lanes += lanes
        return feed_store(PageStore(files, page_bytes, wake, lanes=lanes), config)

    def stored(self, names: list[PageName], identity: StoreIdentity | None = None) -> int:
        """How many of `names` another process would find, each with the bytes that its hash says."""
        ((identity, files),) = self.files.items() if identity is None else [(identity, self.files[identity])]
        lanes = SteppedLane(), SteppedLane(), SteppedLane()
        page_bytes = identity.page_bytes * identity.tp_size
        store = PageStore(files, page_bytes, lambda: None, lanes=lanes)
        lanes[2].close()
        store.poll()
        slots, sequences = store.lookup([name.page_hash for name in names])
        read = store.read(slots, sequences, blank(len(slots), page_bytes))
        for lane in lanes:
            lane.close()
        store.poll()
        assert read is not None
        assert not any(read.outcomes)
        for page, name in zip(read.pages, names, strict=False):
            assert bytes(page[0]) == content(name.page_hash, page_bytes), "a page is stored as another one"
        return len(slots)


def identity(**changes: Any) -> StoreIdentity:
    fields = {"host": "one", "layout_digest": LAYOUT.digest, "page_bytes": SIZE, "numerics": NUMERICS}
    return StoreIdentity(**(fields | changes))


def fill(pools: list[PagePool], names: list[PageName], first: int = 1) -> None:
    """The pages from `first` on have the content that their names say, at all ranks."""
    for page, name in enumerate(names, first):
        whole = content(name.page_hash, sum(pool.layout.page_bytes for pool in pools))
        for rank, pool in enumerate(pools):
            size = pool.layout.page_bytes
            pool.page(page)[:] = whole[rank * size : (rank + 1) * size]


def told(handle: PoolHandle, names: list[PageName] = NAMES, first: int = 1, **changes: Any) -> StorePages:
    fields: dict[str, Any] = {
        "group": handle.group,
        "incarnation": handle.incarnation,
        "numerics": NUMERICS,
        "pages": list(range(first, first + len(names))),
        "generations": [7] * len(names),
        "hashes": [name.page_hash for name in names],
        "parents": [name.parent_hash for name in names],
    }
    return StorePages(**(fields | changes))


async def agent_of(world: World, disk: Disk, *groups: str, kept: DiskConfig = DISK, **changes: Any) -> KVAgent:
    settings = config(*groups, disk=kept, **changes)
    agent = KVAgent(settings, world.host, open_store=disk.open)
    await world.start(agent)
    return agent


def dropped(agent: KVAgent) -> dict[str, float]:
    """Pages that were not stored, by reason; only reasons that there were."""
    begins = "mesh_kv_disk_dropped_pages_total"
    figures = {name: number for name, number in agent.stats().items() if name.startswith(begins)}
    assert len(figures) == 6, "each reason is there from the start"
    return {name.split('"')[1]: number for name, number in figures.items() if number}


async def stores(agent: KVAgent, count: int) -> None:
    await until(lambda: agent.stats()["mesh_kv_disk_stored_pages_total"] == count, 10.0)


async def opened(world: World, disk: Disk) -> tuple[KVAgent, Any, Any]:
    """An agent whose store is open, and its group's pool, the pages of which are those of `NAMES`."""
    agent = await agent_of(world, disk, "d")
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    return agent, handle, pool


async def test_without_the_setting_there_is_no_store(world: World) -> None:
    [agent] = await world.agents(config("d"))
    with pytest.raises(RemoteError, match="no_store"):
        await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    assert not [name for name in agent.stats() if "disk" in name]
    assert agent.stores is None


async def test_pages_are_stored_once_the_store_is_open(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, "d", "p")
    figures = agent.stats()
    assert {number for name, number in figures.items() if "disk" in name} == {0.0}
    answers = [await world.ask(world.d, "agent-0", OpenStore(group=group, numerics=NUMERICS)) for group in "dp"]
    assert answers == [StoreOpened(group=group, num_pages=32) for group in "dp"]
    assert disk.num_opened == 1, "groups with pages alike share it"
    for group, scheduler in (("d", world.d), ("p", world.p)):
        handle, pool = await world.pool(scheduler, "agent-0", group)
        fill([pool], NAMES)
        scheduler.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    figures = agent.stats()
    assert (figures["mesh_kv_disk_pages"], figures["mesh_kv_disk_slots"]) == (6, 32)
    assert figures["mesh_kv_disk_stored_bytes_total"] == 6 * SIZE
    assert dropped(agent) == {}, "what is there already is not dropped"
    assert list(disk.files) == [identity()]
    assert disk.stored(NAMES) == 6


async def test_what_computes_otherwise_has_a_store_of_its_own(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, "d")
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], NAMES)
    for numerics in (NUMERICS, "torch/avx512"):
        await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=numerics))
    world.d.ctx.tell("agent-0", told(handle, numerics="torch/avx512"))
    await stores(agent, 6)
    assert [disk.stored(NAMES, identity(numerics=one)) for one in (NUMERICS, "torch/avx512")] == [0, 6]


async def test_pages_of_all_ranks_are_stored_together(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, pools=ranks_of("d", 2))
    handle, _ = await world.pool(world.d, "agent-0", "d")
    fill(agent.ranks["d"], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    assert list(disk.files) == [identity(page_bytes=SIZE // 2, tp_size=2)]
    assert disk.stored(NAMES) == 6


@pytest.mark.parametrize("kind", [StoreBusy, StoreExhaustedSpace])
async def test_a_store_that_cannot_be_opened_is_said_to_who_asks(world: World, kind: type[StoreError]) -> None:
    disk = Disk()
    disk.refusal = kind("nothing can be kept there: make room")
    agent = await agent_of(world, disk, "d")
    opening = OpenStore(group="d", numerics=NUMERICS)
    with pytest.raises(RemoteError, match="make room") as refused:
        await world.ask(world.d, "agent-0", opening)
    assert (refused.value.code, refused.value.retryable) == (kind.code, False)
    with pytest.raises(RemoteError, match="unknown_group"):
        await world.ask(world.d, "agent-0", OpenStore(group="x", numerics=NUMERICS))
    handle, _ = await world.pool(world.d, "agent-0", "d")
    world.d.ctx.tell("agent-0", told(handle))
    await until(lambda: bool(dropped(agent)), 5.0)
    assert dropped(agent) == {"not_open": 6}
    # Another start finds room.
    disk.refusal = None
    assert await world.ask(world.d, "agent-0", opening) == StoreOpened(group="d", num_pages=32)


async def test_a_store_that_could_not_be_opened_is_tried_again_after_a_while(world: World) -> None:
    """By an agent that has replaced another one, while what the store connects to was away."""
    disk = Disk()
    disk.refusal = StoreBusy("away")
    agent = await agent_of(world, disk, "d")
    handle, _ = await world.pool(world.d, "agent-0", "d")
    world.d.ctx.tell("agent-0", told(handle, NAMES[:1]))
    await until(lambda: dropped(agent) == {"not_open": 1}, 5.0)
    disk.refusal = None
    await asyncio.sleep(AGAIN_S - 1.0)
    world.d.ctx.tell("agent-0", told(handle, NAMES[:1]))
    await until(lambda: dropped(agent) == {"not_open": 2}, 5.0)
    assert disk.num_opened == 0, "not for each page that is told"
    await asyncio.sleep(1.0)
    world.d.ctx.tell("agent-0", told(handle, NAMES[:1]))
    await until(lambda: disk.num_opened == 1, 5.0)


async def test_an_agent_that_replaces_another_opens_the_store_when_it_is_told_of_pages(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, "d", unlink_on_stop=False)
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    world.d.ctx.tell("agent-0", told(handle, NAMES[:3]))
    await stores(agent, 3)
    world.network.crash(Address("agent-0", 1))
    for opened in agent.ranks.values():
        opened[0].close()
    second = KVAgent(config("d", disk=DISK, unlink_on_stop=False), world.host, open_store=disk.open)
    await world.add("agent-0", second, epoch=2)
    await world.sees("D", "agent-0", 2)
    world.d.ctx.tell("agent-0", told(handle, NAMES[3:4], first=4))
    await until(lambda: disk.num_opened == 2, 5.0)
    await until(lambda: second.stats()["mesh_kv_disk_pages"] == 3, 5.0)
    assert dropped(second) == {"not_open": 1}, "it could not wait for the disk"
    world.d.ctx.tell("agent-0", told(handle, NAMES[3:], first=4))
    await stores(second, 3)
    assert disk.stored(NAMES) == 6


async def test_what_is_told_of_another_pool_is_not_stored(world: World) -> None:
    disk = Disk()
    agent, handle, _ = await opened(world, disk)
    world.d.ctx.tell("agent-0", told(handle, incarnation=handle.incarnation + 1))
    world.d.ctx.tell("agent-0", told(handle, group="x"))
    # Pages that were given to others, and numbers that there are not.
    world.d.ctx.tell("agent-0", told(handle, NAMES[:2], generations=[6, 8]))
    world.d.ctx.tell("agent-0", told(handle, NAMES[:2], pages=[99, -1]))
    world.d.ctx.tell("agent-0", told(handle, NAMES[:1], hashes=[b"short"]))
    await until(lambda: dropped(agent).get("changed") == 17, 5.0)
    await asyncio.sleep(0.1)
    assert agent.stats()["mesh_kv_disk_stored_pages_total"] == 0


async def test_a_page_that_is_used_again_while_it_is_written_is_not_stored(world: World) -> None:
    disk = Disk()
    agent, handle, pool = await opened(world, disk)
    await asyncio.sleep(0.1)
    disk.lanes[2].is_stuck = True
    world.d.ctx.tell("agent-0", told(handle))
    await until(lambda: bool(disk.lanes[2].waiting), 5.0)
    pool.table().write(3, PageEntry(PageState.RUNNING, generation=8))
    pool.page(3)[:] = b"x" * SIZE
    disk.lanes[2].is_stuck = False
    await stores(agent, 5)
    assert dropped(agent) == {"changed": 1}
    assert disk.stored(NAMES) == 2, "up to the page that is missing"


async def test_a_release_waits_for_writes_and_nothing_is_stored_meanwhile(world: World) -> None:
    disk = Disk()
    world.d = Holder()
    agent, handle, pool = await opened(world, disk)
    await asyncio.sleep(0.1)
    disk.lanes[2].is_stuck = True
    world.d.ctx.tell("agent-0", told(handle))
    await until(lambda: bool(disk.lanes[2].waiting), 5.0)

    async def ask(message: Any) -> Any:
        return await world.ask(world.d, "agent-0", message)

    (found,) = (await ask(ReleaseMemory(groups=["d"]))).groups
    await asyncio.sleep(1.0)
    (found,) = (await ask(ReleaseMemory(groups=["d"]))).groups
    assert found.state == "releasing", "the disk still reads its memory"
    disk.lanes[2].is_stuck = False
    await becomes(ask, ReleaseMemory(groups=["d"]), "released")
    assert dropped(agent) == {"changed": 6}
    world.d.ctx.tell("agent-0", told(handle))
    await until(lambda: dropped(agent) == {"changed": 12}, 5.0)
    await becomes(ask, ResumeMemory(groups=["d"]), "held")
    # Generations of the new pool are the old one's, and so are its page numbers.
    again, pool = await world.pool(world.d, "agent-0", "d")
    world.d.ctx.tell("agent-0", told(handle))
    await until(lambda: dropped(agent) == {"changed": 18}, 5.0)
    fill([pool], NAMES)
    world.d.ctx.tell("agent-0", told(again))
    await stores(agent, 6)
    assert disk.stored(NAMES) == 6


async def test_draining_waits_until_the_queue_is_written(world: World) -> None:
    disk = Disk()
    # A page each second.
    agent = await agent_of(world, disk, "d", kept=DiskConfig(directory="/d", size_bytes=1, bytes_per_s=SIZE))
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    await asyncio.sleep(0.1)
    began = agent.ctx.now()
    world.d.ctx.tell("agent-0", told(handle, NAMES[:1]))
    await asyncio.sleep(2 * GATHER_S)
    assert agent.stats()["mesh_kv_disk_queued_pages"] == 0
    # The one before it has the disk for a second.
    world.d.ctx.tell("agent-0", told(handle, NAMES[1:], 2))
    await asyncio.sleep(2 * GATHER_S)
    assert agent.stats()["mesh_kv_disk_queued_pages"] == len(NAMES) - 1
    await agent.drain()
    assert agent.ctx.now() - began > 0.9, "no faster than it may"
    assert agent.stats()["mesh_kv_disk_queued_pages"] == 0
    assert disk.stored(NAMES) == 6


async def test_what_waits_when_it_stops_is_not_stored_and_the_files_are_closed(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, "d", kept=DiskConfig(directory="/d", size_bytes=1, bytes_per_s=1.0))
    handle, pool = await world.pool(world.d, "agent-0", "d")
    fill([pool], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    await asyncio.sleep(0.1)
    for first, name in enumerate(NAMES, 1):
        world.d.ctx.tell("agent-0", told(handle, [name], first))
        await asyncio.sleep(1.1 * GATHER_S)
    await agent.stop()
    (files,) = disk.files.values()
    assert files.is_closed
    assert disk.stored(NAMES) == 1


async def test_a_queue_that_is_full_and_a_disk_that_fails_are_counted(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, "d")
    handle, pool = await world.pool(world.d, "agent-0", "d")
    names = chain("b", 11)
    fill([pool], names)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    (files,) = disk.files.values()

    def fail(_name: str, _first: int) -> None:
        raise OSError(errno.EIO, "it fails")

    await asyncio.sleep(0.1)
    files.fail = fail
    for first, name in enumerate(names, 1):
        world.d.ctx.tell("agent-0", told(handle, [name], first))
        await asyncio.sleep(1.1 * GATHER_S)
    assert dropped(agent) == {"write_failed": 8, "read_only": 3}
    assert agent.stats()["mesh_kv_disk_read_only"] == 1
    assert agent.stores is not None
    (opened,) = agent.stores.stores.opened.values()
    opened.writes.counts["queue full"] += 2
    assert dropped(agent)["queue_full"] == 2


@pytest.mark.parametrize("waiting", [1, 3])
async def test_who_asks_while_it_is_opened_waits_for_the_same(world: World, waiting: int) -> None:
    disk = Disk()
    disk.takes_s = 1.0
    await agent_of(world, disk, "d")
    opening = OpenStore(group="d", numerics=NUMERICS)
    answers = await asyncio.gather(*(world.ask(world.d, "agent-0", opening) for _ in range(waiting)))
    assert answers == [StoreOpened(group="d", num_pages=32)] * waiting
    assert disk.num_opened == 1


def test_settings_of_a_disk_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        DiskConfig(directory="disk", size_bytes=1)
    with pytest.raises(ConfigError, match="at least 1"):
        DiskConfig(directory="/disk", size_bytes=0)
    with pytest.raises(ConfigError, match="pools on devices cannot be stored"):
        config(pools=ranks_of("d", 1, "cuda"), disk=DISK)


def test_numpy_comes_with_the_first_store_alone() -> None:
    code = "import sys, nodes.kv_agent.actor; assert 'numpy' not in sys.modules, 'the zygote would have its threads'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_store_in_a_directory(tmp_path: Path) -> None:
    """Real files, real threads: a second agent finds what the first one stored."""
    tmp_path.chmod(0o700)
    (tmp_path / "disk").mkdir(0o700)
    disk = DiskConfig(directory=str(tmp_path / "disk"), size_bytes=64 * 4096)
    host = ShmHost(tmp_path)

    async def life(pages: list[PageName]) -> dict[str, float]:
        agent = KVAgent(config("d", disk=disk, directory=str(tmp_path)), host)
        agent.ctx = RecordingContext(Address("agent-0", 1), None)  # type: ignore[arg-type]
        await agent.start()
        assert agent.stores is not None
        (pool,) = agent.ranks["d"]
        for page in range(1, pool.num_pages):
            pool.table().write(page, PageEntry(PageState.RUNNING, generation=7))
        fill([pool], pages)
        opened = await agent.stores.stores.open(agent.stores.stores.identity("d", NUMERICS))
        assert isinstance(opened, OpenedStore)
        handle = PoolHandle(group="d", agent="", path="", num_pages=1, layout=LAYOUT, incarnation=pool.info.incarnation)
        while not opened.store.is_loaded:
            await asyncio.sleep(0.001)
        agent.stores.on_pages(told(handle, pages))
        await agent.drain()
        figures = agent.stats()
        await agent.stop()
        return figures

    assert asyncio.run(life(NAMES))["mesh_kv_disk_stored_pages_total"] == 6
    figures = asyncio.run(life(NAMES))
    assert (figures["mesh_kv_disk_pages"], figures["mesh_kv_disk_stored_pages_total"]) == (6, 0)
