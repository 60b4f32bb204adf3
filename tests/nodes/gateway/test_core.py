"""The gateway's core by event lists: every decision without a loop, a socket or a sleep."""

import itertools
from typing import Any

import msgspec
import pytest

from nodes.gateway.config import GatewayConfig
from nodes.gateway.requests.cancels import COMPANY_S
from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.events import (
    ABORT,
    Aborted,
    Accepted,
    AskAlive,
    AskRoute,
    CancelAcknowledged,
    CancelFailed,
    ClientGone,
    Deliver,
    DetokenizersChanged,
    End,
    Failure,
    Opened,
    PeerLost,
    RouteChosen,
    RouteFailed,
    SchedulerAnswered,
    SchedulersChanged,
    SendCancel,
    SendResend,
    SendSubmit,
    Stopping,
    SubmitAccepted,
    SubmitFailed,
    Suspect,
    Tick,
    Tokens,
)
from nodes.numerics import Bits
from nodes.protocol import AttemptFailed, ResendFrom, Route, TextBatch, TextDelta
from nodes.protocol.records import AttemptRecord
from nodes.request import AttemptRef, RequestSpec, Sampling, Stages, StopRules

CONFIG = GatewayConfig(model_name="m", context_length=100)
LOST = Failure("deadline_exceeded", "no answer")


def opened(request_id: str = "r", *, max_tokens: int = 8, route: Route | None = None) -> Opened:
    return Opened(
        request_id=request_id, prompt_ids=[1, 2, 3], spec=RequestSpec(Sampling(), StopRules(max_tokens)),
        route=route or Route(decode="d0", detokenizer="t0", prefill="p0"), arrived_at=0.0,
    )  # fmt: skip


def delta(position: int, token_ids: list[int], offset: int, text: str, **fields: Any) -> TextDelta:
    values = {"request_id": "r", "attempt": 0, "scheduler": "d0"} | fields
    return TextDelta(position=position, token_ids=token_ids, text_offset=offset, text=text, **values)


def batch(*deltas: TextDelta) -> TextBatch:
    return TextBatch(deltas=list(deltas))


@pytest.fixture
def core() -> GatewayCore:
    return GatewayCore("g0", CONFIG)


@pytest.fixture
def waiting(core: GatewayCore) -> GatewayCore:
    """It has submitted a request and heard nothing."""
    core.handle(opened(), 0.0)
    return core


@pytest.fixture
def running(core: GatewayCore) -> GatewayCore:
    core.handle(DetokenizersChanged(["t0"]), 0.0)
    core.handle(opened(), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.0)
    return core


def failed(attempt: int, code: str = "worker_lost", message: str = "", **fields: Any) -> AttemptFailed:
    return AttemptFailed(request_id="r", attempt=attempt, code=code, message=message, **fields)


def to(decode: str, attempt: int = 1) -> RouteChosen:
    return RouteChosen("r", attempt, Route(decode=decode, detokenizer="t0"))


def decided(commands: list[Any]) -> list[Any]:
    """Without the records of samples, which have tests of their own."""
    return [one._replace(sample=None) if isinstance(one, End) else one for one in commands]


def only(commands: list[Any], kind: type) -> Any:
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def test_a_request_from_submission_to_finish(core: GatewayCore) -> None:
    assert core.is_idle
    (submit,) = core.handle(opened(), 0.0)
    message = submit.message
    assert (submit.scheduler, message.detokenizer, message.prefill, message.gateway) == ("d0", "t0", "p0", "g0")
    assert (core.num_requests, core.num_waiting, core.is_idle) == (1, 1, False)
    assert core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.1) == [Accepted("r")]
    assert core.num_waiting == 0
    first = core.handle(batch(delta(0, [7], 0, "se", num_cached_tokens=2)), 0.5)
    assert first == [Deliver("r", "se", 1, 0.5, True, num_cached_tokens=2)]
    last = core.handle(batch(delta(1, [8, 9], 2, "ven", finish_reason="stop")), 0.75)
    assert decided(last) == [
        Deliver("r", "ven", 2, 0.25, False, num_cached_tokens=2),
        End("r", "stop", None, 3, 3, 2, 0.75, 0.25, 9),
    ]
    assert (core.num_requests, core.num_cancels) == (0, 1)
    assert core.next_deadline() == 0.75 + COMPANY_S
    assert core.handle(Tick(), 0.75 + COMPANY_S) == [SendCancel("d0", [AttemptRef("r", 0)])]
    assert core.handle(CancelAcknowledged("d0", [AttemptRef("r", 0)]), 1.0) == []
    assert core.is_idle


def test_what_was_read_from_a_disk_is_a_part_of_what_was_cached(core: GatewayCore) -> None:
    core.handle(DetokenizersChanged(["t0"]), 0.0)
    core.handle(opened(), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.1)
    stages = Stages(restored_tokens=9)
    (first,) = core.handle(batch(delta(0, [7], 0, "a", num_cached_tokens=2, stages=stages)), 0.5)
    assert isinstance(first, Deliver)
    assert (first.num_cached_tokens, first.num_restored_tokens) == (2, 2)
    core.handle(PeerLost("d0", 1, "killed by SIGKILL"), 1.0)
    core.handle(SchedulersChanged({"d0": 2}), 1.0)
    core.handle(SubmitAccepted([AttemptRef("r", 1)], "d0", 2), 1.5)
    later = delta(
        1, [9], 1, "c", attempt=1, num_cached_tokens=3, stages=Stages(restored_tokens=1), finish_reason="stop"
    )
    end = only(core.handle(batch(later), 2.0), End)
    assert (end.num_cached_tokens, end.num_restored_tokens) == (2, 2), "of the first attempt"


