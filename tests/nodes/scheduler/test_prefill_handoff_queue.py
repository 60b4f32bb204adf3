"""Prefill's side of a handoff, message by message."""

import pytest
from msgspec.structs import replace

from kvstore.cache.prefix_cache import PrefixCache
from kvstore.layout import KVLayout
from kvstore.protocol import AnnouncePages, PagesPulled, PagesReady, PoolHandle, TransferFailed
from mesh.address import Address
from nodes.protocol import PrefillDone, PrefillFailed, PrefillNews, PrefillOrder
from nodes.request import RequestSpec, Sampling
from nodes.scheduler.books import Books
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.handoff import prefill as module
from nodes.scheduler.handoff.prefill import ANNOUNCE, LEASE, TIMEOUT, PrefillHandoffQueue
from nodes.scheduler.sequence import Sequence
from tests.nodes.scheduler.scheduler_world import NO_STOP

PAGE = 4
CONFIG = SchedulerConfig(
    group="p", worker="w", agent="a", context_length=99, page_size=PAGE, chunk_tokens=8, step_tokens=300, max_orders=2
)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE)
POOL = PoolHandle(group="p", agent="a", path="", num_pages=20, layout=LAYOUT, incarnation=3)
D = Address("d", 2)


def order(grant_id: str = "g", **more) -> PrefillOrder:
    fields = {
        "grant_id": grant_id, "request_id": "r", "attempt": 0, "token_ids": list(range(10)), "num_prompt_tokens": 8,
        "num_skip_tokens": PAGE, "spec": RequestSpec(Sampling(), NO_STOP), "agent": "a-d", "timeout_s": 30.0,
    }  # fmt: skip
    return PrefillOrder(**{**fields, **more})


class Bench:
    def __init__(self) -> None:
        self.cache = PrefixCache(20, PAGE, group="p", epoch=1)
        books = Books(CONFIG, Address("p", 1), POOL, self.cache)
        self.outbox, self.deadlines = books.outbox, books.deadlines
        self.orders = PrefillHandoffQueue(books)
        self.left: list[Sequence] = []
        books.leave = lambda sequence, _: self.left.append(sequence)  # type: ignore[method-assign]

    def accept(self, grant_id: str = "g", now: float = 0.0, **more) -> Sequence:
        message = order(grant_id, **more)
        assert self.orders.refusal(message) is None
        one = Sequence.from_order(1, message, now)
        self.orders.accept(D, message, one, now)
        one.hold(self.cache.start(one.token_ids))
        assert one.reserve(10, PAGE)
        return one

    def computed(self, one: Sequence, num_tokens: int, now: float) -> None:
        one.num_computed = num_tokens
        one.commit_full_pages(PAGE)
        self.orders.on_computed(one, now)

    def ended(self) -> list[Sequence]:
        """Sequences that have left since the last look."""
        left, self.left = self.left, []
        return left

    def told(self) -> list[tuple[str, object]]:
        """What is told at the end of a turn, by whom it is told to."""
        self.orders.flush()
        return [(one.actor_id, timeless(part)) for one in self.outbox.take() for part in parts(one.message)]


def parts(message: AnnouncePages | PrefillNews) -> list[object]:
    return list(message.announced) if isinstance(message, AnnouncePages) else [*message.done, *message.failed]


def timeless(message: object) -> object:
    """What is told, whatever it took."""
    return replace(message, queue_s=0.0, prefill_s=0.0) if isinstance(message, PrefillDone) else message


def ready(one: Sequence, first: int, end: int) -> tuple[str, PagesReady]:
    return "a-d", PagesReady(
        grant_id="g", first=first, total=2, source_group="p", source_agent="a", source_incarnation=3,
        layout_digest=LAYOUT.digest, pages=one.kv.pages[1 + first : 1 + end],
        generations=one.kv.generations(1 + first, end - first),
    )  # fmt: skip


