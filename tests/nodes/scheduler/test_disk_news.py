"""What is on a host's disk reaches followers: each page, whatever is lost or begun again on the way."""

from collections import deque

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.protocol import CacheCleared, CacheEvents, ListStoredPages, PagesOnDisk, StoredPagesListed
from mesh.address import Address
from mesh.runtime.effects import Ask, Publish
from nodes.protocol import Adopted
from nodes.roles import KV_EVENTS_TOPIC
from nodes.scheduler.asks import RETRY
from nodes.scheduler.books import Books
from nodes.scheduler.disk_news import LIST, DiskNews
from nodes.scheduler.events import Tag
from tests.nodes.scheduler.scheduler_world import World
from tests.nodes.scheduler.test_restore import CONFIG, PAGE, POOL

SLOTS = 3
"""Of one answer."""


class Bench:
    """A scheduler whose agent has `pages` on disk. Asks wait in `asked`."""

    def __init__(self, pages: list[bytes], numerics: str = "cpu", stores: str = "write_through") -> None:
        self.pages, self.numerics, self.now = pages, numerics, 0.0
        cache = PrefixCache(9, PAGE, group="d", epoch=2)
        books = Books(msgspec.structs.replace(CONFIG, stores=stores), Address("d", 2), POOL, cache)
        books.worker = Adopted(worker_epoch=1, numerics=numerics, vocab_size=999)
        self.outbox, self.deadlines, self.asks = books.outbox, books.deadlines, books.asks
        self.news = DiskNews(books)
        self.asked: deque[tuple[Tag, ListStoredPages]] = deque()
        self.told: list[bytes] = []

    def turn(self) -> None:
        for command in self.outbox.take():
            match command:
                case Ask(_, ListStoredPages() as message, _, tag):
                    self.asked.append((tag, message))
                case Publish(_, CacheEvents(events=[PagesOnDisk(hashes=hashes)])):
                    self.told += [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
                case _:
                    raise AssertionError(command)

    def begin(self) -> None:
        self.news.begin(self.now)
        self.told.clear()
        self.turn()

    def answer(self) -> tuple[Tag, StoredPagesListed] | None:
        """The agent's answer to the oldest ask."""
        if not self.asked:
            return None
        tag, message = self.asked.popleft()
        assert message.numerics == self.numerics
        assert (message.used_after == -1) == (message.first_slot == 0), "the answer says what to go on with"
        after = message.first_slot + SLOTS
        part = b"".join(self.pages[message.first_slot : after])
        return tag, StoredPagesListed(hashes=part, next_slot=after if after < len(self.pages) else 0, used_after=7)

    def fail(self) -> None:
        if self.asked:
            tag, _ = self.asked.popleft()
            self.asks.failed((tag,), self.now)
            self.turn()

    def wait(self) -> None:
        self.now += 2.0
        while (due := self.deadlines.pop_due(self.now)) is not None:
            assert due[0] == RETRY
            self.asks.retry(due[1])
        self.turn()

    def hear(self, answer: tuple[Tag, StoredPagesListed] | None) -> None:
        if answer is not None:
            self.news.on_listed(*answer)
            self.turn()

    def finish(self) -> None:
        while self.asked or len(self.asks):
            self.hear(self.answer())
            self.wait()


PAGES = [bytes([number]) * 16 for number in range(20)]


@given(st.integers(0, 20), st.lists(st.sampled_from(["begin", "answer", "keep", "late", "fail", "wait"]), max_size=30))
def test_after_the_last_beginning_each_page_is_told_once(num_pages: int, events: list[str]) -> None:
    bench = Bench(PAGES[:num_pages])
    bench.begin()
    kept: list[tuple[Tag, StoredPagesListed]] = []
    for event in events:
        match event:
            case "begin":
                bench.begin()
            case "answer":
                bench.hear(bench.answer())
            case "keep":
                # The answer takes so long that the ask counts as failed.
                if (answer := bench.answer()) is not None:
                    kept.append(answer)
                    bench.asks.failed((answer[0],), bench.now)
            case "late":
                bench.hear(kept.pop() if kept else None)
            case "fail":
                bench.fail()
            case _:
                bench.wait()
    bench.finish()
    for answer in kept:
        bench.hear(answer)
    assert sorted(bench.told) == PAGES[:num_pages]


def test_without_a_disk_or_a_worker_nothing_is_asked() -> None:
    for bench in (Bench(PAGES, stores=""), Bench(PAGES, numerics="")):
        bench.begin()
        assert not bench.asked


def test_an_agent_that_never_answers_is_given_up() -> None:
    bench = Bench(PAGES)
    bench.begin()
    num_asked = 0
    while bench.asked:
        num_asked += 1
        bench.fail()
        bench.wait()
    assert 10 < num_asked < 100
    assert not len(bench.asks)
    assert (LIST, "1") not in bench.asks


def test_what_the_disk_has_is_told_behind_the_start_of_the_cache() -> None:
    """An agent may answer before a scheduler has told that its cache is empty, which takes back what was told."""
    world = World(num_pages={"d": 9}, stores="write_through")
    world.workers["w-d"].numerics, world.agents["a-d"].stored = "cpu", b"x" * 16
    world.settle()
    told = [event for _, topic, news in world.published if topic == KV_EVENTS_TOPIC for event in news.events]
    assert told == [CacheCleared(group="d"), PagesOnDisk(group="d", hashes=b"x" * 16)]
