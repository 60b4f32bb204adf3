"""Decode's side of a handoff, message by message."""

from typing import NamedTuple

import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.prefix_cache import PrefixCache
from kvstore.layout import KVLayout
from kvstore.protocol import (
    CloseGrant,
    GrantClosed,
    GrantRefused,
    GrantsOpened,
    OpenGrant,
    OpenGrants,
    PagesPulled,
    PoolHandle,
    TransferFailed,
)
from mesh.address import Address
from mesh.calls import batches
from mesh.runtime.effects import Ask
from nodes.protocol import (
    CancelPrefill,
    OrderPrefills,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    PrefillOrder,
    PrefillRefused,
    PrefillsOrdered,
)
from nodes.request import RequestSpec, Sampling
from nodes.scheduler.asks import ASK_RETRY_S
from nodes.scheduler.books import Books
from nodes.scheduler.config import SchedulerConfig
from nodes.scheduler.handoff import decode as grants_module
from nodes.scheduler.handoff.decode import (
    CANCEL,
    COMPANY_S,
    ORDER,
    ORDER_RENEW_S,
    RENEW,
    DecodeHandoffQueue,
)
from nodes.scheduler.handoff.own_grants import CLOSE, EXPIRE, OPEN, OwnGrants
from nodes.scheduler.sequence import Sequence, Stage
from tests.nodes.scheduler.scheduler_world import NO_STOP

PAGE = 4
CONFIG = SchedulerConfig(
    group="d", worker="w", agent="a", context_length=99, page_size=PAGE, chunk_tokens=8, step_tokens=300
)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE)
POOL = PoolHandle(group="d", agent="a", path="", num_pages=20, layout=LAYOUT, incarnation=3)
P, A = Address("p", 1), Address("a", 1)
ID = "d#2/n.1"


class HandoffDone(NamedTuple):
    """All pages are in and the first token is drawn."""

    sequence: Sequence
    token_id: int
    num_cached_tokens: int


class HandoffFailed(NamedTuple):
    """It is prefilled here, or only drawn if it is complete."""

    sequence: Sequence
    code: str
    complete: bool
    message: str = ""


Outcome = HandoffDone | HandoffFailed


