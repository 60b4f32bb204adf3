"""Copies between groups of tensor-parallel ranks: every rank gets its heads, and a copy has ended when all have."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PoolBusy, TransferError
from kvstore.layout import KVLayout
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo, ShmHost
from kvstore.protocol import GrantsOpened, MapPool, PagesPulled, PoolHandle
from kvstore.transfer.base import Peer
from kvstore.transfer.mapped.shm import ShmTransport
from kvstore.transfer.paired.orders import RemotePeer
from kvstore.transfer.plan import held_heads
from kvstore.transfer.puller import PagePuller
from kvstore.transfer.session import SessionLimits, StartCopy
from mesh.errors import RemoteError
from nodes.kv_agent.config import ConfigError, KVAgentConfig, PoolConfig
from nodes.kv_agent.pools.foreign import require_ranks
from nodes.kv_agent.pools.taking import take_group
from tests.nodes.kv_agent.two_schedulers import World, grant, ready

NUM_PAGES = 12
SIZES = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (8, 2), (2, 8), (8, 8), (1, 8)]


def layouts(tp_size: int, total: int = 4) -> list[KVLayout]:
    return [
        KVLayout(
            num_layers=2, num_kv_heads=len(held_heads(rank, tp_size, total)), head_dim=1, dtype="uint8", page_size=2,
            tp_rank=rank, tp_size=tp_size, total_kv_heads=total if tp_size > total else 0,
        )
        for rank in range(tp_size)
    ]  # fmt: skip


def content(layout: KVLayout, page: int, total: int = 4) -> bytes:
    """What a rank's page holds: a number for (page, layer, k or v, token, head of the model)."""
    rows = layout.num_layers * 2 * layout.page_size
    heads = held_heads(layout.tp_rank, layout.tp_size, total)
    return bytes(chain.from_iterable(((page * 64 + row * 8 + head) % 251 for head in heads) for row in range(rows)))


def fill(pools: list[PagePool]) -> None:
    for pool in pools:
        for page in range(pool.num_pages):
            pool.page(page)[:] = content(pool.layout, page)


def running(pool: PagePool, generation: int = 7) -> None:
    table = pool.table()
    for page in range(1, pool.num_pages):
        table.write(page, PageEntry(PageState.RUNNING, generation=generation))


class Bench:
    """A source and a destination group on one host; rank 0 of each has a page table that says 7 of every page."""

    def __init__(self, source_tp: int, destination_tp: int, quantum_bytes: int = 16) -> None:
        self.host = HeapHost()
        self.source = self.make("p", source_tp)
        self.destination = self.make("d", destination_tp)
        fill(self.source)
        self.transport = ShmTransport(self.host, quantum_bytes)
        self.pulls = PagePuller(self.transport)
        self.pulls.add("d", self.destination)
        self.peers: list[Peer] = [self.transport.connect(handle_of(pool)) for pool in self.source]

    def make(self, group: str, tp_size: int) -> list[PagePool]:
        pools = [
            self.host.create(
                f"{group}.{layout.tp_rank}", PoolInfo(group=group, num_pages=NUM_PAGES, layout=layout, incarnation=1)
            )
            for layout in layouts(tp_size)
        ]
        running(pools[0])
        return pools

    def copy(self, source_pages: list[int], pages: list[int], copy_id: int = 1, deadline: float = 9.0) -> StartCopy:
        return StartCopy(copy_id, source_pages, [7] * len(pages), pages, [7] * len(pages), deadline)

    def finish(self, now: float = 0.0) -> list[Any]:
        ended: list[Any] = []
        for _ in range(10_000):
            if not self.pulls.is_busy:
                return ended
            ended += self.pulls.pump(now)
        raise AssertionError("it never ends")


@pytest.mark.parametrize(("source_tp", "destination_tp"), SIZES)
@pytest.mark.parametrize("quantum_bytes", [5, 1 << 20])
def test_every_rank_holds_what_it_would_have_computed(source_tp: int, destination_tp: int, quantum_bytes: int) -> None:
    bench = Bench(source_tp, destination_tp, quantum_bytes)
    source_pages, pages = [2, 3, 1, 9], [1, 2, 4, 7]
    assert bench.pulls.start("g", bench.copy(source_pages, pages), "d", bench.peers) is None
    [ended] = bench.finish()
    assert (ended.grant_id, ended.event.copy_id, ended.event.code) == ("g", 1, "")
    for pool in bench.destination:
        for page, copied in zip(source_pages, pages, strict=True):
            assert bytes(pool.page(copied)) == content(pool.layout, page), (
                f"page {copied} of rank {pool.layout.tp_rank}"
            )
        assert not any(pool.page(5)), "nothing else was written"
    assert ended.num_bytes == sum(4 * pool.layout.page_bytes for pool in bench.destination)


