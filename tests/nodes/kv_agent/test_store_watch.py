"""A store whose files are taken away: who is told, what is found meanwhile, and how often it is tried to open it."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import StoreMissing
from kvstore.pool.page_pool import ShmHost
from kvstore.protocol import FindStored, ListStoredPages, OpenStore, StoredPagesListed, StoredPrompt
from mesh.address import Address
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import DiskConfig
from nodes.kv_agent.stores import answers, watch
from nodes.kv_agent.stores.opening import OpenedStore
from nodes.kv_agent.stores.watch import LOOK_S, MOST_PAUSE_S
from nodes.protocol.stores import FlushStores, ListStores
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.test_disk import NAMES, NUMERICS, Disk, agent_of, dropped, opened, stores, told
from tests.nodes.kv_agent.test_stores_asked import nothing
from tests.nodes.kv_agent.two_schedulers import World, config
from tests.nodes.recording_context import RecordingContext

pytestmark = pytest.mark.virtual_time

GONE = "the folder was removed"


async def found(world: World) -> tuple[int, list[tuple[str, int]]]:
    prompt = StoredPrompt(name="one", hashes=b"".join(name.page_hash for name in NAMES))
    answer = await world.ask(world.d, "agent-0", FindStored(group="d", numerics=NUMERICS, prompts=[prompt]))
    (prefix,) = answer.found
    return len(prefix.slots), [(run.why, run.num) for run in prefix.missed]


async def test_what_is_gone_is_told_everywhere_and_found_again_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "look_into", nothing)
    disk = Disk()
    agent, handle, _ = await opened(world, disk)
    world.d.ctx.tell("agent-0", told(handle, NAMES[:5]))
    await stores(agent, 5)
    assert await found(world) == (5, [("never_stored", 1)])
    (files,) = disk.files.values()
    tried_at: list[float] = []

    def refuse() -> None:
        tried_at.append(asyncio.get_running_loop().time())
        raise StoreMissing("make this directory first")

    files.again, files.why_gone = refuse, GONE
    began = asyncio.get_running_loop().time()
    await until(lambda: agent.stats()["mesh_kv_disk_off"] == 1, 1.5 * LOOK_S)
    await until(lambda: world.d.changed == ["d"], 5.0)
    assert agent.stats()["mesh_kv_disk_pages"] == 0
    assert await found(world) == (0, [("not_open", 6)])
    with pytest.raises(RemoteError, match="store_loading"):
        await world.ask(world.d, "agent-0", ListStoredPages(group="d", numerics=NUMERICS))
    with pytest.raises(RemoteError, match="store_loading"):
        await world.ask(world.d, "agent-0", FlushStores())
    (kept,) = (await world.ask(world.d, "agent-0", ListStores())).agents
    (store,) = kept.stores
    assert (store.why_off, store.num_bytes, store.is_loaded) == ("make this directory first", 0, False)
    world.d.ctx.tell("agent-0", told(handle, NAMES[5:], 6))
    await until(lambda: dropped(agent) == {"not_open": 1}, 5.0)
    await asyncio.sleep(4 * MOST_PAUSE_S)
    pauses = [later - at for at, later in zip([began, *tried_at], tried_at, strict=False)]
    assert len(tried_at) < 10
    assert max(pauses) <= MOST_PAUSE_S + LOOK_S
    assert world.d.changed == ["d"], "it is as gone as before"
    files.again = lambda: None
    await until(lambda: agent.stats()["mesh_kv_disk_off"] == 0, MOST_PAUSE_S + 2 * LOOK_S)
    await until(lambda: world.d.changed == ["d", "d"], 5.0)
    assert await found(world) == (5, [("never_stored", 1)])
    listed = await world.ask(world.d, "agent-0", ListStoredPages(group="d", numerics=NUMERICS))
    assert isinstance(listed, StoredPagesListed)
    assert len(listed.hashes) == 5 * 16
    world.d.ctx.tell("agent-0", told(handle, NAMES[5:], 6))
    await stores(agent, 6)
    assert disk.stored(NAMES) == 6


async def test_a_group_whose_pages_are_in_another_store_is_told_nothing(world: World) -> None:
    disk = Disk()
    agent = await agent_of(world, disk, "d")
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    await until(lambda: len(disk.files) == 1, 5.0)
    with pytest.raises(RemoteError, match="unknown_group"):
        await world.ask(world.p, "agent-0", OpenStore(group="p", numerics=NUMERICS))
    (files,) = disk.files.values()
    files.why_gone = GONE
    await until(lambda: world.d.changed == ["d", "d"], 3 * LOOK_S)
    assert world.p.changed == []
    assert agent.stats()["mesh_kv_disk_off"] == 0


async def test_who_routes_learns_of_a_flush_too(world: World) -> None:
    agent, handle, _ = await opened(world, Disk())
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    await world.ask(world.d, "agent-0", FlushStores())
    await until(lambda: world.d.changed == ["d"], 5.0)


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real files and threads."""
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    tmp_path.chmod(0o700)
    root = tmp_path / "disk"
    root.mkdir(0o700)

    async def life() -> None:
        kept = DiskConfig(directory=str(root), size_bytes=64 * 4096)
        agent = KVAgent(config("d", disk=kept, directory=str(tmp_path)), ShmHost(tmp_path))
        context: Any = RecordingContext(Address("agent-0", 1), None)  # type: ignore[arg-type]
        agent.ctx = context
        await agent.start()
        assert agent.stores is not None
        found = await agent.stores.stores.open(agent.stores.stores.identity("d", NUMERICS))
        assert isinstance(found, OpenedStore)
        await until(lambda: found.store.is_loaded, 20.0)
        shutil.rmtree(root)
        await until(lambda: "make this directory first" in found.store.why_off, 20.0)
        root.mkdir(0o700)
        await until(lambda: found.store.is_loaded, 20.0)
        assert [path.name for path in root.iterdir()] == [agent.stores.stores.identity("d", NUMERICS).folder]
        await agent.stop()

    asyncio.run(life())