DONE = ("d", PrefillDone(grant_id="g", token_id=77, num_cached_tokens=0))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_pages_are_announced_as_soon_as_they_are_full_and_the_last_with_the_token(bench: Bench) -> None:
    one = bench.accept()
    bench.computed(one, 4, 1.0)
    assert bench.told() == [], "decode has the first page"
    bench.computed(one, 8, 1.1)
    assert bench.told() == [ready(one, 0, 1)]
    bench.computed(one, 10, 1.2)
    bench.orders.on_token(one, 77, b"", 1.2)
    assert bench.told() == [ready(one, 1, 2), DONE]
    assert bench.orders.num_done == 1


def test_a_prompt_of_whole_pages_has_nothing_left_to_announce_with_the_token(bench: Bench) -> None:
    one = bench.accept(token_ids=list(range(12)))
    one.reserve(12, PAGE)
    bench.computed(one, 12, 1.0)
    bench.told()
    one.num_cached_tokens = 4
    bench.orders.on_token(one, 77, b"", 1.0)
    assert bench.told() == [("d", PrefillDone(grant_id="g", token_id=77, num_cached_tokens=4))]


def test_the_token_says_how_long_the_order_waited_and_was_computed(bench: Bench) -> None:
    one = bench.accept(now=1.0)
    one.entered_at = 3.5
    bench.orders.on_token(one, 77, b"", 4.0)
    bench.orders.flush()
    *_, news = (command.message for command in bench.outbox.take())
    assert [(message.queue_s, message.prefill_s) for message in news.done] == [(2.5, 0.5)]


def test_what_is_not_acknowledged_is_told_again_at_growing_intervals(bench: Bench) -> None:
    one = bench.accept()
    bench.computed(one, 8, 0.0)
    bench.told()
    now, pauses = 0.0, []
    for _ in range(5):
        now = bench.deadlines.at((ANNOUNCE, "g"))
        bench.orders.on_repeat_due("g", now)
        assert bench.told() == [ready(one, 0, 1)]
        pauses.append(bench.deadlines.at((ANNOUNCE, "g")) - now)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    bench.orders.on_pulled(PagesPulled(grant_id="g", num_pages=1), now)
    bench.orders.on_repeat_due("g", now)
    assert bench.told() == [], "all that is announced is in"
    bench.computed(one, 10, now)
    bench.orders.on_token(one, 77, b"", now)
    bench.told()
    bench.orders.on_repeat_due("g", now)
    assert bench.told() == [ready(one, 0, 2), DONE]
    bench.orders.on_pulled(PagesPulled(grant_id="g", num_pages=2, complete=True), now)
    bench.orders.on_repeat_due("g", now)
    assert bench.told() == [ready(one, 0, 2), DONE], "so that the agent says once more that all are in"


def test_cancelled_is_gone_and_does_not_come_back(bench: Bench, monkeypatch) -> None:
    one = bench.accept()
    assert "g" in bench.orders
    bench.orders.cancel("g", 1.0)
    assert bench.ended() == [one]
    bench.orders.cancel("g", 1.0)
    assert bench.ended() == []
    assert len(bench.orders) == 0
    assert bench.deadlines.next() is None
    assert bench.orders.refusal(order()) == "cancelled"
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    bench.orders.cancel("x", 1.0)
    bench.orders.cancel("y", 1.0)
    assert bench.orders.refusal(order()) is None, "what is remembered is bounded"


@pytest.mark.parametrize(("field", "values"), [("num_skip_tokens", [3, 12, -4]), ("num_prompt_tokens", [0, 11])])
def test_orders_that_make_no_sense(bench: Bench, field, values) -> None:
    for value in values:
        assert bench.orders.refusal(order(**{field: value})) == "bad_order"


def test_only_so_many_are_held(bench: Bench) -> None:
    bench.accept("g")
    bench.accept("h")
    assert bench.orders.refusal(order("i")) == "overloaded"


def test_a_failure_is_told_until_it_is_cancelled_and_holds_nothing(bench: Bench) -> None:
    one = bench.accept()
    bench.orders.fail("g", "poisoned_request", "it raised", 1.0)
    assert bench.ended() == [one]
    failed = ("d", PrefillFailed(grant_id="g", code="poisoned_request", message="it raised"))
    assert bench.told() == [failed]
    bench.orders.fail("g", "again", "", 1.0)
    assert bench.ended() == []
    bench.orders.fail("unknown", "x", "", 1.0)
    assert bench.ended() == []
    bench.orders.on_repeat_due("g", 1.5)
    assert bench.told() == [failed]
    assert (bench.orders.num_failed, bench.orders.running()) == (1, [])
    bench.orders.cancel("g", 1.0)
    assert bench.ended() == []