def test_time_is_wanted_only_where_something_is_due(core: GatewayCore) -> None:
    """Nobody looks at every request now and then; output puts a resend off without moving anything."""
    assert core.next_deadline() is None
    core.handle(opened(), 0.0)
    assert core.next_deadline() == CONFIG.request_timeout_s
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.1)
    due = core.next_deadline()
    assert due == 0.1 + CONFIG.quiet_s
    core.handle(batch(delta(0, [5], 0, "a")), 1.0)
    assert core.next_deadline() == due
    assert core.handle(Tick(), due) == [], "it was put off"
    assert core.next_deadline() == 1.0 + CONFIG.quiet_s
    assert only(core.handle(Tick(), core.next_deadline()), SendResend)
    core.handle(batch(delta(1, [6], 1, "b", finish_reason="stop")), 3.0)
    assert core.next_deadline() == 3.0 + COMPANY_S, "its scheduler is told that all of it came"
    core.handle(Tick(), 3.0 + COMPANY_S)
    assert core.next_deadline() is None


def test_only_cancels_of_what_has_ended_by_itself_wait_for_others(core: GatewayCore) -> None:
    for name in "abcd":
        core.handle(opened(request_id=name), 0.0)
        core.handle(SubmitAccepted([AttemptRef(name, 0)], "d0", 1), 0.0)
    for name in "ab":
        ended = core.handle(batch(delta(0, [5], 0, "a", request_id=name, finish_reason="length")), 1.0)
        assert not [one for one in ended if isinstance(one, SendCancel)]
    stopped = delta(0, [5], 0, "a", request_id="c", finish_reason="stop", stop_string="a")
    cancel = only(core.handle(batch(stopped), 1.01), SendCancel)
    assert cancel.attempts == [AttemptRef(name, 0) for name in "cab"], (
        "that one may run still; it takes the others along"
    )
    assert not [one for one in core.handle(Tick(), 1.0 + COMPANY_S) if isinstance(one, SendCancel)]
    assert only(core.handle(ClientGone("d"), 2.0), SendCancel).attempts == [AttemptRef("d", 0)]


def test_one_long_pause_does_not_make_later_silence_wait_longer(core: GatewayCore) -> None:
    core.handle(opened(max_tokens=200), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.0)
    times = [0.1, 3.1, *(3.1 + 0.01 * step for step in range(1, 60))]
    for position, at in enumerate(times):
        core.handle(batch(delta(position, [7], position, "a")), at)
    assert only(core.handle(Tick(), times[-1] + CONFIG.quiet_s), SendResend)


def test_a_request_says_where_its_time_went(core: GatewayCore) -> None:
    core.handle(DetokenizersChanged(["t0"]), 0.0)
    core.handle(opened(), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.5)
    stages = Stages(1.0, 0.5, 2.0, 0.25)
    core.handle(batch(delta(0, [7], 0, "a", stages=stages)), 5.0)
    core.handle(batch(delta(0, [7], 0, "a", stages=stages)), 5.1)
    core.handle(batch(delta(1, [8], 1, "b")), 6.0)
    core.handle(PeerLost("d0", 1, "killed by SIGKILL"), 10.0)
    core.handle(SchedulersChanged({"d0": 2}), 12.0)
    core.handle(SubmitAccepted([AttemptRef("r", 1)], "d0", 2), 12.5)
    core.handle(batch(delta(2, [9], 2, "c", attempt=1, stages=stages)), 20.0)
    end = only(core.handle(batch(delta(3, [5], 3, "d", attempt=1, finish_reason="stop")), 31.0), End)
    assert end.stall_s == 14.0
    assert end.sample is not None
    sample = end.sample
    its = {"queue_s": 1.0, "grant_s": 0.5, "prefill_s": 2.0, "transfer_s": 0.25}
    route = {"scheduler": "d0", "prefill": opened().route.prefill, "detokenizer": opened().route.detokenizer}
    first = AttemptRecord(
        attempt=0, **route, epoch=1, submitted_s=0.0, accepted_s=0.5, first_s=5.0, ended_s=10.0, **its,
        failure="peer_lost", why="killed by SIGKILL",
    )  # fmt: skip
    then = AttemptRecord(
        attempt=1, **route, epoch=2, submitted_s=12.0, accepted_s=12.5, first_s=20.0, ended_s=31.0, **its
    )
    assert sample.attempts == [first, then]
    assert (sample.first_token_s, sample.last_token_s, sample.ended_s, sample.finish) == (5.0, 31.0, 31.0, "stop")
    paused = [(stall.position, stall.ended_s, stall.took_s) for stall in sample.stalls]
    assert paused == [(2, 20.0, 14.0), (3, 31.0, 11.0)], "a second is what this request takes anyway"


def test_a_refused_submission_is_told_with_the_one_that_was_taken(core: GatewayCore) -> None:
    core.handle(opened(), 0.0)
    core.handle(SubmitFailed("r", 0, Failure("overloaded", "full")), 0.25)
    core.handle(RouteChosen("r", 0, Route(decode="d1")), 0.5)
    (state,) = core.requests.values()
    told = [(one.attempt, one.scheduler, one.failure, one.ended_s) for one in state.so_far().attempts]
    assert told == [(0, "d0", "overloaded", 0.25), (0, "d1", "", -1.0)]


def test_output_may_come_before_the_answer_to_submit(waiting: GatewayCore) -> None:
    commands = waiting.handle(batch(delta(0, [7], 0, "a")), 0.5)
    assert commands == [Accepted("r"), Deliver("r", "a", 1, 0.5, True)]
    assert waiting.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 4), 0.6) == []
    assert waiting.handle(SubmitFailed("r", 0, LOST), 0.7) == []


def test_duplicates_and_overlaps_are_dropped(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7, 8], 0, "abc")), 0.1)
    assert running.handle(batch(delta(0, [7, 8], 0, "abc")), 0.2) == []
    assert running.handle(batch(delta(1, [8, 9], 2, "cde")), 0.3) == [Deliver("r", "de", 1, pytest.approx(0.2), False)]


