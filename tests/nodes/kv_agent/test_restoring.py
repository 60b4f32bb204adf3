"""Pages that an agent reads from its disk into a pool: what it finds, and what becomes of a grant that names slots."""

import asyncio
from typing import Any

import pytest

from kvstore.pool.page_pool import PagePool
from kvstore.protocol import (
    CloseGrant,
    FindStored,
    GrantClosed,
    ListStoredPages,
    MissedPages,
    OpenGrants,
    OpenStore,
    PagesPulled,
    StoredFound,
    StoredPages,
    StoredPagesListed,
    StoredPrefix,
    StoredPrompt,
    TransferFailed,
)
from kvstore.store.index import PageName
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.protocol import ReleaseMemory
from nodes.protocol.stores import FlushStores
from tests.kvstore.store.pages import chain, content
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.test_disk import NAMES, NUMERICS, Disk, agent_of, dropped, fill, opened, stores, told
from tests.nodes.kv_agent.two_schedulers import SIZE, World, grant, ranks_of

pytestmark = pytest.mark.virtual_time

OTHERS = chain("b", 6)


@pytest.fixture
def disk() -> Disk:
    return Disk()


async def stored(world: World, disk: Disk) -> tuple[KVAgent, PagePool]:
    """An agent with `NAMES` on disk, and its group's pool, which has nothing of them."""
    agent, handle, pool = await opened(world, disk)
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    fill([pool], OTHERS)
    return agent, pool


async def find(world: World, names: list[PageName] = NAMES, numerics: str = NUMERICS) -> StoredFound:
    hashes = b"".join(name.page_hash for name in names)
    prompts = [StoredPrompt(name="one", hashes=hashes), StoredPrompt(name="none", hashes=OTHERS[0].page_hash)]
    return await world.ask(world.d, "agent-0", FindStored(group="d", numerics=numerics, prompts=prompts))


async def restore(world: World, found: StoredFound, pages: list[int], **changes: Any) -> None:
    """Ask for a grant of these pages, into which as many of what was found are read."""
    prefix = found.found[0]
    fields: dict[str, Any] = {
        "source": found.source,
        "incarnation": found.incarnation,
        "slots": prefix.slots[: len(pages)],
        "sequences": prefix.sequences[: len(pages)],
    }
    asked = grant(pages)
    lent = {name: getattr(asked, name) for name in asked.__struct_fields__} | {
        "stored": StoredPages(**(fields | changes))
    }
    answer = await world.ask(world.d, "agent-0", OpenGrants(grants=[type(asked)(**lent)]))
    assert not getattr(answer, "refused", [])


def have(pool: PagePool, pages: list[int], names: list[PageName]) -> bool:
    return [bytes(pool.page(page)) for page in pages] == [content(name.page_hash, SIZE) for name in names]


async def test_what_is_stored_is_found_from_the_first_page_on(world: World, disk: Disk) -> None:
    agent, _ = await stored(world, disk)
    found = await find(world, [*NAMES[:4], OTHERS[0], NAMES[4]])
    one, none = found.found
    assert (one.name, len(one.slots), len(one.sequences)) == ("one", 4, 4)
    assert none == StoredPrefix(name="none", slots=[], sequences=[], missed=[MissedPages(why="never_stored", num=1)])
    assert runs(one) == [("never_stored", 1), ("behind_a_gap", 1)]
    assert found.source
    assert found.incarnation == agent.ctx.address.epoch
    assert (await find(world, NAMES[1:])).found[0].slots, "a page is found by its own hash"


def runs(prefix: StoredPrefix) -> list[tuple[str, int]]:
    return [(run.why, run.num) for run in prefix.missed]


async def test_what_was_computed_otherwise_is_not_found(world: World, disk: Disk) -> None:
    await stored(world, disk)
    found = await find(world, numerics="torch/avx512")
    assert [prefix.slots for prefix in found.found] == [[], []]
    assert [runs(prefix) for prefix in found.found] == [[("not_open", 6)], [("not_open", 1)]]
    assert found.source == ""
    await until(lambda: disk.num_opened == 2, 5.0)
    found = await find(world, numerics="torch/avx512")
    assert runs(found.found[0]) == [("loading", 6)]
    await asyncio.sleep(0.1)
    found = await find(world, numerics="torch/avx512")
    assert [runs(prefix) for prefix in found.found] == [[("other_numerics", 6)], [("never_stored", 1)]]


async def test_why_pages_are_missing_is_told(world: World, disk: Disk) -> None:
    agent, handle, _ = await opened(world, disk)
    world.d.ctx.tell("agent-0", told(handle, NAMES[2:3], first=3, generations=[6]))
    await until(lambda: dropped(agent) == {"changed": 1}, 5.0)
    world.d.ctx.tell("agent-0", told(handle, NAMES[:2]))
    await stores(agent, 2)
    assert runs((await find(world)).found[0]) == [("changed", 1), ("never_stored", 3)]
    await world.ask(world.d, "agent-0", FlushStores())
    assert runs((await find(world)).found[0]) == [("flushed", 2), ("changed", 1), ("never_stored", 3)]


