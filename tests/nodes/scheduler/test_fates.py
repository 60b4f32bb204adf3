"""What is remembered of prompts' pages: runs that cover the prompt once, each with its reason."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol import MissedPages
from nodes.protocol.stores import PageRun
from nodes.scheduler.fates import DEARER, LATE, NO_STORE, REMEMBERED, Fate, Fates

PAGES = st.integers(0, 12)


def fate() -> Fate:
    return Fate("r", 0, is_order=False)


def told(fate: Fate) -> list[tuple[str, int, int]]:
    assert fate.has_entered
    return [(run.why, run.first, run.num) for run in fate.runs()]


def missed(*runs: tuple[str, int]) -> list[MissedPages]:
    return [MissedPages(why=why, num=num) for why, num in runs]


def test_what_was_cached_read_and_missed_are_runs() -> None:
    one = fate()
    one.asks(2, 10, LATE)
    one.answered(5, missed(("corrupt", 1), ("behind_a_gap", 4)), is_mixed=False)
    one.restored(2, 5)
    one.enter(7, "scheduler-p")
    assert told(one) == [("cached", 0, 2), ("restored", 2, 5), ("corrupt", 7, 1), ("behind_a_gap", 8, 4)]
    assert one.prefill == "scheduler-p"
    one.asks(0, 1, LATE)
    one.answered(1, [], is_mixed=False)
    one.enter(12, "")
    assert told(one)[0] == ("cached", 0, 2), "only the first time counts"


def test_pages_that_were_found_and_not_read_say_why() -> None:
    for code, why in (
        (DEARER, "dearer"), ("deadline_exceeded", "timed_out"), ("stale_pages", "evicted"),
        ("corrupt_pages", "corrupt"),
        ("read_failed", "unreadable"), ("revoked", "revoked"), ("peer_lost", "failed"), ("", "behind_a_gap"),
    ):  # fmt: skip
        one = fate()
        one.asks(1, 4, LATE)
        one.answered(3, missed(("evicted", 1)), is_mixed=False)
        if code:
            one.unread(code)
        one.enter(1, "")
        last = [("evicted", 1, 4)] if why == "evicted" else [(why, 1, 3), ("evicted", 4, 1)]
        assert told(one) == [("cached", 0, 1), *last]


def test_a_part_that_was_read_before_it_failed_is_read() -> None:
    one = fate()
    one.asks(0, 6, LATE)
    one.answered(6, [], is_mixed=False)
    one.unread("corrupt_pages")
    one.restored(0, 2)
    one.enter(2, "")
    assert told(one) == [("restored", 0, 2), ("corrupt", 2, 4)]


def test_why_nothing_was_found() -> None:
    one = fate()
    one.asks(0, 3, NO_STORE)
    one.enter(1, "")
    assert told(one) == [("cached", 0, 1), ("no_store", 1, 2)]
    one = fate()
    one.asks(0, 3, LATE)
    one.unanswered()
    one.enter(0, "")
    assert told(one) == [("no_answer", 0, 3)]
    one = fate()
    one.asks(0, 3, LATE)
    one.answered(0, missed(("never_stored", 2), ("evicted", 1)), is_mixed=True)
    one.enter(0, "")
    assert told(one) == [("other_numerics", 0, 2), ("evicted", 2, 1)]
    one = fate()
    one.asks(2, 1, LATE)
    one.enter(0, "")
    assert told(one) == [("left_pool", 0, 2), ("late", 2, 1)], "what was cached when it came is not any more"


@given(
    first=PAGES,
    found=PAGES,
    runs=st.lists(st.tuples(st.sampled_from(("evicted", "corrupt")), st.integers(1, 3)), max_size=3),
    num_read=PAGES,
    num_cached=st.integers(0, 30),
)
def test_runs_cover_the_prompt_once(
    first: int, found: int, runs: list[tuple[str, int]], num_read: int, num_cached: int
) -> None:
    one = fate()
    asked = found + sum(num for _, num in runs)
    one.asks(first, asked, LATE)
    one.answered(found, missed(*runs), is_mixed=False)
    one.restored(first, min(num_read, found))
    one.enter(num_cached, "")
    assert one.has_entered
    runs = one.runs()
    at = 0
    for run in runs:
        assert run.num > 0
        assert run.first == at
        at += run.num
    assert at == max(first + asked, num_cached)
    assert sum(run.num for run in runs if run.why in ("cached", "restored")) == num_cached
    assert all(before.why != after.why for before, after in pairwise(runs))


def test_the_last_thousand_that_entered_are_found() -> None:
    fates = Fates("scheduler-d", 16)
    for number in range(REMEMBERED + 5):
        fates.begin(f"r{number}", 0, is_order=False).enter(1, "")
    waiting = fates.begin("r9", 1, is_order=False)
    order = fates.begin("r9", 0, is_order=True)
    order.enter(2, "")
    assert [one.request_id for one in fates.find(["r0", "r6", "r7"])] == ["r7"]
    first, second = fates.find(["r9"])
    assert (first.is_order, first.runs) == (False, [PageRun(why="cached", first=0, num=1)])
    assert (second.scheduler, second.page_size, second.is_order) == ("scheduler-d", 16, True)
    waiting.enter(0, "")
    assert [(one.attempt, one.is_order) for one in fates.find(["r9"])] == [(0, False), (1, False), (0, True)]
    fates.begin("r9", 0, is_order=False)
    assert [one.attempt for one in fates.find(["r9"])] == [1, 0], "asked for again, and not entered yet"
