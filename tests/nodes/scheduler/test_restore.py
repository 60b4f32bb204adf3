"""Pages of a prompt that the disk has: when they are read, what becomes of them, and who waits for that."""

import math

import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.hashing import chain_hashes, root_hash
from kvstore.layout import KVLayout
from kvstore.protocol import (
    CloseGrant,
    FindStored,
    GrantClosed,
    GrantRefused,
    GrantsOpened,
    MissedPages,
    OpenGrants,
    PagesPulled,
    PoolHandle,
    StoredFound,
    StoredPrefix,
    TransferFailed,
)
from mesh.address import Address
from mesh.runtime.effects import Ask
from nodes.protocol import Adopted
from nodes.request import RequestSpec, Sampling
from nodes.scheduler.books import Books
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.handoff.own_grants import CLOSE, EXPIRE, OPEN, OwnGrants
from nodes.scheduler.handoff.restore import (
    AGAIN_S,
    FIND,
    LEAST_S,
    LOOK_S,
    LOOKED,
    MAX_RESTORES,
    TRIAL_TIMEOUT_S,
    UNKNOWN_S,
    RestoreQueue,
)
from nodes.scheduler.rates import LearnedRate
from nodes.scheduler.sequence import Offer, Sequence, Stage
from tests.nodes.scheduler.scheduler_world import NO_STOP

PAGE, NUM_PAGES = 4, 200
CONFIG = SchedulerConfig(
    group="d",
    worker="w",
    agent="a",
    context_length=999,
    page_size=PAGE,
    chunk_tokens=8,
    step_tokens=300,
    stores="write_through",
)
POOL = PoolHandle(
    group="d",
    agent="a",
    path="",
    num_pages=NUM_PAGES,
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE),
    incarnation=3,
)
PROMPT = list(range(22))
"""Five pages that can be reused: with all of them computed, one token is left."""