def test_pages_that_were_given_back_in_the_turn_they_were_computed_are_not_announced(bench: Bench) -> None:
    bench.computed(bench.accept(), 8, 1.0)
    bench.orders.fail("g", "poisoned_request", "", 1.0)
    assert bench.told() == [("d", PrefillFailed(grant_id="g", code="poisoned_request", message=""))]


def test_a_transfer_that_failed_fails_the_order_even_when_its_token_is_drawn(bench: Bench) -> None:
    one = bench.accept()
    assert bench.orders.running() == ["g"]
    bench.computed(one, 10, 1.0)
    bench.orders.on_token(one, 77, b"", 1.0)
    bench.told()
    bench.orders.on_transfer_failed(TransferFailed(grant_id="g", code="stale_page", message="m"), 1.0)
    assert bench.ended() == [one]
    assert bench.told() == [("d", PrefillFailed(grant_id="g", code="stale_page", message="m"))]
    bench.orders.on_transfer_failed(TransferFailed(grant_id="x", code="stale_page", message=""), 1.0)
    assert bench.ended() == []


def test_an_agent_that_knows_no_such_grant_ends_the_order(bench: Bench) -> None:
    one = bench.accept()
    unknown = TransferFailed(grant_id="g", code="unknown_grant", message="")
    bench.orders.on_transfer_failed(unknown, 1.0)
    assert bench.ended() == [one]
    bench.orders.on_transfer_failed(unknown, 1.0)
    assert bench.ended() == []
    assert bench.told() == []
    assert bench.orders.refusal(order()) == "cancelled"


def test_signs_of_life_renew_the_lease(bench: Bench) -> None:
    one = bench.accept(now=0.0)
    assert bench.deadlines.at((LEASE, "g")) == CONFIG.lease_s
    bench.orders.renew(D, order(), 3.0)
    assert bench.deadlines.at((LEASE, "g")) == 3.0 + CONFIG.lease_s
    bench.orders.on_pulled(PagesPulled(grant_id="g", num_pages=1), 4.0)
    assert bench.deadlines.at((LEASE, "g")) == 4.0 + CONFIG.lease_s
    bench.orders.on_pulled(PagesPulled(grant_id="g", num_pages=1), 5.0)
    bench.orders.on_pulled(PagesPulled(grant_id="x", num_pages=1), 5.0)
    assert bench.deadlines.at((LEASE, "g")) == 4.0 + CONFIG.lease_s, "no progress"
    bench.orders.on_lease_over("g", 14.0)
    assert bench.ended() == [one]
    assert len(bench.orders) == 0
    assert bench.orders.refusal(order()) is None, "the holder may be back"


def test_the_holders_deadline_is_the_orders(bench: Bench) -> None:
    one = bench.accept()
    assert bench.deadlines.at((TIMEOUT, "g")) == 30.0
    bench.orders.on_timeout("g", 30.0)
    assert bench.ended() == [one]
    assert bench.told()[0][1].code == "deadline_exceeded"
    drawn = bench.accept("h")
    bench.computed(drawn, 10, 1.0)
    bench.orders.on_token(drawn, 77, b"", 1.0)
    bench.orders.on_timeout("h", 30.0)
    assert bench.ended() == []


def test_a_lost_holder_wants_nothing(bench: Bench) -> None:
    one = bench.accept()
    bench.orders.on_holder_lost(Address("d", 1), 1.0)
    assert bench.ended() == [], "an earlier incarnation"
    bench.orders.on_holder_lost(Address("e", 9), 1.0)
    assert bench.ended() == []
    bench.orders.on_holder_lost(D, 1.0)
    assert bench.ended() == [one]
    bench.orders.on_holder_lost(D, 1.0)
    assert bench.ended() == []
    bench.accept("h")
    bench.orders.fail("h", "x", "", 1.0)
    bench.ended()
    bench.orders.on_holder_lost(D, 1.0)
    assert bench.ended() == [], "it held nothing any more"
