"""What is kept of calls: of all samples together, of those that ended last, and for whom."""

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.gateway.records.call_log import NUM_KEPT, CallLog
from nodes.gateway.records.request_log import MAX_FORCED_PER_S, MAX_LINES_PER_S, Chooser, RequestLog
from nodes.gateway.request_names import RequestNames
from nodes.gateway.requests.sample_log import MAX_ATTEMPTS, MAX_STALLS, STALL_PACES, SampleLog
from nodes.protocol.records import MAX_SAMPLES, STALL_S, CallRecord, FindCalls, SampleRecord
from nodes.request import Stages


def log(which: RequestLog = "all") -> CallLog:
    return CallLog("g", "a", Chooser(which, slow_s=30.0, slow_first_token_s=10.0))


def sample(number: int, ended_s: float, *, first_token_s: float = 0.5, queue_s: float = 0.1) -> SampleRecord:
    one = SampleLog(100.0)
    one.submitted(number % 3, "d", "", "", 100.0)
    one.staged(Stages(queue_s=queue_s), 100.0 + first_token_s)
    one.first_token(100.0 + first_token_s)
    finish = "stop" if number % 2 else "length"
    return one.record(f"c-{number}", 7, 3, 2, last_token=101.0, ended=100.0 + ended_s, finish=finish)


def test_samples_of_a_call_are_one_record() -> None:
    calls = log()
    track = calls.begin(RequestNames("c"), 100.0, 0.0)
    track.read(100.25, RequestNames("c", client="mine"))
    track.prepared(101.0, 0.5)
    track.opened(Mock(request_ids=[f"c-{number}" for number in range(12)], samples_per_prompt=4))
    for number in range(12):
        waited = 9.0 if number == 5 else 0.5
        track.ended(f"c-{number}", sample(number, 3.0 + number, first_token_s=waited, queue_s=waited))
    calls.end(track, 200, "", 120.0)
    (call,) = calls.find(FindCalls(name="c-7"), 120.0, lambda _: None, epoch=1).calls
    assert (call.num_samples, call.prompt_tokens, call.cached_tokens, call.output_tokens) == (12, 21, 9, 24)
    assert (call.finish, call.attempts, call.first_token_s, call.queue_s) == ("length,stop", 3, 9.0, 9.0)
    assert (call.read_s, call.prepared_s, call.tokenize_s, call.total_s) == (0.25, 1.0, 0.5, 20.0)
    assert call.client_id == "mine", "names are those that the body gave"
    assert [one.request_id for one in call.samples] == [f"c-{number}" for number in range(12 - MAX_SAMPLES, 12)]


def test_a_bounded_number_is_kept_and_found_by_any_of_its_names() -> None:
    calls = log("none")
    for number in range(NUM_KEPT + 5):
        names = RequestNames(f"c{number}", client="same" if number % 300 == 0 else "")
        assert calls.end(calls.begin(names, float(number), 0.0), 200, "", number + 0.5) is None
    assert not calls.find(FindCalls(name="c4"), 2e3, lambda _: None, epoch=1).calls, "the oldest are forgotten"
    assert [one.request_id for one in calls.find(FindCalls(name="same"), 2e3, lambda _: None, epoch=1).calls] == [
        "c300", "c600", "c900",
    ]  # fmt: skip
    last = calls.find(FindCalls(last=2), 2e3, lambda _: None, epoch=1)
    assert [one.request_id for one in last.calls] == ["c1003", "c1004"]


def test_whoever_follows_misses_none_and_sees_none_twice() -> None:
    calls, after, seen = log(), dict[str, int](), list[str]()
    for number in range(40):
        calls.end(calls.begin(RequestNames(f"c{number}"), 0.0, 0.0), 200, "", 1.0)
        if number % 7 == 3:
            found = calls.find(FindCalls(follows=True, after=after), 1.0, lambda _: None, epoch=2)
            after |= found.ended
            seen += [one.request_id for one in found.calls]
    assert seen == [f"c{number}" for number in range(4, 39)], "from the first look on"
    found = calls.find(FindCalls(follows=True, after={"g.1": 9}), 1.0, lambda _: None, epoch=2)
    assert len(found.calls) == 40, "of a gateway that came in another's place, all"


def call(request_id: str, **fields: float | str) -> CallRecord:
    return CallRecord(request_id=request_id, **{"status": 200, "total_s": 1.0, **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        ("all", "quick slow late failed broken"),
        ("slow", "slow late failed broken"),
        ("errors", "failed broken"),
        ("none", ""),
    ],
)
def test_which_calls_get_a_line(which: RequestLog, chosen: str) -> None:
    chooser = Chooser(which, slow_s=30.0, slow_first_token_s=10.0)
    calls = [
        call("quick", first_token_s=9.0), call("slow", total_s=30.0), call("late", first_token_s=10.0),
        call("failed", status=429), call("broken", code="client_left"),
    ]  # fmt: skip
    assert [one.request_id for one in calls if chooser.share(one, 0.0)] == chosen.split()


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6))
def test_lines_are_bounded_and_stand_for_all_calls(per_second: list[int]) -> None:
    chooser = Chooser("all", slow_s=0.0, slow_first_token_s=0.0)
    for second, num in enumerate(per_second):
        shares = [chooser.share(call(f"{second}.{number}"), second + number / (num + 1)) for number in range(num)]
        lines = [share for share in shares if share]
        # Doubling from 1 to what 3,000 need (64) takes six times the limit in the first second of a burst.
        assert len(lines) <= MAX_LINES_PER_S * 7
        if num <= MAX_LINES_PER_S and not second:
            assert lines == [1] * num
        assert all(share & (share - 1) == 0 for share in lines)