def test_text_may_come_without_tokens(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7], 0, "")), 0.1)
    assert running.handle(batch(delta(1, [], 0, "x")), 0.4) == [Deliver("r", "x", 0, pytest.approx(0.3), False)]


def test_a_gap_in_tokens_is_asked_for_once_in_a_while(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7], 0, "a")), 0.1)
    commands = running.handle(batch(delta(2, [9], 2, "c")), 0.2)
    assert commands == [SendResend("d0", "", [ResendFrom("r", 0, 1)])]
    assert running.handle(batch(delta(3, [9], 3, "d")), 0.21) == []
    assert only(running.handle(batch(delta(4, [9], 4, "e")), 2.0), SendResend).streams == [ResendFrom("r", 0, 1)]
    assert only(running.handle(batch(delta(1, [8, 9], 1, "bc")), 2.1), Deliver).text == "bc"
    assert running.resends.num_resends == 2


def test_a_gap_in_text_alone_is_asked_for_from_the_start(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7], 0, "a")), 0.1)
    from_start = SendResend("d0", "", [ResendFrom("r", 0, 0)])
    assert running.handle(batch(delta(1, [8], 2, "c")), 0.2) == [from_start]


def test_what_comes_beside_tokens_is_delivered_once_if_the_request_shows_it(core: GatewayCore) -> None:
    core.handle(msgspec.structs.replace(opened(), shows_tokens=True), 0.0)

    def beside(event: TextBatch, at: float) -> list[Tokens | None]:
        return [one.tokens for one in core.handle(event, at) if isinstance(one, Deliver)]

    assert beside(batch(delta(0, [7, 8], 0, "ab", extras=[b"0", b"1"])), 0.1) == [Tokens([7, 8], [b"0", b"1"])]
    repeated = delta(0, [7, 8, 9], 0, "abc", extras=[b"!", b"!", b"2"])
    assert beside(batch(repeated), 0.2) == [Tokens([9], [b"2"])]
    assert beside(batch(delta(3, [10], 3, "d")), 0.3) == [Tokens([10], [])]
    core.handle(opened("s"), 0.0)
    assert beside(batch(delta(0, [7], 0, "a", extras=[b"0"], request_id="s")), 0.4) == [None], "costs nothing"


def test_gaps_of_one_frame_share_a_message(running: GatewayCore) -> None:
    running.handle(opened("s"), 0.0)
    commands = running.handle(batch(delta(2, [9], 2, "c"), delta(1, [9], 2, "c", request_id="s")), 0.2)
    assert only(commands, SendResend).streams == [ResendFrom("r", 0, 0), ResendFrom("s", 0, 0)]


def test_silence_is_asked_about_ever_less_often(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7], 0, "a")), 0.1)
    assert running.handle(Tick(), 1.0) == []
    assert running.handle(Tick(), 1.2) == [SendResend("d0", "", [ResendFrom("r", 0, 1)])]
    assert running.handle(Tick(), 2.0) == []
    times = [t / 4 for t in range(8, 160) if running.handle(Tick(), t / 4)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert max(gaps) <= 5.25


def test_slow_output_is_not_silence(running: GatewayCore) -> None:
    for number in range(5):
        running.handle(batch(delta(number, [7], number, "a")), 2.0 * number)
    asked_at = [t / 4 for t in range(32, 80) if running.handle(Tick(), t / 4)]
    assert asked_at[0] == 8.0 + 4.0


def test_silence_in_the_end_tries_another_detokenizer(running: GatewayCore) -> None:
    running.handle(DetokenizersChanged(["t0", "t1"]), 0.0)
    commands = [command for t in range(1, 40) for command in running.handle(Tick(), float(t))]
    assert commands[2] == Suspect("d0"), "it may be there no more"
    sent = [command for command in commands if isinstance(command, SendResend)]
    assert [command.detokenizer for command in sent[:4]] == ["", "", "t1", "t1"]
    assert "t0" in [command.detokenizer for command in sent[4:]]


def test_a_lost_detokenizer_is_replaced_at_once(running: GatewayCore) -> None:
    running.handle(DetokenizersChanged(["t0", "t1", "t2"]), 0.0)
    running.handle(batch(delta(0, [7], 0, "a")), 0.1)
    (resend,) = running.handle(PeerLost("t0", 1), 0.2)
    assert resend.detokenizer in ("t1", "t2")
    assert resend.streams == [ResendFrom("r", 0, 1)]
    assert only(running.handle(Tick(), 3.0), SendResend).detokenizer == resend.detokenizer


def test_a_lost_detokenizer_without_another_is_waited_for(running: GatewayCore) -> None:
    running.handle(DetokenizersChanged([]), 0.0)
    assert only(running.handle(PeerLost("t0", 1), 0.2), SendResend).detokenizer == ""


def test_a_lost_scheduler_means_the_next_attempt_by_another_way(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7, 8], 0, "ab")), 0.1)
    assert running.handle(PeerLost("d0", 1), 0.2) == [AskAlive("d0")]
    assert running.handle(Tick(), 1.1) == [], "it may come back to its pages"
    ask = only(running.handle(Tick(), 1.2), AskRoute)
    assert (ask.attempt, ask.message.token_ids, ask.message.excluded) == (1, [1, 2, 3, 7, 8], ["d0"])
    message = only(running.handle(to("d1"), 1.3), SendSubmit).message
    assert (message.attempt, message.prompt_ids, message.output_ids) == (1, [1, 2, 3], [7, 8])
    assert running.handle(SchedulersChanged({"d0": 2, "d1": 1}), 1.3) == [], "too late"
    running.handle(SubmitAccepted([AttemptRef("r", 1)], "d1", 1), 1.4)
    late = running.handle(batch(delta(2, [5], 2, "x")), 1.5)
    assert late == [SendCancel("d0", [AttemptRef("r", 0)])]
    assert running.handle(batch(delta(2, [5], 2, "x")), 1.5) == [], "the cancel is under way"
    last = delta(2, [9], 2, "c", attempt=1, scheduler="d1", num_cached_tokens=5, finish_reason="length")
    commands = running.handle(batch(last), 1.6)
    assert only(commands, Deliver).text == "c"
    assert only(commands, End).num_cached_tokens == 0, "cached tokens are attempt 0's"
    assert running.num_retries == 1