async def test_pages_that_were_told_before_the_store_was_open_are_missing_for_that(world: World, disk: Disk) -> None:
    agent = await agent_of(world, disk, "d")
    handle, _ = await world.pool(world.d, "agent-0", "d")
    world.d.ctx.tell("agent-0", told(handle, NAMES[:2]))
    world.d.ctx.tell("agent-0", told(handle, NAMES[:1], hashes=[b"short"]))
    await until(lambda: dropped(agent) == {"not_open": 3} and disk.num_opened == 1, 5.0)
    await asyncio.sleep(0.1)
    assert runs((await find(world)).found[0]) == [("not_open", 2), ("never_stored", 4)]


async def test_who_asks_an_agent_that_has_replaced_another_has_it_open_the_store(world: World, disk: Disk) -> None:
    await agent_of(world, disk, "d")
    assert (await find(world)).source == ""
    await until(lambda: disk.num_opened == 1, 5.0)
    assert (await find(world)).source


async def test_a_group_that_there_is_not_and_an_agent_without_a_disk_are_refused(world: World, disk: Disk) -> None:
    await agent_of(world, disk, "d")
    with pytest.raises(RemoteError, match="unknown_group"):
        await world.ask(world.d, "agent-0", FindStored(group="x", numerics=NUMERICS, prompts=[]))


async def test_what_is_on_disk_is_listed_for_those_who_route(world: World, disk: Disk) -> None:
    await stored(world, disk)
    listed = await world.ask(world.d, "agent-0", ListStoredPages(group="d", numerics=NUMERICS))
    assert isinstance(listed, StoredPagesListed)
    assert listed.next_slot == 0
    assert {listed.hashes[at : at + 16] for at in range(0, len(listed.hashes), 16)} == {one.page_hash for one in NAMES}
    with pytest.raises(RemoteError, match="unknown_group"):
        await world.ask(world.d, "agent-0", ListStoredPages(group="x", numerics=NUMERICS))


async def test_who_wants_a_list_of_a_store_that_is_not_open_has_it_opened_and_asks_again(
    world: World, disk: Disk
) -> None:
    agent = await agent_of(world, disk, "d")
    with pytest.raises(RemoteError, match="store_not_open") as refused:
        await world.ask(world.d, "agent-0", ListStoredPages(group="d", numerics=NUMERICS))
    assert refused.value.retryable
    await until(lambda: disk.num_opened == 1, 5.0)
    with pytest.raises(RemoteError, match="store_loading"):
        await world.ask(world.d, "agent-0", ListStoredPages(group="d", numerics=NUMERICS))
    assert agent.stores is not None
    (one,) = agent.stores.stores.opened.values()
    await until(lambda: one.store.is_loaded, 5.0)
    listed = await world.ask(world.d, "agent-0", ListStoredPages(group="d", numerics=NUMERICS))
    assert listed == StoredPagesListed(hashes=b"")


async def test_half_a_hash_names_nothing(world: World, disk: Disk) -> None:
    await stored(world, disk)
    prompts = [StoredPrompt(name="one", hashes=NAMES[0].page_hash + NAMES[1].page_hash[:7])]
    found = await world.ask(world.d, "agent-0", FindStored(group="d", numerics=NUMERICS, prompts=prompts))
    assert len(found.found[0].slots) == 1


async def test_pages_are_read_into_a_grant_and_nobody_announces_them(world: World, disk: Disk) -> None:
    agent, pool = await stored(world, disk)
    await restore(world, await find(world), [3, 4, 2])
    end = await world.d.ends()
    assert end == PagesPulled(grant_id=end.grant_id, num_pages=3, complete=True)
    assert have(pool, [3, 4, 2], NAMES[:3])
    assert have(pool, [1, 5, 6], [OTHERS[0], *OTHERS[4:6]]), "no other page was written"
    assert agent.transports.pulled_bytes["disk"] == 3 * SIZE
    assert agent.core.num_live == 0


async def test_a_page_of_all_ranks_is_read_at_once(world: World, disk: Disk) -> None:
    agent = await agent_of(world, disk, pools=ranks_of("d", 2))
    handle, _ = await world.pool(world.d, "agent-0", "d")
    fill(agent.ranks["d"], NAMES)
    await world.ask(world.d, "agent-0", OpenStore(group="d", numerics=NUMERICS))
    world.d.ctx.tell("agent-0", told(handle))
    await stores(agent, 6)
    fill(agent.ranks["d"], OTHERS)
    found = await find(world)
    prefix = found.found[0]
    asked = grant([5, 6])
    lent = {name: getattr(asked, name) for name in asked.__struct_fields__}
    lent["layout_digest"] = agent.ranks["d"][0].layout.digest
    lent["stored"] = StoredPages(found.source, found.incarnation, prefix.slots[:2], prefix.sequences[:2])
    await world.ask(world.d, "agent-0", OpenGrants(grants=[type(asked)(**lent)]))
    assert (await world.d.ends()).complete
    for page, name in zip((5, 6), NAMES, strict=False):
        whole = b"".join(bytes(pool.page(page)) for pool in agent.ranks["d"])
        assert whole == content(name.page_hash, SIZE)


