"""Damage planted in a scheduler's books, found while it has nothing to do."""

from collections.abc import Callable

import pytest

from kvstore.cache.allocator import PAGES_AT_ONCE, PageState
from kvstore.cache.prefix_cache import PrefixCache
from mesh.address import Address
from nodes.scheduler.books import Books
from nodes.scheduler.core import SchedulerCore
from nodes.scheduler.events import Announce, Command, MembersChanged, PagesDamaged, Wake
from nodes.scheduler.idle_check import CHECK, IDLE_S, MAX_TOLD, IdleCheck
from tests.nodes.scheduler.scheduler_world import World, prompt, started
from tests.nodes.scheduler.test_restore import CONFIG, POOL


@pytest.fixture
def world() -> World:
    return started()


def served(world: World, base: int = 0) -> list[int]:
    """A prompt that has been served, and the pages that the cache keeps of it."""
    tokens = prompt(30, base)
    world.submit(tokens, "m", max_tokens=4, ignore_eos=True)
    world.settle()
    return world.cores["m"].books.cache.match(tokens).pages


def idle_commands(core: SchedulerCore, now: float) -> list[Command]:
    """Everything that it says until it has nothing to do any more, and no event comes."""
    core.handle(MembersChanged(dict(core._ready), set(), set()), now)
    said = core.handle(Wake(), now)
    while (at := core.next_deadline()) is not None:
        said += core.handle(Wake(), at)
    return said


def listed_though_cached(core: SchedulerCore, pages: list[int]) -> int:
    core.books.cache.blocks.allocator._free.append(pages[2])
    return pages[2]


def free_though_cached(core: SchedulerCore, pages: list[int]) -> int:
    core.books.cache.blocks.allocator.evict([pages[1]])
    return pages[1]


def at_two_places(core: SchedulerCore, pages: list[int]) -> int:
    """As if the tree had mixed two prompts up."""
    node = next(node for node, _ in core.books.cache.blocks.tree.runs() if pages[3] in node.pages)
    node.pages[node.pages.index(pages[3])] = pages[0]
    return pages[0]


def running_without_a_sequence(core: SchedulerCore, pages: list[int]) -> int:
    taken = core.books.cache.blocks.allocator.allocate(1)
    assert taken is not None
    return taken[0]


@pytest.mark.parametrize("plant", [listed_though_cached, free_though_cached, at_two_places, running_without_a_sequence])
def test_damaged_pages_are_quarantined_told_and_served_no_more(
    world: World, plant: Callable[[SchedulerCore, list[int]], int]
) -> None:
    core = world.cores["m"]
    pages = served(world)
    damaged = plant(core, pages)
    said = idle_commands(core, world.now)
    (told,) = (one for one in said if isinstance(one, PagesDamaged))
    assert damaged in {violation.page for violation in told.violations}
    assert told.num_pages == core.books.cache.blocks.num_violations == core.idle_check.num_found > 0
    assert [one.worker_ready for one in said if isinstance(one, Announce)] == [True], "its note"
    assert core.stats()["mesh_scheduler_page_violations_total"] == told.num_pages
    assert core.books.cache.blocks.allocator.state(damaged) is PageState.QUARANTINED
    if plant is not running_without_a_sequence:
        assert core.books.cache.match(prompt(30)).pages == [], "which of the others are right is not known"
    # It goes on, gives the damaged page to nobody, and says so once.
    again = served(world)
    assert again
    assert damaged not in again
    assert not [one for one in idle_commands(core, world.now) if isinstance(one, PagesDamaged)]
    world.leave()


def test_right_books_are_left_alone_and_a_pass_is_made_once(world: World) -> None:
    core = world.cores["m"]
    pages = served(world)
    assert core.idle_check._is_over
    assert core.next_deadline() is None, "an idle scheduler sleeps"
    assert not [one for one in idle_commands(core, world.now) if isinstance(one, PagesDamaged | Announce)]
    assert core.books.cache.match(prompt(30)).pages == pages
    world.check()


def test_nothing_is_looked_at_while_anything_runs(world: World) -> None:
    core = world.cores["m"]
    request = world.submit(prompt(30), "m", max_tokens=40, ignore_eos=True)
    world.until(lambda: len(request.output_ids) >= 3)
    while not request.is_over:
        assert core.books.deadlines.at((CHECK, "")) is None
        world.step()
    world.settle()
    world.check()


def test_an_event_ends_a_pass_and_the_next_one_begins_anew() -> None:
    cache = PrefixCache(3 * PAGES_AT_ONCE, 4, group="m", epoch=1)
    books = Books(CONFIG, Address("d", 2), POOL, cache)
    deadlines, outbox, check = books.deadlines, books.outbox, IdleCheck(books)
    check.look(is_idle=True, now=0.0)
    assert deadlines.pop_due(IDLE_S - 0.1) is None
    now, num_slices = IDLE_S, 0
    while deadlines.pop_due(now) is not None:
        check.on_due(now)
        num_slices += 1
        now += 1.0
        if num_slices == 2:
            # What a slice has looked at changes behind it: had the pass gone on, the pages would seem to be lost.
            cache.start(range(9)).reserve(4 * 2 * PAGES_AT_ONCE)
            check.interrupt()
            assert deadlines.next() is None
            check.look(is_idle=True, now=now)
            now += IDLE_S
    assert num_slices > 2 + 2 * 3, "of the free list and of the states"
    assert not check.tell()
    assert outbox.take() == []


def test_of_many_damaged_pages_some_are_named() -> None:
    cache = PrefixCache(100, 4, group="m", epoch=1)
    books = Books(CONFIG, Address("d", 2), POOL, cache)
    outbox, check = books.outbox, IdleCheck(books)
    assert cache.blocks.allocator.allocate(20)
    cache.check()
    assert check.tell()
    (told,) = outbox.take()
    assert isinstance(told, PagesDamaged)
    assert (told.num_pages, len(told.violations)) == (20, MAX_TOLD)
    assert not check.tell()