def test_a_scheduler_that_comes_back_gets_what_it_had(running: GatewayCore) -> None:
    running.handle(SchedulersChanged({"d0": 1, "d1": 1}), 0.0)
    running.handle(batch(delta(0, [7, 8], 0, "ab")), 0.1)
    assert running.handle(PeerLost("d0", 1), 0.2) == [AskAlive("d0")]
    assert running.handle(SchedulersChanged({"d0": 1, "d1": 1}), 0.3) == [], "old news"
    assert running.handle(SchedulersChanged({"d1": 1}), 0.3) == []
    (submit,) = running.handle(SchedulersChanged({"d0": 2, "d1": 1}), 0.7)
    assert (submit.scheduler, submit.message.attempt, submit.message.output_ids) == ("d0", 1, [7, 8])
    assert running.handle(SchedulersChanged({"d0": 2, "d1": 1}), 0.8) == []
    refused = SubmitFailed("r", 1, Failure("not_ready", "its worker is away"))
    assert only(running.handle(refused, 0.8), AskRoute).message.excluded == ["d0"]


def test_a_scheduler_that_only_could_not_be_reached_goes_on(running: GatewayCore) -> None:
    running.handle(SchedulersChanged({"d0": 1, "d1": 1}), 0.0)
    running.handle(batch(delta(0, [7, 8], 0, "ab")), 0.1)
    assert running.handle(PeerLost("d0", 1), 0.2) == [AskAlive("d0")]
    assert running.handle(SchedulerAnswered("d0", 2), 0.2) == [], "the next one is waited for until it is ready"
    submit = only(running.handle(SchedulerAnswered("d0", 1), 0.3), SendSubmit)
    assert (submit.scheduler, submit.message.attempt, submit.message.output_ids) == ("d0", 1, [7, 8])
    running.handle(SubmitAccepted([AttemptRef("r", 1)], "d0", 1), 0.3)
    running.handle(PeerLost("d0", 1), 2.0)
    assert running.handle(SchedulerAnswered("d0", 1), 2.1) == [], "it answers, and brings nothing"
    assert only(running.handle(Tick(), 3.0), AskRoute).message.excluded == ["d0"]


@pytest.fixture
def far() -> GatewayCore:
    """A request with output at a scheduler of another host than the gateway's, which has been lost."""
    far = GatewayCore("gateway.head", CONFIG)
    far.handle(DetokenizersChanged(["t0"]), 0.0)
    far.handle(SchedulersChanged({"s.d": 1, "s.p": 1}), 0.0)
    far.handle(opened(route=Route(decode="s.d", detokenizer="t0")), 0.0)
    far.handle(SubmitAccepted([AttemptRef("r", 0)], "s.d", 1), 0.0)
    far.handle(batch(delta(0, [7, 8], 0, "ab", scheduler="s.d")), 0.1)
    assert far.handle(PeerLost("s.d", 1), 2.0) == [AskAlive("s.d")]
    return far


def test_a_scheduler_whose_host_is_lost_is_not_waited_for(far: GatewayCore) -> None:
    assert far.handle(Tick(), 2.2) == [], "its supervisor may be about to speak"
    assert only(far.handle(Tick(), 2.25), AskRoute).message.excluded == ["s.d"]


def test_a_scheduler_said_to_be_dead_by_its_host_is_waited_for(far: GatewayCore) -> None:
    assert far.handle(SchedulersChanged({"s.p": 1}), 2.1) == []
    assert far.handle(Tick(), 2.9) == [], "it may come back to its pages"
    assert only(far.handle(SchedulersChanged({"s.d": 2, "s.p": 1}), 2.95), SendSubmit).scheduler == "s.d"


BITS = {"d0": Bits("w", "x"), "d1": Bits("w", "y"), "d2": Bits("w", "x")}


def test_the_next_route_is_asked_for_with_the_numerics_of_the_first_output(running: GatewayCore) -> None:
    running.handle(SchedulersChanged({"d0": 1, "d1": 1}, bits=BITS), 0.0)
    assert only(running.handle(failed(0, "draining"), 0.1), AskRoute).message.numerics == "", (
        "no output: any bits will do"
    )
    running.handle(to("d1"), 0.2)
    running.handle(batch(delta(0, [7], 0, "a", attempt=1, scheduler="d1")), 0.3)
    # It drains, so it is not ready; what it announces still holds of what it has computed.
    running.handle(SchedulersChanged({"d0": 1}, bits=BITS), 0.4)
    asked = only(running.handle(failed(1, "draining"), 0.5), AskRoute).message
    assert (asked.weights, asked.numerics, running.num_numerics_changes) == ("w", "y", 0)