class Bench:
    """One decode scheduler's grants, and a sequence of 10 tokens of which the first page may be cached."""

    def __init__(self, nonce: str = "n") -> None:
        self.cache = PrefixCache(20, PAGE, group="d", epoch=2)
        self.books = Books(CONFIG, Address("d", 2), POOL, self.cache)
        self.outbox, self.deadlines, self.asks = self.books.outbox, self.books.deadlines, self.books.asks
        self.own = OwnGrants(self.books, nonce)
        self.outcomes: list[Outcome] = []
        self.grants = DecodeHandoffQueue(self.books, self.own, self)  # type: ignore[arg-type]
        self.rows = 0
        # Of the last ask of each kind.
        self.numbers: dict[str, str] = {}

    def open(self, *, cached: bool = False, prefill: str = "p") -> Sequence:
        if cached:
            before = self.cache.start(range(PAGE + 1))
            before.reserve(PAGE)
            before.advance(range(PAGE))
            before.release()
        self.rows += 1
        one = Sequence(self.rows, range(10), 8, RequestSpec(Sampling(seed=5), NO_STOP), 0.0)
        one.request_id, one.attempt, one.prefill = "r", 4, prefill
        one.hold(self.cache.start(one.token_ids))
        assert one.reserve(10, PAGE)
        self.grants.open(one, one.kv.export(), 0.0)
        return one

    def ordered(self, **more) -> Sequence:
        one = self.open(**more)
        self.taken()
        self.opened(f"d#2/n.{self.rows}")
        self.taken()
        return one

    def opened(self, *grant_ids: str, now: float = 1.0) -> None:
        """The agent answers the last ask to open grants with these."""
        self.own.on_opened(self.numbers[OPEN], GrantsOpened(opened=list(grant_ids)), now)
        assert self.ended() == []

    def refused(self, kind: str, code: str, now: float) -> object:
        """The last ask of a kind brings no answer, which concerns one handoff."""
        if kind == OPEN:
            self.own.on_ask_failed(self.numbers[kind], code, now)
        else:
            self.grants.on_ask_failed((kind, self.numbers[kind]), code, now)
        return self.outcome()

    # what results take

    def prefilled(self, sequence: Sequence, token_id: int, num_cached_tokens: int, _extra: bytes, _now: float) -> None:
        self.outcomes.append(HandoffDone(sequence, token_id, num_cached_tokens))

    def not_prefilled(self, sequence: Sequence, code: str, message: str, _now: float, *, complete: bool) -> None:
        self.outcomes.append(HandoffFailed(sequence, code, complete, message))

    def ended(self) -> list[Outcome]:
        """What has come of handoffs since the last look."""
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def outcome(self) -> Outcome | None:
        """The same, of at most one."""
        outcomes = self.ended()
        assert len(outcomes) < 2
        return outcomes[0] if outcomes else None

    def pulled(self, message: PagesPulled, now: float) -> Outcome | None:
        self.own.on_pulled(message, now)
        return self.outcome()

    def done(self, message: PrefillDone, now: float, sender: Address = P) -> Outcome | None:
        self.grants.on_done(sender, message, now)
        return self.outcome()

    def failed(self, message: PrefillFailed, now: float) -> Outcome | None:
        self.grants.on_failed(P, message, now)
        return self.outcome()

    def failed_transfer(self, message: TransferFailed, now: float) -> Outcome | None:
        self.own.on_transfer_failed(message, now)
        return self.outcome()

    def lost(self, peer: str) -> Outcome | None:
        self.own.on_peer_lost(peer, 2.0)
        return self.outcome()

    def revoked(self, sequence: Sequence) -> Outcome | None:
        self.books.take_back(sequence, 2.0)
        return self.outcome()

    def handed_off(self) -> list[Sequence]:
        return self.books.lent(Stage.HANDOFF)

    def taken(self) -> list[tuple[str, str, object]]:
        """What has been asked, at the end of a turn."""
        self.own.flush()
        self.grants.flush()
        asks = [one for one in self.outbox.take() if isinstance(one, Ask)]
        self.numbers |= dict(one.tag for one in asks)
        return [(one.tag[0], one.actor_id, one.message) for one in asks]

    def pages(self, state: PageState) -> int:
        return self.cache.num_pages_in(state)


CLOSING = (CLOSE, "a", CloseGrant(grant_id=ID))
CANCELLING = (CANCEL, "p", CancelPrefill(grant_ids=[ID]))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_incarnation_whose_epoch_comes_again_names_no_grant_as_the_one_before_did() -> None:
    """Its host has lost its files; prefill still remembers which prefills the one before has cancelled."""
    names: list[set[str]] = []
    for bench in (Bench(nonce="5f"), Bench(nonce="a3")):
        for _ in range(3):
            bench.open()
        names.append({one.grant_id for _, _, message in bench.taken() for one in message.grants})
    assert len(names[0] | names[1]) == 6


def test_pages_are_granted_before_the_prefill_is_ordered(bench: Bench) -> None:
    one = bench.open(cached=True)
    ((kind, actor_id, message),) = bench.taken()
    assert (kind, actor_id) == (OPEN, "a")
    assert message == OpenGrants(grants=[OpenGrant(
        grant_id=ID, group="d", pages=one.kv.pages[1:], generations=one.kv.generations(1),
        layout_digest=LAYOUT.digest, holder="d", holder_epoch=2, timeout_s=CONFIG.handoff_timeout_s,
        request_id="r",
    )])  # fmt: skip
    assert bench.pages(PageState.GRANTED) == 2
    bench.opened(ID)
    ((kind, actor_id, message),) = bench.taken()
    assert (kind, actor_id) == (ORDER, "p")
    assert message == OrderPrefills(orders=[PrefillOrder(
        grant_id=ID, request_id="r", attempt=4, token_ids=list(range(10)), num_prompt_tokens=8, num_skip_tokens=PAGE,
        spec=RequestSpec(Sampling(seed=5), NO_STOP), agent="a", timeout_s=CONFIG.handoff_timeout_s - 1.0,
    )])  # fmt: skip
    assert bench.pages(PageState.IN_FLIGHT) == 2
    assert bench.handed_off() == [one]


