"""An agent gives its pools' memory back and makes them again: with holders that answer, copies that run, and deaths."""

import asyncio
import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import PoolDenied, PoolMismatch
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.header import HEADER_BYTES
from kvstore.pool.mapping import map_pool
from kvstore.pool.page_pool import HeapHost, ShmHost
from kvstore.protocol import CloseGrant, MapPool, PagesPulled
from mesh.actor import Actor, Call
from mesh.address import Address
from mesh.errors import RemoteError
from nodes.kv_agent.actor import KVAgent
from nodes.kv_agent.config import PoolConfig
from nodes.kv_agent.pools.taking import mark_pools
from nodes.protocol import HasLetGo, HasTakenUp, LetGo, ListMemory, MemoryList, ReleaseMemory, ResumeMemory, TakeUp
from nodes.roles import NODE_CODEC
from tests.kvstore.fake_devices import FakeCards, FakeDeviceMemory
from tests.mesh.mesh_under_test import until
from tests.nodes.kv_agent import two_schedulers
from tests.nodes.kv_agent.two_schedulers import (
    LAYOUT,
    NUM_PAGES,
    SIZE,
    Holder,
    World,
    config,
    grant,
    maps_others,
    ranks_of,
    ready,
)


class Worker(Actor):
    """Lets go and takes up when it is told to, once `is_willing`."""

    role = "worker"
    codec = NODE_CODEC

    def __init__(self, group: str = "d") -> None:
        self.group = group
        self.orders: list[LetGo | TakeUp] = []
        self.is_willing = True

    async def start(self) -> None:
        self.ctx.announce("ready", group=self.group, memory_saver=False)

    def on_ask(self, call: Call) -> None:
        order: Any = call.message
        self.orders.append(order)
        if not self.is_willing:
            call.fail("not_ready", "not now", retryable=True)
            return
        self.ctx.announce("released" if isinstance(order, LetGo) else "ready")
        answer = HasLetGo if isinstance(order, LetGo) else HasTakenUp
        call.reply(answer(group=order.group, number=order.number))


async def becomes(world: World, desired: Any, state: str, agent: str = "agent-0") -> MemoryList:
    return await two_schedulers.becomes(partial(world.ask, world.d, agent), desired, state)


async def started(world: World, *agents: KVAgent) -> Worker:
    world.d, world.p = Holder(), Holder()
    await world.start(*agents)
    worker = Worker()
    await world.add("W", worker)
    await world.sees("agent-0", "W")
    return worker


async def moved(world: World, source_agent: str) -> None:
    """Two pages of `p` get to `d`."""
    source, from_pool = await world.pool(world.p, source_agent, "p")
    _, to_pool = await world.pool(world.d, "agent-0", "d")
    from_pool.page(8)[:4] = b"move"
    await world.order(source, [8, 9], [4, 5])
    assert await world.d.ends() == PagesPulled(grant_id="g", num_pages=2, complete=True)
    assert bytes(to_pool.page(4)[:4]) == b"move"


async def test_the_file_shrinks_and_the_pool_comes_back_as_another(world: World, tmp_path: Path) -> None:
    world.host = ShmHost(tmp_path)
    worker = await started(world, KVAgent(config("d", prefix="kv-"), world.host))
    handle, pool = await world.pool(world.d, "agent-0", "d")
    pool.close()
    path = Path(handle.path)
    size = path.stat().st_size
    (found,) = (await becomes(world, ReleaseMemory(groups=["d"]), "released")).groups
    assert (found.weights, found.pool_bytes, path.stat().st_size) == ("reload", 0, HEADER_BYTES)
    assert [type(order) for order in worker.orders] == [LetGo]
    with pytest.raises(RemoteError) as caught:
        await world.ask(world.d, "agent-0", MapPool(group="d"))
    assert (caught.value.code, caught.value.retryable) == ("memory_released", True)
    with pytest.raises(RemoteError, match="memory_released"):
        await world.ask(world.d, "agent-0", grant([4]))
    with pytest.raises(PoolMismatch, match="released"):
        map_pool(world.host, handle)
    assert world.actors["agent-0"].stats()['mesh_kv_pool_bytes{group="d"}'] == HEADER_BYTES
    await becomes(world, ResumeMemory(), "held")
    assert path.stat().st_size == size
    again = await world.ask(world.d, "agent-0", MapPool(group="d"))
    assert again.incarnation != handle.incarnation
    assert worker.orders[-1].pool == again
    map_pool(world.host, again).close()