def test_a_request_that_goes_on_under_other_numerics_is_counted_once(running: GatewayCore) -> None:
    running.handle(SchedulersChanged({"d0": 1, "d1": 1, "d2": 1}, bits=BITS), 0.0)
    running.handle(batch(delta(0, [7], 0, "a")), 0.1)
    counts = []
    for attempt, decode in enumerate(("d2", "d1", "d0", "d1"), 1):
        commands = running.handle(failed(attempt - 1, "draining"), attempt)
        assert only(commands, AskRoute).message.numerics == "x", "those of its first output, wherever it has been since"
        running.handle(to(decode, attempt), attempt + 0.1)
        counts.append(running.num_numerics_changes)
        running.handle(batch(delta(attempt, [8], attempt, "b", attempt=attempt, scheduler=decode)), attempt + 0.2)
        counts.append(running.num_numerics_changes)
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1], "when output comes, not when it is hoped for"


@pytest.mark.parametrize("other", [Bits("w", "y"), Bits("v", "x")], ids=["numerics", "weights"])
def test_a_worker_of_other_bits_under_the_same_scheduler_is_counted_too(running: GatewayCore, other: Bits) -> None:
    running.handle(SchedulersChanged({"d0": 1}, bits={"d0": Bits("w", "x")}), 0.0)
    running.handle(batch(delta(0, [7], 0, "a")), 0.1)
    running.handle(SchedulersChanged({"d0": 1}, bits={"d0": other}), 0.2)
    running.handle(batch(delta(0, [7], 0, "a")), 0.3)
    assert running.num_numerics_changes == 0, "nothing new has come"
    running.handle(batch(delta(1, [8], 1, "b")), 0.4)
    assert running.num_numerics_changes == 1


def test_a_scheduler_that_is_back_before_its_death_is_known_is_used_at_once(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7, 8], 0, "ab")), 0.1)
    running.handle(SchedulersChanged({"d0": 2}), 0.2)
    assert only(running.handle(PeerLost("d0", 1), 0.2), SendSubmit).scheduler == "d0"
    lost = Failure("peer_lost", "gone")
    # The second death, seen by the submission alone.
    assert running.handle(SubmitFailed("r", 1, lost), 0.3) == [AskAlive("d0")]
    assert only(running.handle(SchedulersChanged({"d0": 3}), 0.4), SendSubmit).message.attempt == 2


def test_what_does_not_fit_a_stand_in_waits_for_whom_it_stands_in_for(core: GatewayCore) -> None:
    too_much = Failure("never_fits", "more pages than the pool has", retryable=False)
    core.handle(SchedulersChanged({"p0": 1}, frozenset({"p0"})), 0.0)
    core.handle(opened(route=Route(decode="p0", detokenizer="t0")), 0.0)
    assert only(core.handle(SubmitFailed("r", 0, too_much), 0.1), AskRoute).message.excluded == ["p0"]
    assert core.handle(to("p0", 0), 0.2) == []
    assert only(core.handle(Tick(), 3.0), AskRoute).message.excluded == []
    core.handle(SchedulersChanged({"p0": 1, "d0": 2}, frozenset({"p0"})), 3.0)
    assert only(core.handle(to("d0", 0), 3.1), SendSubmit).scheduler == "d0"
    # A decode group's word is the last.
    assert only(core.handle(SubmitFailed("r", 0, too_much), 3.2), End).failure == too_much


def test_a_scheduler_whose_worker_was_drained_is_waited_for_like_a_missing_role(waiting: GatewayCore) -> None:
    """`role_wait_s` from its arrival on, less than other failures are given."""
    drained, now, commands = Failure("draining", "worker-0 was drained"), 0.1, []
    while waiting.num_requests:
        commands, now = route_again(waiting, waiting.handle(SubmitFailed("r", 0, drained), now), now)
    end = only(commands, End)
    assert end.failure == drained
    assert CONFIG.role_wait_s < end.elapsed_s < CONFIG.role_wait_s + 2.5 < CONFIG.recovery_timeout_s


def test_a_request_given_back_by_a_drained_worker_goes_elsewhere_or_ends(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7], 0, "a")), 0.5)
    assert only(running.handle(failed(0, "draining", "it was drained"), 60.0), AskRoute).message.excluded == ["d0"]
    assert only(running.handle(to("d1"), 60.1), SendSubmit).message.output_ids == [7]
    running.handle(SubmitFailed("r", 1, Failure("draining", "so was worker-1")), 60.2)
    running.handle(RouteFailed("r", 1, Failure("no_capacity", "nobody")), 60.3)
    (ask,) = (one for one in running.handle(Tick(), 63.0) if isinstance(one, AskRoute))
    commands = running.handle(RouteFailed("r", ask.attempt, Failure("no_capacity", "nobody")), 63.1)
    assert only(commands, End).failure == Failure("draining", "so was worker-1")


def test_a_scheduler_that_serves_no_submissions_is_passed_over(waiting: GatewayCore) -> None:
    (ask,) = waiting.handle(SubmitFailed("r", 0, Failure("not_served", "what is that", retryable=False)), 0.1)
    assert ask.message.excluded == ["d0"]
    assert only(waiting.handle(RouteChosen("r", 0, Route(decode="d1")), 0.2), SendSubmit).scheduler == "d1"


def test_what_fits_nobody_who_comes_is_told_why(core: GatewayCore) -> None:
    too_much = Failure("never_fits", "more pages than the pool has", retryable=False)
    core.handle(SchedulersChanged({"p0": 1}, frozenset({"p0"})), 0.0)
    core.handle(opened(route=Route(decode="p0", detokenizer="t0")), 0.0)
    core.handle(SubmitFailed("r", 0, too_much), 0.1)
    late = CONFIG.recovery_timeout_s + 1
    ended = core.handle(RouteFailed("r", 0, Failure("no_route", "nobody is there")), late)
    assert only(ended, End).failure == too_much


def test_a_scheduler_comes_back_but_the_detokenizer_is_gone(running: GatewayCore) -> None:
    running.handle(batch(delta(0, [7, 8], 0, "ab")), 0.1)
    running.handle(PeerLost("d0", 1), 0.2)
    running.handle(DetokenizersChanged(["t1"]), 0.3)
    assert only(running.handle(SchedulersChanged({"d0": 2}), 0.4), AskRoute).message.excluded == []