@pytest.mark.parametrize("pulled_first", [True, False])
def test_done_when_pages_and_token_are_here_in_any_order(bench: Bench, pulled_first) -> None:
    one = bench.ordered()
    pulled = PagesPulled(grant_id=ID, num_pages=3, complete=True)
    done = PrefillDone(grant_id=ID, token_id=77, num_cached_tokens=4)
    assert bench.pulled(PagesPulled(grant_id=ID, num_pages=1), 1.0) is None
    events = [lambda: bench.pulled(pulled, 2.0), lambda: bench.done(done, 2.0)]
    first, last = events if pulled_first else reversed(events)
    assert first() is None
    assert last() == HandoffDone(one, 77, 4)
    assert bench.taken() == [], "the grant has closed itself, and the order waits for others to be cancelled"
    assert bench.deadlines.pop_due(2.0 + COMPANY_S) == (CANCEL, "p")
    bench.grants.cancels.retry("p")
    assert bench.taken() == [CANCELLING]
    assert (one.num_computed, one.num_scheduled, one.capacity) == (10, 10, 12)
    assert (bench.pages(PageState.CACHED), bench.pages(PageState.RUNNING)) == (2, 1)
    assert (len(bench.books.loans), bench.own.num_closing, bench.grants.num_done) == (0, 0, 1)
    assert len(bench.grants.cancels) == 1
    bench.grants.on_cancelled(PrefillCancelled(grant_ids=[ID]))
    assert (len(bench.grants.cancels), len(bench.asks)) == (0, 0)
    assert bench.deadlines.next() is None


@pytest.mark.parametrize(("theirs", "told"), [((8, 8), 8), ((4, 4), 2)])
def test_what_was_read_from_a_disk_is_told_of_who_had_more_of_the_prompt(
    bench: Bench, theirs: tuple[int, int], told: int
) -> None:
    one = bench.ordered(cached=True)
    one.num_restored = 2
    num_cached, num_restored = theirs
    done = PrefillDone(grant_id=ID, token_id=7, num_cached_tokens=num_cached, num_restored_tokens=num_restored)
    bench.pulled(PagesPulled(grant_id=ID, num_pages=2, complete=True), 2.0)
    assert bench.done(done, 2.0) == HandoffDone(one, 7, num_cached)
    assert one.measure(3.0).restored_tokens == told


def test_prefills_that_are_over_in_one_turn_are_cancelled_in_one_ask(bench: Bench) -> None:
    for prefill in ("p", "p", "q"):
        bench.ordered(prefill=prefill)
    for number, sender in ((1, P), (2, P), (3, Address("q", 1))):
        grant_id = f"d#2/n.{number}"
        bench.pulled(PagesPulled(grant_id=grant_id, num_pages=3, complete=True), 2.0)
        bench.done(PrefillDone(grant_id=grant_id, token_id=7, num_cached_tokens=0), 2.0, sender)
    both, other = CancelPrefill(grant_ids=["d#2/n.1", "d#2/n.2"]), CancelPrefill(grant_ids=["d#2/n.3"])
    assert bench.taken() == []
    for prefill in "pq":
        assert bench.deadlines.pop_due(2.0 + COMPANY_S) == (CANCEL, prefill)
        bench.grants.cancels.retry(prefill)
    assert bench.taken() == [(CANCEL, "p", both), (CANCEL, "q", other)]
    bench.grants.on_cancelled(PrefillCancelled(grant_ids=["d#2/n.1"]))
    bench.grants.on_ask_failed((CANCEL, "p"), "deadline_exceeded", 4.0)
    assert bench.ended() == []
    assert bench.deadlines.pop_due(4.0 + ASK_RETRY_S) == (CANCEL, "p")
    bench.grants.cancels.retry("p")
    assert bench.taken() == [(CANCEL, "p", CancelPrefill(grant_ids=["d#2/n.2"]))], "the other was answered"
    bench.grants.on_ask_failed((CANCEL, "p"), "deadline_exceeded", 5.0)
    bench.grants.cancels.retry_now("p")
    assert bench.taken() == [(CANCEL, "p", CancelPrefill(grant_ids=["d#2/n.2"]))]


