"""What is cached is forgotten as soon as nothing runs any more, and while something does it is not."""

import pytest

from kvstore.cache.allocator import PageState
from kvstore.protocol import CacheCleared
from mesh.address import Address
from mesh.runtime.effects import Asked, Refuse, Reply
from nodes.protocol import CacheFlushed, FlushCache, StopAt
from nodes.protocol.control import BUSY
from nodes.request import AttemptRef
from nodes.scheduler.cache_news import GATHER_S
from nodes.scheduler.events import Command, Wake
from nodes.scheduler.flushes import PATIENCE_S
from tests.nodes.scheduler.scheduler_world import EDGE, prompt, started

FLUSH = Asked(Address("g", 1), FlushCache(), 5)


def test_every_prefix_is_forgotten_and_tokenizers_hear_of_it() -> None:
    world = started()
    world.submit(prompt(9), "m", max_tokens=4)
    world.settle()
    core = world.cores["m"]
    cached = core.books.cache.num_pages_in(PageState.CACHED)
    assert cached >= 2
    world.published.clear()
    for number in (cached, 0):
        assert core.handle(FLUSH, world.now) == [Reply(5, CacheFlushed(num_pages=number))]
        world.event("m", Wake())
        world.advance(world.now + GATHER_S)
    assert core.books.cache.num_pages_in(PageState.FREE) == core.books.cache.num_pages
    told = [event for _, topic, message in world.published if topic == "kv_events" for event in message.events]
    assert told == [CacheCleared(group="m")] * 2, "tokenizers route by what is cached"
    again = world.submit(prompt(9), "m", max_tokens=4)
    world.settle()
    assert again.finish
    assert core.books.cache.num_pages_in(PageState.CACHED) == cached


def test_what_goes_on_is_waited_for_and_then_refused() -> None:
    world = started()
    world.submit(prompt(9), "m", max_tokens=4)
    world.flush("w-m")
    core, began = world.cores["m"], world.now
    assert core.handle(FLUSH, began) == []
    assert core.handle(Asked(Address("g", 1), FlushCache(), 6), began + 0.5) == []
    refused: list[tuple[float, Command]] = []
    while (now := core.next_deadline()) is not None and now <= began + 2 * PATIENCE_S:
        refused += [(now, command) for command in core.handle(Wake(), now) if isinstance(command, Refuse)]
    why = "requests are under way here"
    assert refused == [
        (began + PATIENCE_S, Refuse(5, BUSY, why, retryable=True)),
        (began + PATIENCE_S + 0.5, Refuse(6, BUSY, why, retryable=True)),
    ]


def test_what_a_stop_string_has_ended_is_waited_for() -> None:
    world = started()
    request = world.submit(prompt(9), "m", max_tokens=40)
    world.until(lambda: len(request.output_ids) > 2)
    world.ask_from_edge("m", FlushCache())
    world.deliver((EDGE, "m"))
    assert world.asks, "its scheduler does not know yet"
    world.put(EDGE, "m", StopAt(attempts=[AttemptRef(request.request_id, request.attempt)]))
    stopped = world.now
    world.flush()
    assert (world.now, world.asks, world.refused) == (stopped, {}, [])
    assert world.cores["m"].books.cache.num_pages_in(PageState.CACHED) == 0
    world.cancel(request)
    world.flush()


@pytest.mark.parametrize("first", ["d", "p"])
def test_right_after_an_answer_all_schedulers_of_a_handoff_forget(first: str) -> None:
    pair = started(num_pages={"d": 60, "p": 60})
    request = pair.submit(prompt(19), "d", prefill="p", max_tokens=4)
    pair.until(lambda: request.finish)
    ended = pair.now
    for name in (first, *({"d", "p"} - {first})):
        pair.ask_from_edge(name, FlushCache())
    pair.flush()
    assert (pair.now, pair.asks, pair.refused) == (ended, {}, []), "no time was to pass"
    for core in pair.cores.values():
        assert core.books.cache.num_pages_in(PageState.FREE) == core.books.cache.num_pages
    pair.settle()
