"""An agent whose pages lie in a Mooncake Store that fails: each failure is a miss in time, and counted by itself."""

from collections.abc import Callable

import pytest

from kvstore.store.installed.values import PageValues
from kvstore.store.mooncake import MooncakeStore
from nodes.kv_agent.actor import KVAgent
from tests.kvstore.store.mooncake.fake_pool import FakePool
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent.test_disk import NAMES
from tests.nodes.kv_agent.test_installed_store import Server, _installed, calls, stored
from tests.nodes.kv_agent.test_restoring import OTHERS, find, have, restore
from tests.nodes.kv_agent.two_schedulers import SIZE, World

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures(_installed.__name__)]
KEY_OF_SECOND = f"kv-1/{NAMES[1].page_hash.hex()}"


class Pool:
    """An agent with its pages in a pool."""

    def __init__(self) -> None:
        self.fake = FakePool()
        self.server = Server()
        self.server.key = b"k" * 32
        self.server.kept = MooncakeStore(self.fake, "kv-1")  # type: ignore[assignment]

    def forge(self, agent: KVAgent) -> None:
        """As whoever reaches the ports of Mooncake can."""
        (identity,) = agent.stores.stores.opened
        forged = PageValues(identity).seal(NAMES[1].page_hash, [memoryview(bytes(SIZE))])
        self.fake.values[KEY_OF_SECOND] = bytes(forged)

    def empty(self, _: KVAgent) -> None:
        self.fake.values[KEY_OF_SECOND] = b""

    def spoil(self, _: KVAgent) -> None:
        self.fake.values[KEY_OF_SECOND] = self.fake.values[KEY_OF_SECOND][:-1] + b"\x07"

    def lose_master(self, _: KVAgent) -> None:
        self.fake.is_away = True

    def hang(self, _: KVAgent) -> None:
        self.server.stick()

    def silence(self, _: KVAgent) -> None:
        self.fake.silent = set(self.fake.values)


UNSIGNED, CORRUPT = "mesh_kv_store_unsigned_pages_total", "mesh_kv_disk_corrupt_pages_total"
MISSING = "mesh_kv_store_missing_pages_total"
GET = 'mesh_kv_store_calls_total{call="get",outcome="%s"}'
FIGURES = (UNSIGNED, CORRUPT, MISSING, GET % "raised", GET % "abandoned")
TROUBLES: dict[str, tuple[Callable[[Pool, KVAgent], None], str, set[str]]] = {
    "forged": (Pool.forge, UNSIGNED, {"unsigned_pages"}),
    "spoilt": (Pool.spoil, CORRUPT, {"corrupt_pages"}),
    "empty": (Pool.empty, MISSING, {"stale_pages"}),
    "the master is killed": (Pool.lose_master, GET % "raised", {"read_failed"}),
    "a host does not answer": (Pool.silence, GET % "raised", {"read_failed"}),
    "the client hangs": (Pool.hang, GET % "abandoned", {"read_failed", "deadline_exceeded"}),
}


@pytest.mark.parametrize("name", TROUBLES)
async def test_each_trouble_is_a_miss_in_time_and_counted_apart(world: World, name: str) -> None:
    make_trouble, figure, codes = TROUBLES[name]
    pool = Pool()
    agent, memory = await stored(world, pool.server)
    assert len(pool.fake.values) == 6
    found = await find(world)
    assert [len(prefix.slots) for prefix in found.found] == [6, 0]
    make_trouble(pool, agent)
    begun = agent.ctx.now()
    await restore(world, found, [3, 4, 2])
    assert await world.d.fails() in codes
    assert agent.ctx.now() - begun < 3.0, "a deadline of 2 s, and a call that waits for nothing"
    await until(lambda: agent.core.num_live == 0, 5.0)
    assert {one: agent.stats()[one] for one in FIGURES} == {one: float(one == figure) for one in FIGURES}
    assert have(memory, [4], [OTHERS[3]]), "memory of the pool has nothing of it"


async def test_what_is_put_is_restored(world: World) -> None:
    pool = Pool()
    agent, memory = await stored(world, pool.server)
    await restore(world, await find(world), [3, 4, 2])
    await world.d.ends()
    assert have(memory, [3, 4, 2], NAMES[:3])
    assert calls(agent) == {("contains", "done"): 1, ("get", "done"): 1, ("put", "done"): 1}