def test_many_cancels_are_split(monkeypatch) -> None:
    monkeypatch.setattr(grants_module, "MAX_CANCELS", 2)
    bench = Bench()
    for number in range(3):
        bench.done(PrefillDone(grant_id=f"x{number}", token_id=7, num_cached_tokens=0), 2.0)
    assert [len(message.grant_ids) for _, _, message in bench.taken()] == [2, 1]


def failing(bench: Bench, cause: str) -> HandoffFailed:
    """Each way in which an ordered handoff fails."""
    match cause:
        case "prefill failed":
            return bench.failed(PrefillFailed(grant_id=ID, code="x", message="why"), 2.0)
        case "transfer failed":
            return bench.failed_transfer(TransferFailed(grant_id=ID, code="x", message=""), 2.0)
        case "order refused":
            return bench.refused(ORDER, "x", 2.0)
        case "too long":
            assert bench.deadlines.at((EXPIRE, ID)) == CONFIG.handoff_timeout_s
            bench.own.on_expired(ID, CONFIG.handoff_timeout_s)
            return bench.outcome()
        case "prefill lost":
            return bench.lost("p")
        case "agent lost":
            return bench.lost("a")
        case _:
            return bench.revoked(bench.handed_off()[0])


CAUSES = ["prefill failed", "transfer failed", "order refused", "too long", "prefill lost", "agent lost", "revoked"]


@pytest.mark.parametrize("cause", CAUSES)
def test_pages_of_a_failed_handoff_wait_for_the_agents_word(bench: Bench, cause) -> None:
    one = bench.ordered()
    outcome = failing(bench, cause)
    assert (outcome.sequence, outcome.complete) == (one, False)
    assert outcome.message == ("why" if cause == "prefill failed" else "")
    assert bench.taken() == [CLOSING, CANCELLING]
    assert one.kv is None
    assert bench.pages(PageState.QUARANTINED) == 3
    for _ in range(2):
        bench.own.on_closed(ID, GrantClosed(grant_id=ID))
        assert bench.pages(PageState.FREE) == 19, "also if it is said twice"
    assert bench.grants.num_failed == 1


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_pages_of_a_failed_handoff_stay_in_the_cache(bench: Bench, cause) -> None:
    one = bench.ordered(cached=True)
    bench.pulled(PagesPulled(grant_id=ID, num_pages=1), 1.5)
    assert not failing(bench, cause).complete
    assert bench.cache.match(one.token_ids).num_tokens == 8
    assert one.num_cached_tokens == 4, "what was pulled was computed for this request"
    assert (bench.pages(PageState.CACHED), bench.pages(PageState.QUARANTINED)) == (2, 1)
    bench.own.on_closed(ID, GrantClosed(grant_id=ID))
    assert bench.cache.check() == []
    assert bench.cache.num_available() == 19


def test_what_was_found_in_a_cache_at_the_first_try_is_what_counts(bench: Bench) -> None:
    one = bench.ordered(cached=True)
    one.num_cached_tokens = 0
    bench.pulled(PagesPulled(grant_id=ID, num_pages=1), 1.5)
    failing(bench, "prefill failed")
    assert bench.cache.match(one.token_ids).num_tokens == 8
    assert one.num_cached_tokens == 0


@pytest.mark.parametrize("cause", CAUSES)
def test_pages_that_are_all_in_are_good_whatever_fails_after(bench: Bench, cause) -> None:
    one = bench.ordered()
    bench.pulled(PagesPulled(grant_id=ID, num_pages=3, complete=True), 1.5)
    outcome = failing(bench, cause)
    assert outcome.complete
    assert one.num_computed == 10
    assert bench.pages(PageState.QUARANTINED) == 0
    assert bench.taken() == [CANCELLING]
    assert bench.own.num_closing == 0


@pytest.mark.parametrize("code", ["unreachable", "peer_lost", "too_many_grants"])
def test_a_grant_that_cannot_be_opened_leaves_its_pages_free(bench: Bench, code) -> None:
    one = bench.open()
    bench.taken()
    outcome = bench.refused(OPEN, code, 1.0)
    assert outcome == HandoffFailed(one, code, False)
    assert bench.pages(PageState.FREE) == 19, "without an order nobody can write them"
    assert bench.taken() == [CLOSING]