class Bench:
    """One scheduler's restores. The disk of its agent has what a test says."""

    def __init__(self, config: SchedulerConfig = CONFIG, numerics: str = "cpu") -> None:
        self.cache = PrefixCache(NUM_PAGES, PAGE, group="d", epoch=2)
        self.books = Books(config, Address("d", 2), POOL, self.cache)
        self.books.worker = Adopted(worker_epoch=1, numerics=numerics, vocab_size=999)
        self.outbox, self.deadlines, self.asks = self.books.outbox, self.books.deadlines, self.books.asks
        self.prefills = self.books.prefills
        self.own = OwnGrants(self.books, "n")
        self.kept: list[int] = []
        self.restores = RestoreQueue(self.books, self.own, self)  # type: ignore[arg-type]
        self.back: list[Sequence] = []
        self.books.put_back = lambda one: self.back.append(one)  # type: ignore[method-assign]
        self.rows = 0
        self.is_mixed = False
        self.numbers: dict[str, str] = {}
        self.asked: dict[str, int] = {}

    def are_stored(self, pages: list[int]) -> None:
        self.kept += pages

    def ended(self) -> list[Sequence]:
        """Sequences that wait again, since the last look."""
        back, self.back = self.back, []
        return back

    def pulled(self, grant_id: str, num_pages: int, now: float, *, complete: bool = False) -> list[Sequence]:
        self.own.on_pulled(PagesPulled(grant_id=grant_id, num_pages=num_pages, complete=complete), now)
        return self.ended()

    def sequence(self, tokens: list[int] = PROMPT, extra_key: str = "") -> Sequence:
        self.rows += 1
        spec = RequestSpec(Sampling(seed=5), NO_STOP, extra_key=extra_key)
        return Sequence(self.rows, tokens, len(tokens), spec, 0.0)

    def cached(self, tokens: list[int]) -> None:
        before = self.cache.start([*tokens, 0])
        assert before.reserve(len(tokens))
        before.advance(tokens[before.num_tokens :])
        before.release()

    def taken(self, now: float = 0.0) -> list[object]:
        """The asks of a turn."""
        self.own.flush()
        self.restores.flush(now)
        asks = [one for one in self.outbox.take() if isinstance(one, Ask)]
        assert {one.actor_id for one in asks} <= {"a"}
        self.numbers |= dict(one.tag for one in asks)
        found = (one.message for one in asks if isinstance(one.message, FindStored))
        self.asked |= {prompt.name: len(prompt.hashes) // 16 for message in found for prompt in message.prompts}
        return [one.message for one in asks]

    def found(self, one: Sequence, num_pages: int) -> None:
        """The agent answers that so many pages of it are stored."""
        self.taken()
        slots = list(range(100, 100 + num_pages))
        num_asked = self.asked[f"{one.row_id}.{one.num_looks}"]
        prefix = StoredPrefix(
            name=f"{one.row_id}.{one.num_looks}",
            slots=slots,
            sequences=[900 + slot for slot in slots],
            missed=[MissedPages(why="evicted", num=num_asked - num_pages)],
        )
        self.restores.on_found(self.numbers[FIND], StoredFound(found=[prefix], source="disk", incarnation=7))

    def looked(self, num_pages: int, tokens: list[int] = PROMPT, now: float = 0.0) -> Sequence:
        one = self.sequence(tokens)
        self.restores.look(one, now)
        self.found(one, num_pages)
        return one

    def opened(self, num_pages: int, now: float = 0.0, tokens: list[int] = PROMPT) -> tuple[Sequence, str]:
        """A sequence of which so many pages are being read, and the grant."""
        one = self.looked(num_pages, tokens, now)
        num_cached = self.cache.match(tokens).num_tokens
        offer = self.restores.offer(one, num_cached, now)
        assert offer is not None
        self.begin(one, offer, now)
        (message,) = self.taken()
        assert isinstance(message, OpenGrants)
        return one, message.grants[0].grant_id

    def begin(self, one: Sequence, offer: Offer, now: float) -> None:
        one.hold(self.cache.start(one.reusable_ids))
        assert one.kv is not None
        lent = one.kv.export((offer.first + len(offer.slots)) * PAGE)
        assert lent is not None
        self.restores.open(one, lent, offer, now)

    def pages(self, state: PageState) -> int:
        return self.cache.num_pages_in(state)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_is_not_cached_is_asked_for_by_its_hashes(bench: Bench) -> None:
    bench.cached(PROMPT[: 2 * PAGE])
    one, two = bench.sequence(), bench.sequence(PROMPT[: 2 * PAGE + 1])
    bench.restores.look(one, 0.0)
    bench.restores.look(two, 0.0)
    (asked,) = bench.taken()
    hashes = chain_hashes(root_hash(), PROMPT, PAGE)
    assert isinstance(asked, FindStored)
    assert (asked.group, asked.numerics) == ("d", "cpu")
    assert [(prompt.name, prompt.hashes) for prompt in asked.prompts] == [("1.1", b"".join(hashes[2:5]))]
    assert two.looks_until == 0.0, "all of it is cached"


def test_a_page_in_the_middle_of_an_edge_is_continued_by_its_own_hash(bench: Bench) -> None:
    bench.cached([*PROMPT[: 3 * PAGE], 77, 77, 77, 77])
    assert bench.cache.uncached(PROMPT) == (3, chain_hashes(root_hash(), PROMPT, PAGE)[3:5])
    assert bench.cache.uncached(PROMPT, "salt") == (0, chain_hashes(root_hash("salt"), PROMPT, PAGE)[:5])


@pytest.mark.parametrize("why", ["no disk", "no worker", "soon computed", "short"])
def test_nothing_is_asked_where_no_answer_can_help(why: str) -> None:
    config = CONFIG if why != "no disk" else SchedulerConfig(group="d", worker="w", agent="a", context_length=99)
    bench = Bench(config, "" if why == "no worker" else "cpu")
    if why == "soon computed":
        bench.prefills.observe(1000, 1000 * LOOK_S / (5 * PAGE))
    one = bench.sequence(PROMPT[:PAGE] if why == "short" else PROMPT)
    bench.restores.look(one, 0.0)
    assert bench.taken() == []
    assert not bench.restores.must_wait(one, 0, 0.0)
    runs = {"no disk": [("no_store", 1)], "no worker": [("no_worker", 5)], "soon computed": [("short", 5)]}
    assert entered(one, 0) == runs.get(why, [])


def entered(one: Sequence, num_cached: int) -> list[tuple[str, int]]:
    """What is remembered of its pages once it enters."""
    assert one.fate is not None
    one.fate.enter(num_cached, "")
    assert one.fate.has_entered
    return [(run.why, run.num) for run in one.fate.runs()]


def test_a_sequence_waits_for_the_answer_but_not_long(bench: Bench) -> None:
    one = bench.sequence()
    bench.restores.look(one, 0.0)
    assert bench.restores.must_wait(one, 0, 0.9), "from when it leaves"
    bench.taken(1.0)
    assert bench.restores.must_wait(one, 0, 1.0)
    assert bench.deadlines.pop_due(1.0 + LOOK_S) == (LOOKED, "")
    assert not bench.restores.must_wait(one, 0, 1.0 + LOOK_S)
    assert bench.restores.offer(one, 0, 1.0 + LOOK_S) is None
    late = Bench()
    two = late.sequence()
    late.restores.look(two, 0.0)
    assert entered(two, 0) == [("late", 5)]
    bench.found(one, 3)
    assert bench.restores.offer(one, 0, 2.0) is not None, "it still waits: an answer that is late is one"


def test_each_waits_for_its_own_answer_as_long(bench: Bench) -> None:
    one, two = bench.sequence(), bench.sequence([9] * 22)
    bench.restores.look(one, 0.0)
    bench.taken(1.0)
    bench.restores.look(two, 0.0)
    bench.taken(1.0 + LOOK_S / 2)
    assert bench.deadlines.pop_due(1.0 + LOOK_S) == (LOOKED, "")
    bench.restores.on_looked(1.0 + LOOK_S)
    assert not bench.restores.must_wait(one, 0, 1.0 + LOOK_S)
    assert bench.restores.must_wait(two, 0, 1.0 + LOOK_S)
    assert bench.deadlines.next() == two.looks_until, "nothing else would wake the scheduler for it"
    bench.deadlines.clear((LOOKED, ""))
    bench.restores.on_looked(two.looks_until)
    assert bench.deadlines.next() is None


def test_an_ask_that_fails_is_an_answer(bench: Bench) -> None:
    one = bench.sequence()
    bench.restores.look(one, 0.0)
    bench.taken()
    bench.restores.on_find_failed(bench.numbers[FIND])
    assert not bench.restores.must_wait(one, 0, 1.0)
    assert entered(one, 0) == [("no_answer", 5)]
    bench.restores.on_find_failed(bench.numbers[FIND])
    bench.restores.on_found(bench.numbers[FIND], StoredFound(found=[]))


def test_a_sequence_that_the_answer_does_not_name_has_nothing_stored(bench: Bench) -> None:
    one = bench.sequence()
    bench.restores.look(one, 0.0)
    bench.taken()
    bench.restores.on_found(bench.numbers[FIND], StoredFound(found=[StoredPrefix(name="9", slots=[1], sequences=[1])]))
    assert not bench.restores.must_wait(one, 0, 1.0)
    assert bench.restores.offer(one, 0, 1.0) is None


def test_the_grant_is_of_exactly_what_is_stored(bench: Bench) -> None:
    bench.cached(PROMPT[:PAGE])
    one = bench.looked(3)
    offer = bench.restores.offer(one, PAGE, 0.0)
    assert offer == Offer("disk", 7, 1, [100, 101, 102], [1000, 1001, 1002])
    bench.begin(one, offer, 0.0)
    (message,) = bench.taken()
    (grant,) = message.grants
    assert len(grant.pages) == 3
    assert (grant.stored.source, grant.stored.incarnation) == ("disk", 7)
    assert (grant.stored.slots, grant.stored.sequences) == ([100, 101, 102], [1000, 1001, 1002])
    assert one.stage is Stage.RESTORE
    assert bench.pages(PageState.IN_FLIGHT) == 3, "the agent may write them as soon as it is asked"


def test_less_is_read_if_more_was_cached_meanwhile(bench: Bench) -> None:
    one = bench.looked(4)
    bench.cached(PROMPT[: 3 * PAGE])
    assert bench.restores.offer(one, 3 * PAGE, 0.0) == Offer("disk", 7, 3, [103], [1003])
    assert bench.restores.offer(one, 4 * PAGE, 0.0) is None


def test_a_late_answer_is_not_taken_for_that_of_a_second_look(bench: Bench) -> None:
    one = bench.sequence()
    bench.restores.look(one, 0.0)
    bench.taken()
    first = bench.numbers[FIND]
    bench.cached(PROMPT[: 2 * PAGE])
    one.num_preemptions += 1
    bench.restores.look_again(one, 0.0)
    bench.taken()
    late = StoredPrefix(name="1.1", slots=[100], sequences=[1000])
    bench.restores.on_found(first, StoredFound(found=[late], source="disk", incarnation=7))
    assert one.offer is not None
    assert one.offer.first == 0, "its slots are those of the pages that were asked for then"
    assert bench.restores.offer(one, 2 * PAGE, 0.0) is None
    bench.found(one, 2)
    assert bench.restores.offer(one, 2 * PAGE, 0.0) == Offer("disk", 7, 2, [100, 101], [1000, 1001])


def test_what_was_found_for_another_way_of_computing_is_not_read(bench: Bench) -> None:
    one, two = bench.looked(3), bench.sequence([9] * 22)
    bench.restores.look(two, 0.0)
    bench.taken()
    bench.restores.on_other_numerics([one])
    bench.found(two, 3)
    assert bench.restores.offer(one, 0, 1.0) is None
    assert bench.restores.offer(two, 0, 1.0) is None, "asked for before, answered after"


def test_one_that_was_preempted_looks_again_but_not_after_a_failure(bench: Bench) -> None:
    one = bench.looked(0)
    bench.restores.look_again(one, 0.0)
    assert bench.taken() == [], "it has looked"
    one.num_preemptions += 1
    for _ in range(2):
        bench.restores.look_again(one, 0.0)
    (asked,) = bench.taken()
    assert isinstance(asked, FindStored)
    assert [prompt.name for prompt in asked.prompts] == ["1.2"], "once each time"
    failed, grant_id = bench.opened(3)
    bench.own.on_expired(grant_id, 1.0)
    failed.num_preemptions += 1
    bench.restores.look_again(failed, 0.0)
    assert [message for message in bench.taken() if isinstance(message, FindStored)] == []


def test_nothing_is_read_that_does_not_continue_what_is_cached(bench: Bench) -> None:
    bench.cached(PROMPT[: 2 * PAGE])
    one = bench.looked(2)
    assert bench.restores.offer(one, PAGE, 0.0) is None, "a page between them was evicted"
    assert entered(one, 1) == [("cached", 1), ("left_pool", 1), ("behind_a_gap", 2), ("evicted", 1)]


def test_what_is_read_is_cached_and_the_sequence_waits_again(bench: Bench) -> None:
    bench.cached(PROMPT[:PAGE])
    one, grant_id = bench.opened(3)
    assert bench.pulled(grant_id, 1, 0.5) == []
    assert bench.pulled(grant_id, 3, 2.0, complete=True) == [one]
    assert (one.kv, one.num_restored, len(bench.books.loans)) == (None, 3 * PAGE, 0)
    assert bench.cache.match(PROMPT).num_tokens == 4 * PAGE
    assert entered(one, 4) == [("cached", 1), ("restored", 3), ("evicted", 1)]
    assert bench.pages(PageState.CACHED) == 4
    assert len(bench.kept) == 3, "they are on the disk already"
    assert bench.restores.reads.per_second == pytest.approx(1.5)
    assert bench.restores.offer(one, 0, 2.0) is None, "a sequence restores once"
    assert bench.taken() == [CloseGrant(grant_id=grant_id)], "or the agent tells it again and again"
    bench.own.on_closed(grant_id, GrantClosed(grant_id=grant_id))
    assert bench.own.num_closing == 0
    assert bench.pulled(grant_id, 3, 2.0, complete=True) == []


@pytest.mark.parametrize("how", ["refused", "failed", "late", "expired", "agent lost"])
def test_what_could_not_be_read_is_computed(bench: Bench, how: str) -> None:
    one, grant_id = bench.opened(3)
    if how != "refused":
        bench.pulled(grant_id, 1, 0.5)
    match how:
        case "refused":
            refused = GrantsOpened(opened=[], refused=[GrantRefused(grant_id=grant_id, code="draining")])
            bench.own.on_opened(bench.numbers[OPEN], refused, 1.0)
        case "failed" | "late":
            code = "corrupt_pages" if how == "failed" else "deadline_exceeded"
            bench.own.on_transfer_failed(TransferFailed(grant_id=grant_id, code=code, message=""), 1.0)
        case "expired":
            bench.own.on_expired(grant_id, 1.0)
        case _:
            bench.own.on_peer_lost("other", 1.0)
            assert bench.ended() == []
            bench.own.on_peer_lost("a", 1.0)
    num_good = 0 if how == "refused" else 1
    assert bench.ended() == [one]
    why = {"failed": "corrupt", "late": "timed_out", "expired": "timed_out"}.get(how, "failed")
    assert entered(one, num_good) == [("restored", 1)] * num_good + [(why, 3 - num_good), ("evicted", 2)]
    assert (one.kv, len(bench.books.loans), bench.restores.num_failed) == (None, 0, 1)
    assert bench.cache.match(PROMPT).num_tokens == num_good * PAGE
    assert bench.pages(PageState.QUARANTINED) == 3 - num_good, "a read that the disk has begun goes on"
    assert bench.restores.offer(one, 0, 1.0) is None, "not again after a failure"
    # A disk is slow by what it did not do in time, and by nothing else.
    assert (bench.restores.reads.per_second > 0) == (how in ("late", "expired"))
    assert bench.taken() == [CloseGrant(grant_id=grant_id)]
    bench.own.on_closed(grant_id, GrantClosed(grant_id=grant_id))
    assert bench.pages(PageState.FREE) == NUM_PAGES - 1 - num_good
    assert bench.cache.check() == []


def test_silence_ends_a_restore_when_its_time_is_over(bench: Bench) -> None:
    one, grant_id = bench.opened(3)
    bench.own.on_ask_failed(bench.numbers[OPEN], "deadline_exceeded", 2.0)
    assert bench.ended() == [], "it is asked again"
    assert bench.deadlines.pop_due(2.5) == (LOOKED, "")
    assert bench.deadlines.pop_due(2.5) == (OPEN, "a")
    bench.own.opens.retry("a")
    bench.taken()
    assert bench.deadlines.pop_due(UNKNOWN_S) == (EXPIRE, grant_id)
    bench.own.on_expired(grant_id, UNKNOWN_S)
    assert bench.ended() == [one]
    assert [type(message) for message in bench.taken()] == [CloseGrant]


def test_a_restore_gets_twice_the_time_of_computing(bench: Bench) -> None:
    bench.prefills.observe(1, 1.0)
    _, grant_id = bench.opened(3)
    assert bench.deadlines.at((EXPIRE, grant_id)) == 2 * 3 * PAGE
    bench.prefills.observe(10_000_000, 1.0)
    one = bench.sequence([5, *PROMPT])
    bench.begin(one, Offer("disk", 7, 0, [1], [1]), 50.0)
    assert bench.deadlines.at((EXPIRE, "d#2/n.2")) == 50 + LEAST_S


def test_one_that_is_given_up_gives_its_pages_back(bench: Bench) -> None:
    one, grant_id = bench.opened(3)
    bench.restores.give_up(bench.books.loan_of(one), "revoked", 0.5)
    assert (one.kv, len(bench.books.loans)) == (None, 0)
    assert bench.pulled(grant_id, 3, 1.0, complete=True) == []
    assert bench.asks.get((CLOSE, grant_id)) is not None
    assert bench.restores.reads.per_second == 0.0


def test_pages_are_computed_where_that_is_quicker_until_the_disk_is_tried_again(bench: Bench) -> None:
    bench.prefills.observe(100, 1.0)
    two, three = bench.looked(3), bench.looked(3)
    one, grant_id = bench.opened(3)
    # Three pages take a second, and computing them 0.12.
    bench.pulled(grant_id, 3, 1.0, complete=True)
    bench.cache.reset()
    assert bench.restores.offer(two, 0, 2.0) is None
    assert not bench.restores.must_wait(two, 0, 2.0)
    assert bench.restores.num_dearer == 1
    assert entered(two, 0) == [("dearer", 3), ("evicted", 2)]
    four = bench.sequence()
    bench.restores.look(four, 3.0)
    assert not any(isinstance(one, FindStored) for one in bench.taken(3.0)), "whatever the disk has of it"
    assert not bench.restores.must_wait(four, 0, 3.0)
    assert entered(four, 0) == [("dearer", 5)]
    assert bench.restores.num_dearer == 2
    bench.restores.look(four, AGAIN_S)
    assert [type(message) for message in bench.taken(AGAIN_S)] == [FindStored]
    trial = bench.restores.offer(three, 0, AGAIN_S)
    assert trial is not None, "what made it slow may be over"
    assert (len(trial.slots), one.offer) == (1, None), "who asks does not wait for all of them"


@pytest.mark.parametrize(("took_s", "is_read"), [(0.01, True), (0.09, False), (TRIAL_TIMEOUT_S, False)])
def test_a_trial_says_what_the_disk_is_now(bench: Bench, took_s: float, *, is_read: bool) -> None:
    bench.prefills.observe(100, 1.0)
    _, grant_id = bench.opened(3)
    bench.pulled(grant_id, 3, 3.0, complete=True)
    bench.cache.reset()
    _, grant_id = bench.opened(3, AGAIN_S)
    assert bench.deadlines.at((EXPIRE, grant_id)) == AGAIN_S + TRIAL_TIMEOUT_S
    if took_s < TRIAL_TIMEOUT_S:
        bench.pulled(grant_id, 1, AGAIN_S + took_s, complete=True)
    else:
        bench.own.on_expired(grant_id, AGAIN_S + took_s)
    bench.cache.reset()
    bench.restores.look(bench.sequence(), AGAIN_S + 1.0)
    assert any(isinstance(one, FindStored) for one in bench.taken(AGAIN_S + 1.0)) == is_read


def test_a_page_is_computed_while_nobody_knows_how_long_that_takes(bench: Bench) -> None:
    _, grant_id = bench.opened(3)
    bench.pulled(grant_id, 3, 1.0, complete=True)
    bench.cache.reset()
    offer = bench.restores.offer(bench.looked(3), 0, 2.0)
    assert offer is not None
    assert len(offer.slots) == 2
    assert bench.restores.offer(bench.looked(1), 0, 2.0) is None
    bench.prefills.observe(PAGE, 1.0)
    offer = bench.restores.offer(bench.looked(3), 0, 2.0)
    assert offer is not None
    assert len(offer.slots) == 3


def test_a_disk_that_is_quick_is_read(bench: Bench) -> None:
    bench.prefills.observe(PAGE, 1.0)
    _, grant_id = bench.opened(3)
    bench.pulled(grant_id, 3, 1.0, complete=True)
    bench.cache.reset()
    assert bench.restores.offer(bench.looked(3), 0, 2.0) is not None


def test_who_begins_alike_waits_for_what_is_being_read(bench: Bench) -> None:
    _, grant_id = bench.opened(4)
    alike, shorter, other = (
        bench.sequence(),
        bench.sequence([*PROMPT[: 2 * PAGE], 7, 7, 7, 7, 7]),
        bench.sequence([9] * 22),
    )
    salted = bench.sequence(extra_key="salt")
    assert bench.restores.must_wait(alike, 0, 1.0)
    assert bench.restores.must_wait(alike, 3 * PAGE, 1.0)
    assert not bench.restores.must_wait(alike, 4 * PAGE, 1.0), "it has all of that"
    assert bench.restores.must_wait(shorter, PAGE, 1.0)
    assert not bench.restores.must_wait(shorter, 2 * PAGE, 1.0)
    assert not bench.restores.must_wait(other, 0, 1.0)
    assert not bench.restores.must_wait(salted, 0, 1.0), "equal tokens of another salt are other pages"
    bench.pulled(grant_id, 4, 1.0, complete=True)
    assert not bench.restores.must_wait(alike, 0, 1.0)


def test_no_more_are_read_at_once_than_a_disk_has_use_for(bench: Bench) -> None:
    opened = [bench.opened(1, tokens=[number, *PROMPT]) for number in range(100, 100 + MAX_RESTORES)]
    one, none = bench.looked(2), bench.looked(0)
    assert bench.restores.must_wait(one, 0, 1.0)
    assert not bench.restores.must_wait(none, 0, 1.0), "nothing is stored of it"
    bench.pulled(opened[0][1], 1, 1.0, complete=True)
    assert not bench.restores.must_wait(one, 0, 1.0)
    assert [sequence for sequence, _ in opened[1:]] == bench.books.lent(Stage.RESTORE)


def test_rates_fade_and_take_no_nonsense() -> None:
    rate = LearnedRate()
    assert (rate.seconds(5), rate.per_second) == (None, 0.0)
    for seconds in (math.nan, math.inf, 0.0, -1.0):
        rate.observe(10, seconds)
    rate.observe(-1, 1.0)
    assert rate.seconds(5) is None
    rate.observe(0, 2.0)
    assert rate.seconds(5) == math.inf
    rate.observe(10, 1.0)
    assert rate.seconds(10) == pytest.approx(2.6)
    for _ in range(40):
        rate.observe(10, 1.0)
    assert rate.seconds(10) == pytest.approx(1.0, rel=0.01)