async def test_keeping_weights_that_end_with_their_rank_is_refused(world: World) -> None:
    worker = await started(world, KVAgent(config(pools=ranks_of("d", 2)), world.host))
    with pytest.raises(RemoteError, match="cannot be kept") as caught:
        await world.ask(world.d, "agent-0", ReleaseMemory(keep_weights=True))
    assert (caught.value.code, caught.value.retryable) == ("keep_weights", False)
    (found,) = (await world.ask(world.d, "agent-0", ListMemory())).groups
    assert (found.state, worker.orders) == ("held", [])


async def test_pages_move_between_pools_that_were_made_again(world: World) -> None:
    await started(world, KVAgent(config("d", "p"), world.host))
    for _ in range(2):
        await becomes(world, ReleaseMemory(), "released")
        await becomes(world, ResumeMemory(), "held")
    await moved(world, "agent-0")


async def test_a_copy_is_waited_for_and_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = KVAgent(config("d", "p", quantum_bytes=1), world.host)
    await started(world, agent)
    source, _, _ = await world.pools()
    await world.ask(world.d, "agent-0", grant([4, 5]))
    monkeypatch.setattr(agent, "_keep_pumping", lambda: None)
    world.p.announce("agent-0", ready(source, [1, 2]))
    await until(lambda: agent.pulls.is_busy)
    for _ in range(20):
        (found, _) = (await world.ask(world.d, "agent-0", ReleaseMemory())).groups
        await asyncio.sleep(0.05)
    assert (found.state, found.waiting_for, found.pool_bytes) == ("releasing", [], NUM_PAGES * SIZE)
    monkeypatch.undo()
    agent._pump()
    assert await world.p.fails() == "memory_released"
    await becomes(world, ReleaseMemory(), "released")


async def test_a_foreign_agent_lets_go_of_what_it_reads(world: World) -> None:
    near, far = KVAgent(config("d"), world.host), KVAgent(config("p"), world.host)
    await started(world, near, far)
    await moved(world, "agent-1")
    assert near.stats()["mesh_kv_foreign_pools"] == 1
    await becomes(world, ReleaseMemory(), "released", "agent-1")
    assert near.stats()["mesh_kv_foreign_pools"] == 0
    (group,) = (await world.ask(world.d, "agent-0", ListMemory())).groups
    assert group.state == "held"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_closed", [True, False])
