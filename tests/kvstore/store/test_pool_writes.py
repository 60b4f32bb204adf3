"""Pages of pools on their way into a store, while their scheduler goes on using the pools."""

import random

import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageEntry
from kvstore.errors import PagesElsewhere
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from kvstore.store.index import PageName
from kvstore.store.operations import Read, Write
from kvstore.store.page_store import PageStore, StoreLimits
from kvstore.store.pool_writes import PoolWrites, Storable, WriteLimits
from tests.kvstore.store.faulty_files import FaultyFiles, SteppedLane
from tests.kvstore.store.pages import ROOT, blank, chain, content, page_hash
from tests.simulation.planting import around, first_caught

LAYOUT = KVLayout(num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
PAGE = LAYOUT.page_bytes
NUM_PAGES = 9


class Pool:
    """Pools of a group of one or two ranks, and a scheduler that allocates and fills their pages."""

    def __init__(self, group: str, tp_size: int = 1) -> None:
        host = HeapHost()
        info = PoolInfo(group=group, num_pages=NUM_PAGES, layout=LAYOUT, incarnation=1)
        self.group = group
        self.ranks: list[PagePool] = [host.create(f"{group}.{rank}", info) for rank in range(tp_size)]
        self.table = self.ranks[0].table()
        self.generation = 0

    def fill(self, page: int, name: PageName) -> Storable:
        """Allocate the page anew, then write it, in that order."""
        self.generation += 1
        self.table.write(page, PageEntry(PageState.RUNNING, self.generation, 1))
        whole = content(name.page_hash, PAGE * len(self.ranks))
        for rank, pool in enumerate(self.ranks):
            pool.page(page)[:] = whole[rank * PAGE :][:PAGE]
        return Storable(page, self.generation, name)


class Storing:
    """A store whose lanes run when the test says so, and what is written into it."""

    def __init__(
        self,
        *pools: Pool,
        num_slots: int = 32,
        limits: WriteLimits | None = None,
        store_limits: StoreLimits | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self.page_bytes = PAGE * len(pools[0].ranks)
        self.lanes = SteppedLane(draw), SteppedLane(draw), SteppedLane()
        files = FaultyFiles(num_slots, self.page_bytes)
        self.store = PageStore(files, self.page_bytes, lambda: None, store_limits or StoreLimits(), self.lanes)
        self.writes = PoolWrites(self.store, limits or WriteLimits())
        for pool in pools:
            self.writes.add(pool.group, pool.ranks)
        self.now = 0.0
        self.ended: list[Read] = []

    def poll(self) -> None:
        for ended in self.store.poll():
            if isinstance(ended, Write):
                self.writes.settle(ended)
            else:
                self.ended.append(ended)
        self.writes.pump(self.now)

    def run(self) -> None:
        self.poll()
        while any(lane.waiting for lane in self.lanes):
            for lane in self.lanes:
                lane.close()
            self.poll()

    def require_right(self, names: list[PageName]) -> int:
        """How many of `names` are found; they are what their names say."""
        found = 0
        for name in names:
            slots, sequences = self.store.lookup([name.page_hash])
            read = self.store.read(slots, sequences, blank(len(slots), self.page_bytes))
            assert read is not None
            self.run()
            assert read in self.ended
            for page in read.pages:
                assert bytes(page[0]) == content(name.page_hash, self.page_bytes), "a page is stored as another one"
                found += 1
        return found


@pytest.mark.parametrize("tp_size", [1, 2])
def test_pages_of_all_ranks_are_stored_as_they_are(tp_size: int) -> None:
    pool = Pool("g", tp_size)
    storing = Storing(pool)
    names = chain("a", 6)
    pages = [pool.fill(page, name) for page, name in zip((5, 3, 1, 2, 8, 7), names, strict=True)]
    assert storing.writes.offer("g", pages) == 6
    assert (storing.writes.num_queued, storing.writes.is_idle) == (6, False)
    assert storing.writes.pump(0.0) is None, "the index is still being read"
    assert storing.writes.num_queued == 6
    storing.run()
    assert storing.writes.is_idle
    assert storing.require_right(names) == 6
    # Offered again, nothing is to be done.
    storing.writes.offer("g", pages)
    storing.run()
    assert storing.writes.is_idle
    assert storing.store.stats()["written"] == 6


def test_a_page_that_its_scheduler_uses_again_is_not_stored() -> None:
    pool = Pool("g")
    storing = Storing(pool)
    storing.run()
    names = chain("a", 4)
    pages = [pool.fill(page + 1, name) for page, name in enumerate(names)]
    other = PageName(page_hash("other"), ROOT)
    storing.writes.offer("g", pages)
    pool.fill(2, other)
    storing.writes.pump(0.0)
    # One before the write began, one after: its bytes on the disk are those of another page, or of both.
    pool.fill(3, other)
    storing.run()
    assert storing.require_right(names) == 2
    assert (storing.writes.counts["changed before"], storing.store.stats()["changed meanwhile"]) == (1, 1)
    storing.writes.offer("g", [pages[1]])
    storing.run()
    assert storing.writes.is_idle


def test_pages_that_come_one_by_one_are_written_together() -> None:
    one, two = Pool("one"), Pool("two")
    storing = Storing(one, two, limits=WriteLimits(batch_pages=8, gather_s=0.2))
    storing.run()
    names = chain("a", 6)
    for page, name in enumerate(names[:3]):
        for pool in (one, two):
            storing.writes.offer(pool.group, [pool.fill(page + 1, name)])
    assert storing.writes.pump(1.0) == pytest.approx(0.2)
    assert storing.writes.pump(1.1) == pytest.approx(0.1)
    assert storing.writes.pump(1.2) is None, "they have waited long enough"
    assert storing.writes.num_queued == 0
    assert storing.store.stats()["claimed"] == 3, "the second group's are the same"
    storing.run()
    storing.writes.offer("one", [one.fill(page + 1, name) for page, name in enumerate(names[:5])])
    assert storing.writes.pump(1.3) == pytest.approx(0.2), "others begin to wait"
    storing.writes.offer("two", [two.fill(page + 1, name) for page, name in enumerate(names[3:])])
    assert storing.writes.pump(1.3) == pytest.approx(0.2)
    assert storing.writes.num_queued == 3, "eight do not wait: the first group's are written"
    storing.now = 1.5
    storing.run()
    assert storing.require_right(names) == 6


def test_a_full_queue_takes_the_beginning() -> None:
    pool = Pool("g")
    storing = Storing(pool, limits=WriteLimits(queued_pages=3, batch_pages=2))
    names = chain("a", 5)
    pages = [pool.fill(page + 1, name) for page, name in enumerate(names)]
    assert storing.writes.offer("g", pages) == 3
    assert storing.writes.offer("g", pages) == 0
    assert storing.writes.counts["queue full"] == 7
    storing.run()
    assert len(storing.store.lookup([name.page_hash for name in names])[0]) == 3


def test_writes_keep_to_their_rate() -> None:
    pool = Pool("g")
    storing = Storing(pool, limits=WriteLimits(batch_pages=2, bytes_per_s=PAGE))
    storing.run()
    names = chain("a", 6)
    storing.writes.offer("g", [pool.fill(page + 1, name) for page, name in enumerate(names)])
    stored: list[int] = []
    for _ in range(4):
        storing.run()
        stored.append(len(storing.store.lookup([name.page_hash for name in names])[0]))
        pause = storing.writes.pump(storing.now)
        assert pause in (None, 2.0), "two pages take two seconds"
        storing.now += 1.5
        storing.run()
        assert len(storing.store.lookup([name.page_hash for name in names])[0]) == stored[-1]
        assert storing.writes.pump(storing.now) in (None, 0.5)
        storing.now += 0.5
    assert stored == [2, 4, 6, 6]


def test_what_waits_for_the_store_is_kept() -> None:
    pool = Pool("g")
    limits = StoreLimits(writing_bytes=3 * PAGE)
    storing = Storing(pool, limits=WriteLimits(batch_pages=2), store_limits=limits)
    storing.store.poll()
    names = chain("a", 8)
    storing.writes.offer("g", [pool.fill(page + 1, name) for page, name in enumerate(names)])
    storing.run()
    assert storing.require_right(names) == 8
    assert "not stored, busy" not in storing.store.stats()


def test_pages_of_groups_that_are_gone_or_never_were_are_not_stored() -> None:
    one, two = Pool("one"), Pool("two")
    storing = Storing(one, two)
    storing.run()
    names = {pool.group: chain(pool.group, 3) for pool in (one, two)}
    for pool in (one, two):
        pages = [pool.fill(page + 1, name) for page, name in enumerate(names[pool.group])]
        storing.writes.offer(pool.group, pages)
    storing.writes.offer("three", [Storable(1, 1, PageName(page_hash("three"), ROOT))])
    storing.writes.offer("two", [Storable(page, 1, PageName(page_hash(page), ROOT)) for page in (-1, NUM_PAGES)])
    storing.writes.pump(0.0)
    storing.writes.remove("one")
    storing.run()
    assert storing.writes.is_idle
    assert (storing.require_right(names["one"]), storing.require_right(names["two"])) == (0, 3)
    assert storing.writes.counts["changed before"] == 3


def test_pools_on_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("g")
    monkeypatch.setattr(type(pool.ranks[0]), "pages_view", property(lambda self: _elsewhere()))
    with pytest.raises(PagesElsewhere):
        Storing(pool)


def _elsewhere() -> None:
    raise PagesElsewhere("on cuda:0")


def storm(seed: int) -> int:
    """Pages are used again at any moment of their way; returns how many were found in the end."""
    draw = random.Random(seed)
    pools = [Pool("one"), Pool("two")]
    storing = Storing(*pools, num_slots=draw.choice((6, 40)), limits=WriteLimits(batch_pages=3), draw=draw)
    names: dict[bytes, PageName] = {}
    for _ in range(400):
        match draw.randrange(8):
            case 0:
                pool = draw.choice(pools)
                prompt = chain(draw.randrange(8), draw.randint(1, 6))
                names |= {name.page_hash: name for name in prompt}
                pages = draw.sample(range(1, NUM_PAGES), len(prompt))
                offered = [pool.fill(page, name) for page, name in zip(pages, prompt, strict=True)]
                storing.writes.offer(pool.group, offered)
            case 1:
                storing.poll()
            case _:
                lanes = [lane for lane in storing.lanes if lane.waiting]
                if lanes:
                    draw.choice(lanes).step()
    storing.run()
    return storing.require_right(list(names.values()))


def test_no_page_is_stored_under_another_name() -> None:
    assert sum(storm(seed) for seed in range(20)) > 100


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_only_the_comparison_afterwards_is_needed_and_it_is(when: str) -> None:
    def compared(compare: object, self: PoolWrites, *given: object) -> list[bool]:
        is_after = given[1] not in ([], None) and any(given[1] is batch.pages for batch in self._batches.values())
        found = compare(self, *given)  # type: ignore[operator]
        return found if (when == "after") == is_after and when != "never" else [True] * len(found)

    caught = first_caught([around(PoolWrites, "_are_current", compared)], storm, most=6)
    assert bool(caught) == (when != "after")