@pytest.mark.parametrize("code", ["deadline_exceeded", "mailbox_full", "page_granted"])
def test_opening_is_tried_again_where_that_may_help_but_not_for_ever(bench: Bench, code) -> None:
    bench.open()
    bench.taken()
    assert bench.refused(OPEN, code, 2.0) is None
    assert bench.deadlines.pop_due(2.5) == (OPEN, "a")
    bench.own.opens.retry("a")
    assert [kind for kind, _, _ in bench.taken()] == [OPEN]
    outcome = bench.refused(OPEN, code, CONFIG.lease_s)
    assert isinstance(outcome, HandoffFailed)


def test_the_order_is_renewed_as_long_as_the_handoff_lives(bench: Bench) -> None:
    bench.ordered()
    bench.grants.on_ordered(bench.numbers[ORDER], PrefillsOrdered(accepted=[ID]), 2.0)
    assert bench.ended() == []
    assert bench.deadlines.pop_due(2.0 + ORDER_RENEW_S) == (RENEW, ID)
    bench.grants.on_renew_due(ID, 4.0)
    assert [kind for kind, _, _ in bench.taken()] == [ORDER]
    bench.grants.on_ordered("unknown", PrefillsOrdered(accepted=[ID]), 4.0)
    assert bench.ended() == []
    assert bench.deadlines.at((RENEW, ID)) is None, "nobody was asked so"
    bench.grants.on_ordered(bench.numbers[ORDER], PrefillsOrdered(accepted=["other"]), 4.0)
    assert bench.ended() == []
    assert bench.deadlines.pop_due(4.0 + ASK_RETRY_S) == (RENEW, ID), "not named is not answered"


def test_a_prefill_scheduler_that_is_silent_for_a_lease_is_given_up(bench: Bench) -> None:
    one = bench.ordered()
    assert bench.refused(ORDER, "deadline_exceeded", 3.0) is None
    assert bench.deadlines.next() == 3.0 + ASK_RETRY_S
    bench.pulled(PagesPulled(grant_id=ID, num_pages=1), 9.0)
    bench.grants.on_renew_due(ID, 9.0)
    bench.taken()
    assert bench.refused(ORDER, "deadline_exceeded", 18.9) is None
    bench.grants.on_renew_due(ID, 18.9)
    bench.taken()
    outcome = bench.refused(ORDER, "deadline_exceeded", 19.0)
    assert outcome == HandoffFailed(one, "deadline_exceeded", False)


def test_news_of_what_is_over_is_answered_with_a_cancel_where_someone_waits_for_it(bench: Bench) -> None:
    assert bench.pulled(PagesPulled(grant_id="old", num_pages=1), 1.0) is None
    assert bench.failed_transfer(TransferFailed(grant_id="old", code="x", message=""), 1.0) is None
    bench.grants.on_ask_failed((ORDER, "7"), "x", 1.0)
    assert bench.ended() == []
    bench.own.on_ask_failed("7", "x", 1.0)
    assert bench.ended() == []
    assert bench.taken() == []
    cancel = (CANCEL, "p", CancelPrefill(grant_ids=["old"]))
    assert bench.done(PrefillDone(grant_id="old", token_id=1, num_cached_tokens=0), 1.0) is None
    assert bench.taken() == [cancel]
    assert bench.failed(PrefillFailed(grant_id="old", code="x", message=""), 1.0) is None
    assert bench.taken() == [], "it is under way"
    bench.grants.on_ask_failed((CANCEL, "p"), "deadline_exceeded", 2.0)
    assert bench.ended() == []
    assert len(bench.grants.cancels) == 0, "its repeats bring more"
    assert bench.failed(PrefillFailed(grant_id="old", code="x", message=""), 3.0) is None
    assert bench.taken() == [cancel]


def test_a_cancel_that_is_under_way_is_not_sent_beside(bench: Bench) -> None:
    bench.ordered()
    failing(bench, "revoked")
    bench.taken()
    bench.done(PrefillDone(grant_id=ID, token_id=1, num_cached_tokens=0), 2.5)
    assert bench.taken() == []