async def test_what_is_let_go_of_while_it_is_being_mapped_is_not_mapped(
    world: World, is_closed: bool, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = (KVAgent(config(pools=ranks_of(group, num_ranks)), world.host) for group in "dp")
    await started(world, near, far)
    source, _, _ = await world.pools("agent-1")
    ask = near.ctx.ask
    has_let_go = asyncio.Event()

    async def let_go() -> None:
        order = LetGo(group="p", number=1, weights="")
        assert (await far.ctx.ask("agent-0", order, timeout_s=2.0)).message == HasLetGo(group="p", number=1)
        assert not maps_others(near)

    async def ask_and_let_go(agent: str, question: Any, **options: Any) -> Any:
        answer = await ask(agent, question, **options)
        if isinstance(question, MapPool) and question.rank == num_ranks - 1:
            if is_closed:
                await world.ask(world.d, "agent-0", CloseGrant(grant_id="g"))
                await let_go()
            else:
                # A transfer waits for the pool: its end is waited for.
                with pytest.raises(RemoteError, match="not_ready"):
                    await let_go()
            has_let_go.set()
        return answer

    monkeypatch.setattr(near.ctx, "ask", ask_and_let_go)
    digest = source.layout.digest
    await world.ask(world.d, "agent-0", grant([4, 5], layout_digest=digest))
    world.p.announce("agent-0", ready(source, [1, 2], layout_digest=digest))
    await has_let_go.wait()
    if not is_closed:
        assert await world.d.fails() == "memory_released"
        await let_go()
    await asyncio.sleep(0.5)
    assert not maps_others(near)
    assert near.stats()["mesh_kv_foreign_pools"] == 0


async def test_a_pool_whose_header_says_that_it_is_released_is_not_mapped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = KVAgent(config("d"), world.host), KVAgent(config("p"), world.host)
    await started(world, near, far)
    source, _, _ = await world.pools("agent-1")
    ask = near.ctx.ask

    async def ask_and_mark(*arguments: Any, **options: Any) -> Any:
        answer = await ask(*arguments, **options)
        mark_pools(world.host, far.ranks["p"], "reload", is_unwanted=True)
        return answer

    monkeypatch.setattr(near.ctx, "ask", ask_and_mark)
    await world.order(source, [1, 2], [4, 5])
    assert await world.d.fails() == "memory_released"
    assert not maps_others(near)


@pytest.mark.parametrize("is_freed", [True, False])
async def test_the_next_agent_knows_what_was_wished(world: World, is_freed: bool, tmp_path: Path) -> None:
    world.host = ShmHost(tmp_path)
    settings = config("d", prefix="kv-", unlink_on_stop=False)
    first = KVAgent(settings, world.host)
    worker = await started(world, first)
    worker.is_willing = is_freed
    await becomes(world, ReleaseMemory(), "released" if is_freed else "releasing")
    world.network.crash(Address("agent-0", 1))
    # The lock goes with the process.
    first.ranks["d"][0].close()
    second = KVAgent(settings, world.host)
    await world.add("agent-0", second, 2)
    assert (await world.sees("D", "agent-0", 2)).attributes["released"] == ["d"]
    worker.is_willing = True
    for _ in range(100):
        (found,) = (await world.ask(world.d, "agent-0", ListMemory())).groups
        if found.state == "released":
            break
        await asyncio.sleep(0.1)
    assert (found.state, found.weights) == ("released", "reload")
    assert Path(second.ranks["d"][0].path).stat().st_size == HEADER_BYTES
    await becomes(world, ResumeMemory(), "held")
    handle = await world.ask(world.d, "agent-0", MapPool(group="d"))
    map_pool(world.host, handle).close()


def refuse(*errors: Exception) -> Any:
    """Raises them one after the other."""
    left = list(errors)

    def refused(*_: Any, **__: Any) -> Any:
        raise left.pop(0)

    return refused


EMFILE = OSError(errno.EMFILE, "too many open files")


@pytest.mark.parametrize(
    ("is_resumed", "broken"),
    [
        (True, {"create": refuse(EMFILE)}),
        (True, {"create": refuse(PoolMismatch("no")), "open": refuse(PoolDenied("nor that"))}),
        (False, {"create": refuse(EMFILE)}),
    ],
    ids=["cannot be made", "nor what was left", "cannot be freed"],
)
async def test_an_agent_that_cannot_go_on_ends_and_the_next_one_does(
    world: World, is_resumed: bool, broken: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.host = ShmHost(tmp_path)
    settings = config("d", prefix="kv-", unlink_on_stop=False)
    await started(world, KVAgent(settings, world.host))
    if is_resumed:
        await becomes(world, ReleaseMemory(), "released")
    with monkeypatch.context() as patch:
        for name, refused in broken.items():
            patch.setattr(world.host, name, refused)
        await world.ask(world.d, "agent-0", ResumeMemory() if is_resumed else ReleaseMemory())
        async with asyncio.timeout(10.0):
            reason = await world.systems["agent-0"].shutdown_asked()
    assert reason.startswith("the pool of d cannot be")
    world.network.crash(Address("agent-0", 1))
    await world.add("agent-0", KVAgent(settings, world.host), 2)
    assert (await world.sees("D", "agent-0", 2)).attributes["released"] == ["d"]
    await becomes(world, ReleaseMemory(), "released")
    await becomes(world, ResumeMemory(), "held")


async def test_memory_that_others_have_taken_meanwhile_is_said_and_waited_for(world: World) -> None:
    cards = FakeCards(1, 2 * NUM_PAGES * SIZE)
    host = CudaHost(HeapHost(), lambda: FakeDeviceMemory(cards))

    world.host = host
    pools = [PoolConfig(group="d", num_pages=NUM_PAGES, layout=LAYOUT, device="cuda:0")]
    agent = KVAgent(config(pools=pools, device_wait_s=1.0), host)
    await started(world, agent)
    (found,) = (await becomes(world, ReleaseMemory(keep_weights=True), "released")).groups
    assert found.weights == "keep", "the worker is there and has loaded them"
    trainer = FakeDeviceMemory(cards)
    taken = trainer.allocate(0, 2 * NUM_PAGES * SIZE)
    for _ in range(60):
        (found,) = (await world.ask(world.d, "agent-0", ResumeMemory())).groups
        await asyncio.sleep(0.1)
    assert found.state in ("released", "resuming")
    assert "0 of its" in found.reason
    trainer.free(0, taken)
    await becomes(world, ResumeMemory(), "held")
    assert host.is_made_here(agent.ranks["d"][0])