def test_a_lost_scheduler_of_an_older_epoch_is_no_loss(waiting: GatewayCore) -> None:
    waiting.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 3), 0.0)
    assert waiting.handle(PeerLost("d0", 2), 0.2) == []
    assert waiting.handle(PeerLost("elsewhere", 2), 0.2) == []
    assert only(waiting.handle(PeerLost("d0", 3), 0.3), AskRoute)


def test_an_attempt_not_yet_taken_is_judged_by_its_own_answer(waiting: GatewayCore) -> None:
    assert waiting.handle(PeerLost("d0", 3), 0.2) == []
    lost = Failure("peer_lost", "gone")
    (ask,) = waiting.handle(SubmitFailed("r", 0, lost), 0.3)
    assert (ask.attempt, ask.message.excluded) == (1, ["d0"])


def submit_to_nobody(core: GatewayCore, attempt: int, now: float) -> list[Any]:
    lost = Failure("peer_lost", "d0#1 is lost: refused")
    return core.handle(SubmitFailed("r", attempt, lost, was_heard=False), now)


def route_again(core: GatewayCore, commands: list[Any], now: float) -> tuple[list[Any], float]:
    """Tick until the next attempt is submitted to `d0`, or the request ends; what does it, and when."""
    for _ in range(1000):
        if any(isinstance(command, SendSubmit | End) for command in commands):
            return commands, now
        asks = [command for command in commands if isinstance(command, AskRoute)]
        if asks:
            commands = core.handle(RouteChosen("r", asks[0].attempt, Route(decode="d0")), now)
        else:
            now += 0.25
            commands = core.handle(Tick(), now)
    raise AssertionError("neither submitted nor ended")


def test_submissions_that_nobody_was_there_to_take_are_bounded_by_time_and_not_by_attempts(
    waiting: GatewayCore,
) -> None:
    now, attempt, commands = 0.0, 0, []
    while waiting.num_requests:
        commands, now = route_again(waiting, submit_to_nobody(waiting, attempt, now), now)
        attempt += 1
    assert attempt > 2 * CONFIG.max_attempts
    assert CONFIG.recovery_timeout_s <= now < CONFIG.recovery_timeout_s + 3
    assert only(commands, End).failure.code == "peer_lost"
    assert waiting.num_cancels == 0, "nobody holds anything"


def test_an_attempt_that_fails_when_time_is_over_is_the_last(waiting: GatewayCore) -> None:
    assert waiting.handle(SubmitFailed("r", 0, LOST), CONFIG.recovery_timeout_s - 0.1)[0].attempt == 1
    late = CONFIG.recovery_timeout_s
    waiting.handle(to("d1"), late - 0.1)
    ended = waiting.handle(SubmitFailed("r", 1, Failure("deadline_exceeded", "again")), late)
    assert only(ended, End).failure == Failure("deadline_exceeded", "again")


def test_submissions_to_a_scheduler_that_died_of_them_are_bounded_by_attempts(waiting: GatewayCore) -> None:
    commands, now = route_again(waiting, submit_to_nobody(waiting, 0, 0.0), 0.0)
    for attempt in range(1, CONFIG.max_attempts + 1):
        commands = waiting.handle(SubmitFailed("r", attempt, Failure("peer_lost", "crashed")), now)
        commands, now = route_again(waiting, commands, now)
    assert "gave up after 5 attempts" in only(commands, End).failure.message


def test_no_answer_to_submit_cancels_what_may_be_held(waiting: GatewayCore) -> None:
    ask, cancel = waiting.handle(SubmitFailed("r", 0, LOST), 5.0)
    assert (ask.attempt, cancel) == (1, SendCancel("d0", [AttemptRef("r", 0)]))


@pytest.mark.parametrize(
    ("code", "excluded"), [("unknown_attempt", []), ("worker_lost", ["d0"]), ("memory_released", ["d0"])]
)
def test_a_failed_attempt_is_tried_again(running: GatewayCore, code: str, excluded: list[str]) -> None:
    (ask,) = running.handle(failed(0, code), 0.2)
    assert (ask.attempt, ask.message.excluded) == (1, excluded)


def test_old_and_unknown_failures_are_ignored(running: GatewayCore) -> None:
    running.handle(failed(0), 0.2)
    assert running.handle(failed(0), 0.2) == []
    assert running.handle(failed(1), 0.2) == [], "not submitted yet"
    assert running.handle(AttemptFailed(request_id="x", attempt=0, code="worker_lost"), 0.2) == []
    assert running.handle(RouteChosen("r", 0, Route(decode="d1")), 0.2) == []
    assert running.handle(RouteFailed("x", 0, LOST), 0.2) == []
    assert running.handle(ClientGone("x"), 0.2) == []


def test_a_failure_that_is_not_retryable_ends_the_request(running: GatewayCore) -> None:
    end = only(running.handle(failed(0, "poisoned_request", "boom", retryable=False), 0.2), End)
    assert (end.failure, end.finish_reason) == (Failure("poisoned_request", "boom", retryable=False), None)
    assert running.num_requests == 0


def test_an_attempt_number_that_is_spoilt_is_followed_by_the_next(waiting: GatewayCore) -> None:
    (ask,) = waiting.handle(SubmitFailed("r", 0, Failure("attempt_over", "was here", retryable=False)), 0.1)
    assert (ask.attempt, ask.message.excluded) == (1, [])


def test_what_can_never_fit_ends_the_request(waiting: GatewayCore) -> None:
    failure = Failure("never_fits", "too many pages", retryable=False)
    assert only(waiting.handle(SubmitFailed("r", 0, failure), 0.1), End).failure == failure