@given(seed=st.integers(0, 10_000), sizes=st.sampled_from([(2, 2), (2, 1), (1, 2), (4, 2)]), num=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_a_copy_ends_once_and_then_writes_no_more(seed: int, sizes: tuple[int, int], num: int) -> None:
    """Several copies at once, cancelled or late, of pages that change hands meanwhile; whatever ended is quiet."""
    dice = random.Random(seed)
    bench = Bench(*sizes, quantum_bytes=dice.choice([3, 16, 100]))
    pages = dice.sample(range(1, NUM_PAGES), 9)
    shares = {number: pages[3 * (number - 1) : 3 * number] for number in range(1, num + 1)}
    ended: list[int] = []
    for number, share in shares.items():
        if bench.pulls.start("g", bench.copy(share, share, number, dice.choice([5.0, 99.0])), "d", bench.peers):
            raise AssertionError("these can begin")
    stale, cancelled = dice.choice([0, 1, 2]), dice.choice([0, 1, 2])
    for turn in range(1000):
        if not bench.pulls.is_busy:
            break
        if turn == 3 and stale in shares:
            table = bench.source[0].table()
            table.write(shares[stale][0], PageEntry(PageState.RUNNING, generation=8))
        if turn == 2 and cancelled:
            bench.pulls.cancel("g", cancelled)
        quiet = {page: [bytes(pool.page(page)) for pool in bench.destination] for one in ended for page in shares[one]}
        for one in bench.pulls.pump(float(turn)):
            number = one.event.copy_id
            ended.append(number)
            if not one.event.code:
                assert all(
                    bytes(pool.page(page)) == content(pool.layout, page)
                    for pool in bench.destination for page in shares[number]
                )  # fmt: skip
                assert number not in (stale, cancelled) or turn <= 3
        for page, before in quiet.items():
            assert [bytes(pool.page(page)) for pool in bench.destination] == before
    assert sorted(ended) == sorted(shares)


def test_generations_are_those_of_rank_zero() -> None:
    bench = Bench(2, 2)
    running(bench.source[1], 5)
    running(bench.destination[1], 5)
    assert bench.pulls.start("g", bench.copy([2], [3]), "d", bench.peers) is None
    [ended] = bench.finish()
    assert ended.event.code == ""
    running(bench.source[0], 9)
    late = bench.pulls.start("g", bench.copy([2], [3], 2), "d", bench.peers)
    assert late.event.code == "stale_pages"
    assert bench.finish() == []


def test_what_cannot_be_copied_is_refused() -> None:
    """Never a copy of something else: another number of ranks on a device, ranks on another host."""
    bench = Bench(2, 1)

    class Paired:
        cuts_pages = False

    class OnDevice:
        transport = Paired
        info = PoolInfo(group="p", num_pages=4, layout=layouts(2)[0], incarnation=1, device="cuda:0")

    refused = bench.pulls.start("g", bench.copy([2], [3]), "d", [OnDevice(), OnDevice()])
    assert refused.event.code == "mixed_memory"
    far = [
        RemotePeer(PoolHandle(group="p", agent="x", path="", num_pages=4, layout=layout, incarnation=1), Paired)
        for layout in layouts(2)
    ]
    refused = bench.pulls.start("g", bench.copy([2], [3]), "d", far)
    assert refused.event.code == "unequal_ranks"
    assert not bench.pulls.is_busy


def test_heads_that_cannot_be_dealt_out_end_the_copy() -> None:
    bench = Bench(2, 1)
    refused = bench.pulls.start("g", bench.copy([2], [3]), "d", [*bench.peers, bench.peers[0]])
    assert (refused.event.code, bench.finish()) == ("layout_mismatch", [])
    assert bench.pulls.start("g", bench.copy([2], [3]), "d", bench.peers) is None
    assert [one.event.code for one in bench.finish()] == [""]


def test_a_source_is_all_ranks_of_one_making() -> None:
    bench = Bench(2, 1)
    require_ranks(bench.peers)
    with pytest.raises(TransferError, match="asked for rank 0 of 2 of p, got rank 1 of 2"):
        require_ranks([bench.peers[1], bench.peers[0]])
    again = bench.host.create("x", PoolInfo(group="p", num_pages=NUM_PAGES, layout=layouts(2)[1], incarnation=2))
    with pytest.raises(TransferError) as caught:
        require_ranks([bench.peers[0], bench.transport.connect(handle_of(again))])
    assert caught.value.code == "source_changed"


# pools


def pools(group: str, tp_size: int, num_pages: int = NUM_PAGES) -> list[PoolConfig]:
    return [PoolConfig(group=group, num_pages=num_pages, layout=layout) for layout in layouts(tp_size)]


def test_pools_of_a_group_are_of_one_making(tmp_path: Path) -> None:
    host = ShmHost(tmp_path)

    def take(epoch: int) -> tuple[list[PagePool], list[str]]:
        taken = take_group(host, "x-", pools("d", 4), epoch)
        return [one.pool for one in taken], [one.found for one in taken]

    def close(taken: list[PagePool]) -> None:
        for pool in taken:
            pool.close()

    first, found = take(3)
    assert found == ["made"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-d", "x-d.1", "x-d.2", "x-d.3"]
    first[2].page(1)[:] = content(first[2].layout, 1)
    close(first)
    second, found = take(4)
    assert (found, [pool.info.incarnation for pool in second]) == (["reopened"] * 4, [3] * 4)
    assert bytes(second[2].page(1)) == content(second[2].layout, 1)
    close(second)
    host.unlink(host.path("x-d.1"))
    third, found = take(5)
    lost = "replaced: the pool of another rank was lost"
    assert (found, [pool.info.incarnation for pool in third]) == ([lost, "made", lost, lost], [5] * 4)
    assert not any(third[2].page(1))
    with pytest.raises(PoolBusy):
        take(6)
    third[0].close()
    with pytest.raises(PoolBusy):
        take(6)
    host.open(host.path("x-d"), writable=True, own=True).close()
    close(third)


def test_an_agent_has_the_pools_of_all_ranks_or_none() -> None:
    two = pools("d", 2)
    for wrong in (two[:1], two[1:], [*two, two[0]], [two[0], pools("d", 2, 5)[1]], [two[0], pools("d", 4)[1]]):
        with pytest.raises(ConfigError):
            KVAgentConfig(pools=wrong)
    assert [pool.name for pool in KVAgentConfig(pools=two[::-1]).groups["d"]] == ["d", "d.1"]


# agents


def config(*wanted: list[PoolConfig]) -> KVAgentConfig:
    limits = SessionLimits(resend_s=0.5, map_s=1.0)
    return KVAgentConfig(pools=[pool for group in wanted for pool in group], limits=limits, quantum_bytes=7)


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 2), (2, 1), (1, 4)])
@pytest.mark.parametrize("num_agents", [1, 2])
async def test_an_agent_pulls_for_all_ranks(world: World, source_tp: int, destination_tp: int, num_agents: int) -> None:
    source, destination = pools("p", source_tp), pools("d", destination_tp)
    both = [config(source, destination)], [config(destination), config(source)]
    await world.agents(*both[num_agents - 1])
    agent = f"agent-{num_agents - 1}"
    handle, first = await world.pool(world.p, agent, "p")
    await world.pool(world.d, "agent-0", "d")
    from_ranks = [first]
    for rank in range(1, source_tp):
        other = await world.ask(world.p, agent, MapPool(group="p", rank=rank))
        assert (other.group, other.layout.tp_rank, other.incarnation) == ("p", rank, 1)
        from_ranks.append(world.host.open(other.path, writable=True))
    fill(from_ranks)
    digest = layouts(1)[0].digest
    opened = await world.ask(world.d, "agent-0", grant([4, 5, 2], layout_digest=digest))
    assert opened == GrantsOpened(opened=["g"])
    world.p.announce("agent-0", ready(handle, [8, 9, 3], layout_digest=digest))
    assert await world.d.ends() == PagesPulled(grant_id="g", num_pages=3, complete=True)
    for rank in range(destination_tp):
        mine = await world.ask(world.d, "agent-0", MapPool(group="d", rank=rank))
        pool = world.host.open(mine.path, writable=False)
        for page, copied in ((8, 4), (9, 5), (3, 2)):
            assert bytes(pool.page(copied)) == content(pool.layout, page)


async def test_a_rank_that_is_none_is_refused(world: World) -> None:
    await world.agents(config(pools("d", 2)))
    with pytest.raises(RemoteError, match="unknown_rank: "):
        await world.ask(world.d, "agent-0", MapPool(group="d", rank=2))
