"""What operators ask an agent about its stores, and what a flush leaves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol import FindStored, OpenStore, StoredFound, StoredPrompt
from kvstore.store.directory import open_files
from kvstore.store.place import StoreFound, find_stores
from mesh.errors import RemoteError
from nodes.kv_agent.stores import answers
from nodes.kv_agent.stores.facts import look_into, with_others
from nodes.protocol.stores import FlushedStore, FlushStores, ListStores, StoreFacts, StoreList, StoresFlushed
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.test_disk import NAMES, NUMERICS, Disk, dropped, identity, opened, stores, told
from tests.nodes.kv_agent.two_schedulers import LAYOUT, SIZE, World, config

pytestmark = pytest.mark.virtual_time


async def ask(world: World, message: Any) -> Any:
    return await world.ask(world.d, "agent-0", message)


async def found_of(world: World) -> int:
    prompt = StoredPrompt(name="r", hashes=b"".join(name.page_hash for name in NAMES))
    answer = await ask(world, FindStored(group="d", numerics=NUMERICS, prompts=[prompt]))
    assert isinstance(answer, StoredFound)
    return len(answer.found[0].slots)


async def test_an_agent_without_a_disk_has_no_stores(world: World) -> None:
    await world.agents(config("d"))
    assert await ask(world, ListStores()) == StoreList(agents=[])
    assert await ask(world, FlushStores()) == StoresFlushed(flushed=[])


async def nothing(_: str) -> list[StoreFound]:
    return []


async def test_a_store_is_listed_with_what_became_of_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread's answer would come at a time of its own.
    monkeypatch.setattr(answers, "look_into", nothing)
    agent, handle, _ = await opened(world, Disk())
    world.d.ctx.tell("agent-0", told(handle))
    world.d.ctx.tell("agent-0", told(handle, incarnation=handle.incarnation + 1))
    await stores(agent, 6)
    assert await found_of(world) == 6
    await asyncio.sleep(3.0)
    (kept,) = (await ask(world, ListStores())).agents
    assert (kept.agent, kept.directory, kept.size_bytes) == ("agent-0", "/disk", 1 << 20)
    assert kept.dropped == {name: 6 * (name == "changed") for name in dropped_names(agent)}
    (store,) = kept.stores
    assert (store.folder, store.is_open, store.is_loaded, store.groups) == (identity().folder, True, True, ["d"])
    assert (store.layout, store.numerics) == (LAYOUT.digest.hex(), NUMERICS)
    assert (store.num_pages, store.num_slots, store.page_bytes) == (6, 32, SIZE)
    assert store.used_s == pytest.approx(3.0, abs=0.1)
    assert {name: number for name, number in store.counts.items() if number} == {"queried": 6, "found": 6, "written": 6}


def dropped_names(agent: Any) -> list[str]:
    begins = "mesh_kv_disk_dropped_pages_total"
    return [name.split('"')[1] for name in agent.stats() if name.startswith(begins)]


async def test_a_flush_forgets_what_is_stored_and_drops_what_waits(world: World) -> None:
    disk = Disk()
    agent, handle, _ = await opened(world, disk)
    world.d.ctx.tell("agent-0", told(handle, NAMES[:3]))
    await stores(agent, 3)
    disk.lanes[2].is_stuck = True
    world.d.ctx.tell("agent-0", told(handle))
    await until(lambda: bool(disk.lanes[2].waiting), 5.0)
    flushing = asyncio.ensure_future(ask(world, FlushStores()))
    await asyncio.sleep(0.5)
    assert not flushing.done(), "a restart would find them"
    assert await found_of(world) == 0
    disk.lanes[2].is_stuck = False
    assert await flushing == StoresFlushed(
        flushed=[FlushedStore(agent="agent-0", folder=identity().folder, num_pages=3)]
    )
    await until(lambda: dropped(agent) == {"flushed": 3}, 5.0)
    assert disk.stored(NAMES) == 0
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 9)
    assert (await found_of(world), disk.stored(NAMES)) == (6, 6)


async def test_only_the_stores_that_are_named_are_flushed(world: World) -> None:
    disk = Disk()
    agent, handle, _ = await opened(world, disk)
    await ask(world, OpenStore(group="d", numerics="other"))
    for numerics in (NUMERICS, "other"):
        world.d.ctx.tell("agent-0", told(handle, numerics=numerics))
    await stores(agent, 12)
    theirs = identity(numerics="other")
    answer = await ask(world, FlushStores(folders=[theirs.folder, "kv-of-nobody"]))
    assert [(one.folder, one.num_pages) for one in answer.flushed] == [(theirs.folder, 6)]
    assert [disk.stored(NAMES, one) for one in (identity(), theirs)] == [6, 0]


async def test_a_flush_is_refused_while_the_store_is_read_and_told_if_the_disk_fails(world: World) -> None:
    disk = Disk()
    await opened(world, disk)
    with pytest.raises(RemoteError, match="still being read") as refused:
        await ask(world, FlushStores())
    assert (refused.value.code, refused.value.retryable) == ("store_loading", True)
    await asyncio.sleep(0.1)
    (files,) = disk.files.values()

    def fail(called: str, first: int) -> None:
        if called == "write_heads":
            raise OSError(5, "the sector is bad")

    files.fail = fail
    with pytest.raises(RemoteError, match="the sector is bad") as refused:
        await ask(world, FlushStores())
    assert (refused.value.code, refused.value.retryable) == ("store_not_flushed", False)


def test_stores_of_others_are_listed_with_what_their_files_say(tmp_path: Path) -> None:
    ours, theirs = identity(page_bytes=4096), identity(numerics="other", page_bytes=4096)
    for one in (ours, theirs):
        open_files(tmp_path, one, 1 << 20).close()
    (tmp_path / "kv-damaged").mkdir()
    for name in ("heads", "pages"):
        (tmp_path / "kv-damaged" / name).write_bytes(b"nothing of ours")
    opened_here = StoreFacts(folder=ours.folder, is_open=True, num_slots=5, numerics=NUMERICS, used_s=-1.0)
    found = asyncio.run(look_into(str(tmp_path)))
    own, *others = with_others([opened_here], found)
    assert (own.folder, own.num_slots) == (ours.folder, 5)
    assert 0 <= own.used_s < 60, "when a head was written last"
    assert own.num_bytes >= 1 << 19
    other, damaged = sorted(others, key=lambda one: not one.numerics)
    assert (other.folder, other.is_open, other.numerics, other.page_bytes) == (theirs.folder, False, "other", 4096)
    assert (damaged.folder, damaged.layout, damaged.numerics) == ("kv-damaged", "", "")
    assert len(find_stores(tmp_path)) == 3
    assert asyncio.run(look_into(str(tmp_path / "nowhere"))) == []