def test_a_steady_rate_is_estimated_by_its_lines() -> None:
    chooser = Chooser("all", slow_s=0.0, slow_first_token_s=0.0)
    by_second = [
        [chooser.share(call(f"{second}.{number}"), second + number / 1000) for number in range(1000)]
        for second in range(10)
    ]
    for shares in by_second[1:]:
        assert len([share for share in shares if share]) <= 2 * MAX_LINES_PER_S
        assert 600 < sum(shares) < 1600, "what the lines stand for is what there was"


def test_errors_always_get_a_line_up_to_a_flood() -> None:
    chooser = Chooser("all", slow_s=0.0, slow_first_token_s=0.0)
    for number in range(2000):
        chooser.share(call(f"c{number}"), 0.5)
    assert all(chooser.share(call(f"e{number}", status=503), 0.6) == 1 for number in range(MAX_FORCED_PER_S))
    assert chooser.share(call("one more", status=503), 0.7) == 0
    assert chooser.share(call("later", status=503), 1.1) == 1


def test_what_a_sample_keeps_is_bounded() -> None:
    sample_log = SampleLog(0.0)
    for number in range(100):
        sample_log.submitted(number, "d", "", "t", float(number))
        sample_log.failed("overloaded", "x" * 1000, number + 0.5)
    sample_log.first_token(200.0)
    sample_log.num_pauses = 1000
    for number in range(50):
        sample_log.paused(number, 0.3 + number / 100, 200.0 + number)
    told = sample_log.record("c-0", 1, 0, 1, last_token=250.0, ended=260.0)
    assert len(told.attempts) == MAX_ATTEMPTS
    assert (told.attempts[0].attempt, told.attempts[-1].attempt) == (0, 99)
    assert len(told.attempts[0].why) == 200
    assert [stall.position for stall in told.stalls] == list(range(50 - MAX_STALLS, 50))


def stalls(*pauses_s: float) -> list[int]:
    """The positions of the tokens before which an output of such pauses stalled."""
    sample_log, now = SampleLog(0.0), 1.0
    sample_log.submitted(0, "d", "", "t", 0.0)
    sample_log.staged(Stages(1.0), now)
    sample_log.first_token(now)
    for position, took_s in enumerate(pauses_s, 1):
        now += took_s
        sample_log.num_pauses += 1
        sample_log.paused(position, took_s, now)
    told = sample_log.record("c-0", 1, 0, 1, last_token=now, ended=now)
    assert sample_log.stall_s == max(pauses_s)
    return [stall.position for stall in told.stalls]


def test_a_slow_model_does_not_stall_at_each_token() -> None:
    assert stalls(*[0.9] * 3, 1.0, *[0.9] * 20) == []
    assert stalls(0.3, 0.3) == [], "nor among the first tokens of which nothing is known"
    assert stalls(*[0.3] * 20, 3.0) == [21]


def test_a_stall_among_the_first_tokens_is_found() -> None:
    # The second token of a handoff comes late; a worker is back 0.3 s after its death.
    assert stalls(0.1, 0.3, *[0.01] * 20) == [2]
    assert stalls(0.3, *[0.01] * 20) == [1]
    assert stalls(0.01, 0.3) == [2]
    assert stalls(0.3) == [1]
    assert stalls(0.01, 0.5, 0.4, 0.01) == [2, 3], "of two in a short answer the longer one too"


@given(st.lists(st.floats(0.001, 3.0), min_size=2, max_size=30))
def test_stalls_are_the_longest_pauses_and_are_long(pauses_s: list[float]) -> None:
    found = stalls(*pauses_s)
    shortest = min((pauses_s[position - 1] for position in found), default=0.0)
    rest = sorted(pauses_s, reverse=True)[len(found) :]
    if found:
        assert shortest > STALL_S
        assert shortest > STALL_PACES * 0.999 * sum(rest) / len(rest)
    if len(found) < MAX_STALLS:
        assert all(took_s <= shortest or not found for took_s in rest)


def test_deaths_are_told_to_whoever_asks_for_them() -> None:
    calls = CallLog("g", "a", Chooser("all", slow_s=0, slow_first_token_s=0))
    for epoch in range(100):
        calls.died("w", epoch, "x" * 1000, float(epoch))
    assert calls.find(FindCalls(last=1), 100.0, lambda _: None, epoch=1).deaths == []
    heard = calls.find(FindCalls(deaths_s=1000.0), 100.0, lambda _: None, epoch=1).deaths
    assert (len(heard), heard[0].epoch, heard[-1].ago_s, len(heard[0].reason)) == (64, 36, 1.0, 200)
    assert [one.epoch for one in calls.find(FindCalls(deaths_s=2.5), 100.0, lambda _: None, epoch=1).deaths] == [98, 99]


def test_a_call_has_the_deaths_that_were_heard_of_while_it_ran_whenever_it_is_looked_at() -> None:
    calls = log()
    calls.died("before", 1, "", 1.0)
    track = calls.begin(RequestNames("c"), 2.0, 0.0)
    calls.died("during", 1, "", 3.0)
    (running,) = calls.find(FindCalls(name="c"), 4.0, lambda _: None, epoch=1).calls
    calls.end(track, 200, "", 5.0)
    for number in range(100):
        calls.died("after", number, "", 6.0)
    (ended,) = calls.find(FindCalls(name="c"), 7.0, lambda _: None, epoch=1).calls
    assert [[(one.actor, one.at_s) for one in call.deaths] for call in (running, ended)] == [[("during", 1.0)]] * 2
    assert (running.total_s, ended.total_s) == (2.0, 3.0)