@pytest.mark.parametrize("what", ["slot", "incarnation", "source", "fewer", "outside"])
async def test_slots_that_are_not_what_was_found_are_not_read(world: World, disk: Disk, what: str) -> None:
    _, pool = await stored(world, disk)
    found = await find(world)
    sequences = found.found[0].sequences
    changes: dict[str, Any] = {
        "slot": {"sequences": [sequences[0], sequences[1] + 1000, sequences[2]]},
        "incarnation": {"incarnation": found.incarnation + 1},
        "source": {"source": "kv-0"},
        "fewer": {"slots": found.found[0].slots[:2]},
        "outside": {"slots": [0, 1, 999]},
    }[what]
    code = {
        "slot": "stale_pages",
        "incarnation": "source_changed",
        "source": "unknown_group",
        "fewer": "bad_announcement",
        "outside": "source_lost",
    }[what]
    await restore(world, found, [3, 4, 2], **changes)
    assert await world.d.fails() == code
    assert have(pool, [3, 4, 2], [OTHERS[2], OTHERS[3], OTHERS[1]])


async def test_a_damaged_page_fails_its_copy_and_is_forgotten_and_those_before_it_are_told(
    world: World, disk: Disk
) -> None:
    agent, pool = await stored(world, disk)
    found = await find(world)
    (files,) = disk.files.values()
    files.flip("pages", found.found[0].slots[1] * SIZE + 5)
    await restore(world, found, [3, 4, 2])
    assert await world.d.fails() == "corrupt_pages"
    (progress,) = [message for message in world.d.heard if isinstance(message, PagesPulled)]
    assert (progress.num_pages, progress.complete) == (1, False)
    assert world.d.heard.index(progress) == 0, "before the failure, which ends what is waited for"
    assert have(pool, [3], NAMES[:1])
    assert len((await find(world)).found[0].slots) == 1, "what comes before it is still there"
    assert agent.stats()["mesh_kv_disk_corrupt_pages_total"] == 1


async def test_that_all_is_read_is_told_until_it_is_heard(world: World, disk: Disk) -> None:
    """Nobody announces anything again here; if the one tell were lost, the pages would be computed."""
    await stored(world, disk)
    await restore(world, await find(world), [3, 4, 2])
    end = await world.d.ends()
    world.d.heard.clear()
    assert await world.d.ends() == end
    await world.ask(world.d, "agent-0", CloseGrant(grant_id=end.grant_id))
    world.d.heard.clear()
    await asyncio.sleep(5.0)
    assert world.d.heard == []


async def test_a_grant_is_closed_only_when_the_disk_has_read(world: World, disk: Disk) -> None:
    agent, _ = await stored(world, disk)
    found = await find(world)
    for lane in disk.lanes:
        lane.is_stuck = True
    await restore(world, found, [3, 4, 2])
    grant_id = grant([3, 4, 2]).grant_id
    with pytest.raises(Exception, match="deadline_exceeded"):
        await world.ask(world.d, "agent-0", CloseGrant(grant_id=grant_id))
    assert agent.core.num_live == 1
    for lane in disk.lanes:
        lane.is_stuck = False
    assert isinstance(await world.ask(world.d, "agent-0", CloseGrant(grant_id=grant_id)), GrantClosed)
    assert agent.core.num_live == 0
    assert world.d.heard == [], "who closes a grant wants no news of it"


async def test_a_disk_that_hangs_ends_by_the_deadline_of_the_grant(world: World, disk: Disk) -> None:
    agent, _ = await stored(world, disk)
    found = await find(world)
    for lane in disk.lanes:
        lane.is_stuck = True
    await restore(world, found, [3])
    failed = await world.d.until(lambda message: isinstance(message, TransferFailed))
    assert failed.code == "deadline_exceeded"
    assert agent.core.num_live == 1, "the disk may still write there"
    for lane in disk.lanes:
        lane.is_stuck = False
    await until(lambda: agent.core.num_live == 0, 5.0)


async def test_memory_is_not_released_while_the_disk_writes_into_it(world: World, disk: Disk) -> None:
    agent, _ = await stored(world, disk)
    found = await find(world)
    for lane in disk.lanes:
        lane.is_stuck = True
    await restore(world, found, [3, 4, 2])
    for _ in range(20):
        answer = await world.ask(world.d, "agent-0", ReleaseMemory(groups=["d"], keep_weights=True))
        assert [group.state for group in answer.groups] == ["releasing"]
        await asyncio.sleep(0.1)
    assert agent.core.num_live == 1
    for lane in disk.lanes:
        lane.is_stuck = False
    await until(lambda: agent.core.num_live == 0, 5.0)
