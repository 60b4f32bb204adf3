"""Pages that an agent reads from its disk into a pool: what it finds, and what becomes of a grant that names slots."""

import asyncio
from typing import Any

import pytest

from kvstore.pool.page_pool import PagePool
from kvstore.protocol import (
    CloseGrant,
    FindStored,
    GrantClosed,
    OpenGrants,
    OpenStore,
    PagesPulled,
    StoredFound,
    StoredPages,
    StoredPrefix,
    StoredPrompt,
    TransferFailed,
)
from kvstore.store.index import PageName
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.protocol import ReleaseMemory
from tests.kvstore.store.pages import chain, content
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.test_disk import NAMES, NUMERICS, Disk, agent_of, fill, opened, stores, told
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
    assert none == StoredPrefix(name="none", slots=[], sequences=[])
    assert found.source
    assert found.incarnation == agent.ctx.address.epoch
    assert (await find(world, NAMES[1:])).found[0].slots, "a page is found by its own hash"


async def test_what_was_computed_otherwise_is_not_found(world: World, disk: Disk) -> None:
    await stored(world, disk)
    found = await find(world, numerics="torch/avx512")
    assert [prefix.slots for prefix in found.found] == [[], []]
    assert found.source == ""


async def test_who_asks_an_agent_that_has_replaced_another_has_it_open_the_store(world: World, disk: Disk) -> None:
    await agent_of(world, disk, "d")
    assert (await find(world)).source == ""
    await until(lambda: disk.num_opened == 1, 5.0)
    assert (await find(world)).source


async def test_a_group_that_there_is_not_and_an_agent_without_a_disk_are_refused(world: World, disk: Disk) -> None:
    await agent_of(world, disk, "d")
    with pytest.raises(RemoteError, match="unknown_group"):
        await world.ask(world.d, "agent-0", FindStored(group="x", numerics=NUMERICS, prompts=[]))


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


async def test_a_damaged_page_fails_its_copy_and_is_forgotten(world: World, disk: Disk) -> None:
    agent, _ = await stored(world, disk)
    found = await find(world)
    (files,) = disk.files.values()
    files.flip("pages", found.found[0].slots[1] * SIZE + 5)
    await restore(world, found, [3, 4, 2])
    assert await world.d.fails() == "corrupt_pages"
    assert len((await find(world)).found[0].slots) == 1, "what comes before it is still there"
    assert agent.stats()["mesh_kv_disk_corrupt_pages_total"] == 1


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
