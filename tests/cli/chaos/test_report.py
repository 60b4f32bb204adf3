"""What a storm counts as: which blow is to blame, what is a failure, and who has settled."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.chaos.answer import Answer
from cli.chaos.asked import Request
from cli.chaos.blows import Blow
from cli.chaos.clients import Sent
from cli.chaos.report import Fallen, Seen, deaths, line, lines, summarize, unsettled, why_no_promise
from mesh.supervision.events import DRAINED, STARTING
from tests.cli.statuses import actor

BEGAN_S = 1000.0
NOTHING = Seen(60.0, BEGAN_S, [], [], [], "", "", 0, [], {})


def sent(began_s: float, ended_s: float, **fields) -> Sent:
    return Sent(Request({"stream": True}), BEGAN_S + began_s, BEGAN_S + ended_s, **fields)


def fallen(at_s: float, kind: str = "kill", **fields) -> Fallen:
    return Fallen(Blow(kind, "worker-0"), BEGAN_S + at_s, **({"has_landed": True, "settled_s": 1.0} | fields))


def gap(began_s: float, ended_s: float) -> tuple[float, float]:
    return BEGAN_S + began_s, BEGAN_S + ended_s


def test_a_quiet_storm_is_no_failure() -> None:
    report = summarize(replace(NOTHING, sent=[sent(0, 2), sent(1, 3)], fallen=[fallen(1)]), 2.0)
    assert (report.failed, report.total.sent, report.total.whole, report.total.lost) == (False, 2, 2, 0)


@pytest.mark.parametrize(
    ("seen", "failed"),
    [
        ({"sent": [sent(0, 2, lost="after 2.0 s: reset: by peer")]}, True),
        ({"sent": [sent(0, 2, different="request 0: other")]}, True),
        ({"sent": [sent(0, 2, different="request 0: other")], "no_promise": "groups differ"}, False),
        ({"sent": [sent(0, 2, lost="after 2.0 s: reset")], "no_promise": "groups differ"}, True),
        ({"sent": [sent(0, 2, is_cut=True)]}, False),
        ({"unsettled": "worker-0 is given_up"}, True),
        ({"gaps_s": [gap(0, 30)]}, False),
        ({"held": {"mesh_kv_grants_open": 1.0}, "unstruck": ["worker-1: 1 times"]}, False),
    ],
)
def test_lost_different_where_that_is_promised_and_not_ready_are_failures(seen, failed) -> None:
    assert summarize(replace(NOTHING, **seen), 2.0).failed is failed


def test_requests_count_for_the_last_blow_before_their_end_and_gaps_for_the_first_within() -> None:
    blows = [fallen(10), fallen(15, has_landed=False), fallen(20), fallen(30)]
    requests = [sent(0, 5), sent(8, 12, lost="x"), sent(9, 25), sent(19, 29.9, different="y"), sent(0, 40)]
    # The second begins with a token that was on its way when its blow fell.
    gaps = [gap(2, 3), gap(10.2, 12.5), gap(11, 14), gap(19, 31), gap(35, 38)]
    report = summarize(replace(NOTHING, sent=requests, gaps_s=gaps, fallen=blows), 2.0)
    counts = [one.counts for one in report.blows]
    assert [one.sent for one in counts] == [1, 0, 2, 1]
    assert [one.lost for one in counts] == [1, 0, 0, 0]
    assert [one.different for one in counts] == [0, 0, 1, 0]
    assert [one.stalls for one in counts] == [2, 0, 1, 1]
    assert [one.longest_gap_s for one in counts] == [3.0, 0.0, 12.0, 3.0]
    assert (report.total.stalls, report.total.longest_gap_s, report.total.sent) == (4, 12.0, 5)


@given(
    st.lists(st.tuples(st.floats(0, 90), st.floats(0, 30), st.booleans()), max_size=30),
    st.lists(st.tuples(st.floats(0, 90), st.booleans()), max_size=10),
)
def test_nothing_counts_twice_or_gets_lost_between_blows(requests, blows) -> None:
    told = [sent(began, began + lasts + 0.01, lost="x" if lost else "") for began, lasts, lost in requests]
    gaps = [gap(began, began + lasts + 0.01) for began, lasts, _ in requests]
    # One before everything: what came earlier counts in the total only.
    fell = [fallen(-1), *(fallen(at, has_landed=landed) for at, landed in blows)]
    report = summarize(replace(NOTHING, sent=told, gaps_s=gaps, fallen=fell), 2.0)
    for name in ("sent", "lost", "stalls"):
        assert sum(getattr(one.counts, name) for one in report.blows) == getattr(report.total, name), name
    assert max(one.counts.longest_gap_s for one in report.blows) == report.total.longest_gap_s


def test_what_still_runs_counts_for_nothing_and_what_was_sent_again_once() -> None:
    running = Sent(Request({}), BEGAN_S)
    report = summarize(replace(NOTHING, sent=[running, sent(0, 1, is_cut=True), sent(1, 2)]), 2.0)
    assert (report.total.sent, report.total.whole, report.total.cut) == (1, 1, 1)


def test_kinds_of_clients_are_counted() -> None:
    slow = Sent(Request({"stream": True}, pause_s=0.1), BEGAN_S, BEGAN_S + 1)
    report = summarize(replace(NOTHING, sent=[slow, sent(0, 1, was_cancelled=True), sent(0, 1)]), 2.0)
    assert (report.total.whole, report.total.slow, report.total.cancelled) == (2, 1, 1)


def test_a_connection_may_break_with_its_gateway_from_the_blow_until_all_is_ready() -> None:
    blow = fallen(10, is_gateway=True, settled_s=2.0)
    spans = {(0, 9.9): False, (0, 10): True, (11, 13): True, (12, 14): True, (12.1, 14): False}
    assert {span: blow.may_break(*gap(*span)) for span in spans} == spans
    assert replace(blow, settled_s=None).may_break(*gap(50, 60))
    assert not replace(blow, has_landed=False).may_break(*gap(0, 60))
    assert not replace(blow, is_gateway=False).may_break(*gap(0, 60))


def test_who_has_settled() -> None:
    ready = [actor("worker-0", epoch=5), actor("gateway-0"), actor("tokenizer-0", state=DRAINED)]
    assert unsettled(ready, {}) == ""
    assert unsettled(ready, {"worker-0": 4}) == ""
    assert unsettled(ready, {"worker-0": 5}) == "worker-0 has not been started again"
    starting = actor("registry", state=STARTING, last_reason="signal 9 (SIGKILL)")
    assert unsettled([*ready, starting], {}) == "registry is starting (signal 9 (SIGKILL))"
    elsewhere = actor("worker-1.b", state=STARTING, supervised=False)
    assert unsettled([*ready, elsewhere], {}) == "", "another host's are not ours to wait for"


def test_deaths_of_those_that_nobody_struck_are_named() -> None:
    before = [actor("worker-0", num_deaths=2), actor("worker-1"), actor("registry", num_deaths=1)]
    after = [
        actor("worker-0", num_deaths=5),
        actor("worker-1", num_deaths=1, last_reason="signal 11 (SIGSEGV)"),
        actor("registry", num_deaths=1, last_reason="long ago"),
    ]
    assert deaths(before, after, ["worker-0"]) == (4, ["worker-1: 1 times, last: signal 11 (SIGSEGV)"])


@pytest.mark.parametrize(
    ("numerics", "second", "says"),
    [
        ({}, "a", ""),
        ({"s0": "torch/any/1", "s1": "torch/any/1"}, "a", ""),
        ({"s0": "torch/any/1", "s1": "torch/any/2"}, "a", "different numerics"),
        ({"s0": "torch/varies/1"}, "a", "vary with the batch"),
        ({"s0": "torch-2/cuda-13/h100/bfloat16/flashinfer/graphs/varies"}, "a", "vary with the batch"),
        ({"s0": "torch-2/cuda-13/h100/bfloat16/flashinfer/graphs/fixed"}, "a", ""),
        ({"s0": "torch/any/1"}, "b", "differed before anybody was struck"),
    ],
)
def test_equal_texts_are_promised_where_equal_bits_are(numerics, second, says) -> None:
    found = why_no_promise(numerics, [Answer("a")], [Answer(second)])
    assert says in found
    assert bool(found) == bool(says)


def test_people_are_told_of_everything() -> None:
    blows = [fallen(3, note="killed by its supervisor"), fallen(6, settled_s=None), fallen(9, has_landed=False)]
    seen = replace(
        NOTHING,
        sent=[sent(0, 4, lost="after 4.0 s: reset: \x1b[2J"), sent(0, 2, different="request 0: other")],
        fallen=blows,
        no_promise="groups differ",
        unsettled="worker-0 is given_up",
        num_deaths=3,
        unstruck=["worker-1: 1 times, last: signal 11"],
        held={"mesh_kv_grants_open": 2.0},
    )
    report = summarize(seen, 2.0)
    text = "\n".join(lines(report))
    for words in (
        "killed by its supervisor", "never", "missed", "lost: 1; different: 1", "groups differ", "given_up",
        "3 deaths", "worker-1: 1 times", "mesh_kv_grants_open = 2", "2 of 3 blows landed", "request 0: other",
    ):  # fmt: skip
        assert words in text, words
    assert "\x1b" not in text, "what a server says does not steer the terminal"
    assert line(report.blows[0]).endswith(" 1.0 s; killed by its supervisor")
