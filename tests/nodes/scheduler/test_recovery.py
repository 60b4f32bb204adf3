"""A scheduler that follows a dead one: its cache is there, what ran is held for those who come again, for a while."""

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import PageTable
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.cache.rebuild import rebuild
from mesh.address import Address
from nodes.scheduler.core import SchedulerCore
from tests.nodes.scheduler.scheduler_world import PAGE, World, prompt

NUM_PAGES = 24


class Heirs:
    """A world whose scheduler `m` writes a page table, and dies."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.world = World(num_pages={"m": num_pages}, max_running=8)
        self.table = PageTable(memoryview(bytearray(PageTable.num_bytes(num_pages, PAGE))), num_pages, PAGE)
        cache = PrefixCache(num_pages, PAGE, group="m", epoch=1, table=self.table)
        self.core = self._follow(cache, None, 1)

    def _follow(self, cache, recovered, epoch) -> SchedulerCore:
        old = self.world.cores["m"]
        core = SchedulerCore(old.books.config, Address("m", epoch), old.books.pool, cache, "n", recovered)
        self.world.cores["m"] = core
        self.world.perform(core, core.start(self.world.now))
        self.world.members()
        return core

    def die(self) -> SchedulerCore:
        """The next incarnation, as its actor makes it once the worker has answered."""
        world = self.world
        world.lose("m", 1)
        found = rebuild(self.table, group="m", epoch=2)
        found.cache.clear_quarantined(found.quarantined)
        core = self._follow(found.cache, found.recovered, 2)
        for request in world.requests.values():
            request.attempt += 1
            request.is_accepted = False
            world.send_submit(request)
        return core


def running(heirs: Heirs, *lengths: int):
    world = heirs.world
    requests = [
        world.submit(prompt(length, base), "m", max_tokens=12, ignore_eos=True) for base, length in enumerate(lengths)
    ]
    world.until(lambda: all(len(request.output_ids) >= 4 for request in requests))
    return requests


def followed(heirs: Heirs, length: int) -> SchedulerCore:
    """The scheduler dies with one request, which does not come again."""
    running(heirs, length)
    heirs.world.requests.clear()
    return heirs.die()


def test_who_comes_again_computes_at_most_a_page_again() -> None:
    heirs = Heirs()
    requests = running(heirs, 21, 9)
    core = heirs.die()
    assert len(core.books.recovered) == 2
    while core.pipeline.adopted is None or len(core.books.queue):
        for link in heirs.world.busy_links():
            heirs.world.deliver(link)
    assert len(core.books.recovered) == 0, "claimed, and not let go when the lease was over"
    heirs.world.settle()
    for request in requests:
        assert request.finish == "length"
    assert core.admission.num_recomputed_tokens <= 2 * PAGE
    heirs.world.check()


def test_what_nobody_claims_is_free_after_the_lease() -> None:
    heirs = Heirs()
    requests = running(heirs, 21)
    heirs.world.requests.clear()
    core = heirs.die()
    heirs.world.flush()
    available = core.books.cache.num_available()
    assert available < NUM_PAGES - 1
    assert core.stats()["mesh_scheduler_num_recovered"] == 1
    heirs.world.advance(heirs.world.now + core.books.config.lease_s + 0.1)
    assert core.books.cache.num_available() == NUM_PAGES - 1
    assert core.books.cache.match([*requests[0].prompt, 5]).num_tokens == 20
    assert core.books.cache.num_pages_in(PageState.RUNNING) == 0
    core.assert_idle()


def test_who_is_here_does_not_wait_for_those_who_may_not_come() -> None:
    heirs = Heirs(num_pages=12)
    core = followed(heirs, 25)
    assert len(core.books.recovered) == 1
    other = heirs.world.submit(prompt(30, 7), "m", max_tokens=8)
    began = heirs.world.now
    while not other.finish:
        heirs.world.flush()
    assert heirs.world.now - began < 1.0
    assert len(core.books.recovered) == 0


def test_the_last_one_running_gets_the_pages_of_those_who_may_not_come() -> None:
    heirs = Heirs(num_pages=12)
    core = followed(heirs, 17)
    other = heirs.world.submit(prompt(9, 7), "m", max_tokens=30, ignore_eos=True)
    while not other.finish:
        heirs.world.flush()
    assert (len(core.books.recovered), other.finish) == (0, "length")