def drive_attempt_to_failure(core: GatewayCore, attempt: int, now: float) -> list[Any]:
    core.handle(to(f"d{attempt}", attempt), now)
    core.handle(SubmitAccepted([AttemptRef("r", attempt)], f"d{attempt}", 1), now)
    return core.handle(failed(attempt), now)


def test_attempts_are_spent_after_five_with_growing_pauses(running: GatewayCore) -> None:
    running.handle(failed(0), 0.0)
    now, pauses = 0.0, []
    for attempt in range(1, 4):
        assert drive_attempt_to_failure(running, attempt, now) == []
        began = now
        while not running.handle(Tick(), now):
            now += 0.05
        pauses.append(now - began)
    assert pauses == sorted(pauses)
    assert pauses[0] > 0.1
    failure = only(drive_attempt_to_failure(running, 4, now), End).failure
    assert (failure.code, failure.retryable) == ("worker_lost", True)
    assert "5 attempts" in failure.message


def lose_and_run_again(core: GatewayCore, attempt: int, now: float) -> list[Any]:
    """The scheduler dies in attempt number `attempt`, and the next one takes the request."""
    commands = core.handle(PeerLost("d0", attempt + 1), now)
    core.handle(Tick(), now + 1.0)
    core.handle(to("d0", attempt + 1), now + 1.0)
    core.handle(Tick(), now + 1.1)
    core.handle(to("d0", attempt + 1), now + 1.1)
    core.handle(SubmitAccepted([AttemptRef("r", attempt + 1)], "d0", attempt + 2), now + 1.2)
    return commands


def test_attempts_that_brought_output_are_not_held_against_a_request(running: GatewayCore) -> None:
    for attempt in range(7):
        now = 10.0 * attempt
        commands = running.handle(batch(delta(attempt, [7], attempt, "a", attempt=attempt)), now)
        assert [type(command) for command in commands] == [Deliver]
        assert not any(isinstance(one, End) for one in lose_and_run_again(running, attempt, now + 1.0))
    ends = [lose_and_run_again(running, attempt, 100.0 + 10 * attempt) for attempt in range(7, 13)]
    assert sum(isinstance(one, End) for commands in ends for one in commands) == 1


def test_a_lost_link_to_a_scheduler_that_lives_is_not_held_against_a_request(running: GatewayCore) -> None:
    for attempt in range(9):
        now = 10.0 * attempt
        assert not any(isinstance(one, End) for one in running.handle(PeerLost("d0", 1), now))
        for later in (1.0, 1.1):
            running.handle(Tick(), now + later)
            running.handle(to("d0", attempt + 1), now + later)
        running.handle(SubmitAccepted([AttemptRef("r", attempt + 1)], "d0", 1), now + 1.2)
    assert running.num_requests == 1


def test_a_full_scheduler_is_passed_over_and_the_attempt_number_kept(core: GatewayCore) -> None:
    full = Failure("overloaded", "queue full")
    core.handle(opened(), 0.0)
    (ask,) = core.handle(SubmitFailed("r", 0, full), 0.1)
    assert (ask.attempt, ask.message.excluded) == (0, ["d0"])
    core.handle(RouteChosen("r", 0, Route(decode="d1")), 0.1)
    (ask,) = core.handle(SubmitFailed("r", 0, full), 0.1)
    assert ask.message.excluded == ["d0", "d1"]
    end = only(core.handle(RouteFailed("r", 0, Failure("no_route", "none left")), 0.2), End)
    assert end.failure == full, "everybody is full, and the client hears it at once"
    assert core.num_cancels == 0, "nobody holds anything"


def test_an_excluded_scheduler_named_again_is_no_route(waiting: GatewayCore) -> None:
    waiting.handle(SubmitFailed("r", 0, Failure("unreachable", "not a member")), 0.1)
    assert waiting.handle(RouteChosen("r", 0, Route(decode="d0")), 0.1) == []
    assert waiting.handle(Tick(), 0.11) == []
    (ask,) = waiting.handle(Tick(), 0.2)
    assert ask.message.excluded == []
    (submit,) = waiting.handle(RouteChosen("r", 0, Route(decode="d0")), 0.2)
    assert submit.scheduler == "d0"


def test_without_a_route_it_waits_and_then_gives_up(running: GatewayCore) -> None:
    running.handle(PeerLost("d0", 1), 0.0)
    none = RouteFailed("r", 1, Failure("no_route", "no scheduler"))
    now, asked = 0.0, 1
    while running.num_requests:
        ended = [command for command in running.handle(none, now) if isinstance(command, End)]
        while running.num_requests and not running.handle(Tick(), now):
            now += 0.05
        asked += 1
    assert 30 <= now < 33
    assert asked < 50
    assert only(ended, End).failure.code == "peer_lost"


def test_a_route_refused_for_good_ends_the_request(running: GatewayCore) -> None:
    running.handle(PeerLost("d0", 1), 0.0)
    failure = Failure("bad_request", "no", retryable=False)
    assert only(running.handle(RouteFailed("r", 1, failure), 0.1), End).failure == failure


def test_a_finish_lost_with_its_attempt_is_drawn_again(core: GatewayCore) -> None:
    core.handle(opened(max_tokens=2), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.0)
    core.handle(batch(delta(0, [7, 8], 0, "a")), 0.1)
    core.handle(PeerLost("d0", 1), 0.2)
    core.handle(Tick(), 1.2)
    (submit,) = core.handle(RouteChosen("r", 1, Route(decode="d1")), 1.3)
    assert submit.message.output_ids == [7]
    commands = core.handle(batch(delta(1, [8], 1, "b", attempt=1, finish_reason="length")), 1.4)
    assert only(commands, Deliver).text == "b"
    assert only(commands, End).num_output_tokens == 2