def test_closing_goes_on_for_ever_cancelling_until_the_others_lease_is_over(bench: Bench) -> None:
    bench.ordered()
    failing(bench, "revoked")
    bench.taken()
    bench.grants.on_ask_failed((CANCEL, "p"), "deadline_exceeded", 2.0 + 2 * CONFIG.lease_s)
    assert bench.ended() == []
    assert len(bench.grants.cancels) == 0
    bench.grants.on_ask_failed((CLOSE, ID), "unreachable", 1e6)
    assert bench.ended() == []
    assert (CLOSE, ID) in bench.asks
    assert bench.own.num_closing == 1


def test_answers_that_do_not_fit_change_nothing(bench: Bench) -> None:
    bench.open()
    bench.taken()
    number = bench.numbers[OPEN]
    bench.opened("other")
    assert bench.taken() == []
    bench.own.on_opened(number, GrantsOpened(opened=[ID]), 1.0)
    assert bench.ended() == []
    assert bench.taken() == [], "the ask was answered once already"
    failing(bench, "revoked")
    bench.own.on_closed(ID, GrantClosed(grant_id="other"))
    bench.own.on_closed("other", GrantClosed(grant_id="other"))
    assert bench.own.num_closing == 1


def test_only_what_hangs_on_a_lost_peer_fails(bench: Bench) -> None:
    one, two = bench.ordered(), bench.ordered(prefill="q")
    assert bench.lost("p").sequence is one
    assert bench.lost("zzz") is None
    assert bench.handed_off() == [two]
    assert bench.revoked(two).sequence is two


def test_of_grants_asked_for_together_each_comes_to_its_own_end(bench: Bench) -> None:
    sequences = [bench.open() for _ in range(4)]
    ((_, _, asked),) = bench.taken()
    good, bad, taken, unnamed = (one.grant_id for one in asked.grants)
    refused = [
        GrantRefused(grant_id=bad, code="bad_grant"),
        GrantRefused(grant_id=taken, code="page_granted"),
    ]
    answer = GrantsOpened(opened=[good], refused=refused)
    bench.own.on_opened(bench.numbers[OPEN], answer, 1.0)
    assert bench.ended() == [HandoffFailed(sequences[1], "bad_grant", False)]
    (kind, _, ordered), *_ = (one for one in bench.taken() if one[0] == ORDER)
    assert [one.grant_id for one in ordered.orders] == [good]
    assert bench.deadlines.pop_due(1.0 + ASK_RETRY_S) == (OPEN, "a")
    bench.own.opens.retry("a")
    ((kind, _, asked),) = bench.taken()
    assert (kind, [one.grant_id for one in asked.grants]) == (OPEN, [taken, unnamed])


def test_of_orders_asked_for_together_each_comes_to_its_own_end(bench: Bench) -> None:
    sequences = [bench.open() for _ in range(4)]
    ((_, _, asked),) = bench.taken()
    good, bad, unnamed, over = (one.grant_id for one in asked.grants)
    bench.opened(good, bad, unnamed, over)
    bench.revoked(sequences[3])
    ordered = next(message for kind, _, message in bench.taken() if kind == ORDER)
    assert [one.grant_id for one in ordered.orders] == [good, bad, unnamed], "one is over before anybody heard of it"
    refused = [PrefillRefused(grant_id=bad, code="overloaded")]
    answer = PrefillsOrdered(accepted=[good], refused=refused)
    bench.grants.on_ordered(bench.numbers[ORDER], answer, 2.0)
    assert bench.ended() == [HandoffFailed(sequences[1], "overloaded", False)]
    assert bench.deadlines.pop_due(2.0 + ASK_RETRY_S) == (RENEW, unnamed)
    assert bench.deadlines.pop_due(2.0 + ORDER_RENEW_S) == (RENEW, good)


def test_what_is_too_much_for_one_message_goes_in_several(monkeypatch) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES", 1200)
    bench = Bench()
    for _ in range(3):
        bench.open()
    asks = bench.taken()
    assert [[one.grant_id for one in message.grants] for _, _, message in asks] == [["d#2/n.1", "d#2/n.2"], ["d#2/n.3"]]