def test_more_tokens_than_asked_for_end_the_request(core: GatewayCore) -> None:
    core.handle(opened(max_tokens=2), 0.0)
    commands = core.handle(batch(delta(0, [7, 8, 9], 0, "abc")), 0.1)
    assert only(commands, End).failure.code == "internal"
    assert only(commands, SendCancel)
    assert not [command for command in commands if isinstance(command, Deliver)]


def test_a_client_that_left_is_cancelled_wherever_the_request_is(waiting: GatewayCore) -> None:
    commands = waiting.handle(ClientGone("r"), 0.1)
    assert decided(commands) == [End("r", None, None, 3, 0, 0, 0.1), SendCancel("d0", [AttemptRef("r", 0)])]
    waiting.handle(CancelAcknowledged("d0", [AttemptRef("r", 0)]), 0.1)
    assert waiting.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.2) == [
        SendCancel("d0", [AttemptRef("r", 0)])
    ]


def test_a_client_that_left_between_attempts_leaves_nothing(running: GatewayCore) -> None:
    running.handle(PeerLost("d0", 1), 0.0)
    assert [type(command) for command in running.handle(ClientGone("r"), 0.1)] == [End]
    assert running.is_idle


def test_unknown_output_is_answered_with_a_cancel(core: GatewayCore) -> None:
    assert core.handle(batch(delta(0, [1], 0, "a", scheduler="")), 0.0) == [], "nobody to tell"
    assert core.handle(batch(delta(0, [1], 0, "a")), 0.0) == [SendCancel("d0", [AttemptRef("r", 0)])]
    assert core.num_refused == 2


def test_output_of_an_attempt_yet_to_come_is_dropped(running: GatewayCore) -> None:
    assert running.handle(batch(delta(0, [1], 0, "a", attempt=3)), 0.0) == []


def test_a_cancel_is_asked_again_until_acknowledged(running: GatewayCore) -> None:
    running.handle(ClientGone("r"), 0.0)
    running.handle(CancelFailed("d0", lost=False), 2.0)
    assert running.handle(Tick(), 2.1) == []
    assert running.handle(Tick(), 2.6) == [SendCancel("d0", [AttemptRef("r", 0)])]
    running.handle(CancelAcknowledged("d0", [AttemptRef("r", 0)]), 2.7)
    assert running.is_idle


def test_a_cancel_at_a_lost_scheduler_is_dropped(running: GatewayCore) -> None:
    running.handle(ClientGone("r"), 0.0)
    running.handle(CancelFailed("d0", lost=True), 2.0)
    assert running.is_idle


def test_a_request_may_not_take_for_ever(running: GatewayCore) -> None:
    end = only(running.handle(Tick(), CONFIG.request_timeout_s + 1), End)
    assert end.failure.code == "request_timeout"


def test_stopping_ends_everything(running: GatewayCore) -> None:
    running.handle(opened("s"), 0.0)
    commands = running.handle(Stopping(), 1.0)
    ends = [command for command in commands if isinstance(command, End)]
    assert [end.failure.code for end in ends] == ["shutting_down", "shutting_down"]
    assert only(commands, SendCancel).attempts == [AttemptRef("r", 0), AttemptRef("s", 0)]


def test_ids_are_used_once(running: GatewayCore) -> None:
    with pytest.raises(AssertionError, match="must be unique"):
        running.handle(opened(), 0.0)


def test_only_events_are_taken(core: GatewayCore) -> None:
    with pytest.raises(AssertionError):
        core.handle("nonsense", 0.0)


def test_releases_are_no_failures_of_a_request(running: GatewayCore) -> None:
    """Many more than it may have attempts that come to nothing."""
    now, number = 100.0, 0
    for attempt in range(4 * CONFIG.max_attempts):
        commands = running.handle(failed(attempt, "memory_released"), now)
        while not any(isinstance(command, AskRoute) for command in commands):
            now += 0.25
            commands = running.handle(Tick(), now)
        number = 1 - number
        running.handle(to(f"d{number}", attempt + 1), now)
        running.handle(SubmitAccepted([AttemptRef("r", attempt + 1)], f"d{number}", 1), now)
    assert running.num_requests == 1


def test_what_has_begun_waits_for_the_resumption(running: GatewayCore) -> None:
    released = Failure("memory_released", "the memory of all worker groups is released")
    commands, now = running.handle(failed(0, "memory_released"), 10.0), 10.0
    while now < 10.0 * CONFIG.recovery_timeout_s:
        if any(isinstance(command, AskRoute) for command in commands):
            running.handle(RouteFailed("r", 1, released), now)
        now += 0.5
        commands = running.handle(Tick(), now)
        assert not any(isinstance(command, End) for command in commands)
    running.handle(to("d0"), now)
    assert running.handle(SubmitAccepted([AttemptRef("r", 1)], "d0", 2), now) == [Accepted("r")]


def test_an_aborted_request_ends_with_what_it_had_wherever_it_stands(core: GatewayCore) -> None:
    core.handle(opened(), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.0)
    core.handle(batch(delta(0, [7, 8], 0, "se")), 0.5)
    assert decided(core.handle(Aborted("r"), 1.0)) == [
        End("r", ABORT, None, 3, 2, 0, 1.0),
        SendCancel("d0", [AttemptRef("r", 0)]),
    ]
    assert core.num_requests == 0
    # What comes late is for nobody, and a second one does nothing.
    assert not [one for one in core.handle(batch(delta(2, [9], 2, "ven")), 1.1) if isinstance(one, Deliver | End)]
    assert core.handle(Aborted("r"), 1.2) == []
    # Waiting for another scheduler: nobody holds it.
    core.handle(opened("q"), 2.0)
    core.handle(SubmitFailed("q", 0, Failure("overloaded", "full")), 2.0)
    assert [type(one) for one in core.handle(Aborted("q"), 2.1)] == [End]
