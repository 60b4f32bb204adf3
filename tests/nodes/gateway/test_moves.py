"""Requests of a group whose worker is dead: who is asked for another, who moves, and what it counts as."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.gateway.config import GatewayConfig
from nodes.gateway.requests.core import GatewayCore
from nodes.gateway.requests.events import (
    AskAlive,
    AskMove,
    AskRoute,
    CancelAcknowledged,
    CancelFailed,
    DetokenizersChanged,
    End,
    Failure,
    GroupAway,
    MoveChosen,
    Opened,
    PeerLost,
    SchedulersChanged,
    SendCancel,
    SendResend,
    SendSubmit,
    SubmitAccepted,
    SubmitFailed,
    Tick,
)
from nodes.gateway.requests.log import MAX_MOVES
from nodes.gateway.requests.moves import MAX_AWAY_S
from nodes.numerics import Bits
from nodes.protocol import AttemptFailed, Route, Suspected, TextBatch, TextDelta
from nodes.request import VECTOR_KINDS, AttemptRef, RequestSpec, Sampling, StopRules

CONFIG = GatewayConfig(model_name="m", context_length=100, max_attempts=1)
EQUAL = dict.fromkeys(("d0", "d1", "d2"), "bits")
THERE = Route(decode="d1", detokenizer="t0")


def opened(request_id: str = "r", decode: str = "d0", kind: str = "") -> Opened:
    spec = RequestSpec(Sampling(), StopRules(20), **({"kind": kind} if kind else {}))
    route = Route(decode=decode, detokenizer="t0")
    return Opened(request_id=request_id, prompt_ids=[1, 2, 3], spec=spec, route=route, arrived_at=0.0)


def text(position: int, attempt: int, scheduler: str, num: int = 1, request_id: str = "r") -> TextBatch:
    ids = list(range(position, position + num))
    one = TextDelta(
        request_id=request_id, attempt=attempt, scheduler=scheduler, position=position, token_ids=ids,
        text_offset=position, text="x" * num,
    )  # fmt: skip
    return TextBatch(deltas=[one])


def suspected(deaths: int = 1, cleared_at: int = 4, attempt: int = 0) -> Suspected:
    return Suspected(request_id="r", attempt=attempt, deaths=deaths, cleared_at=cleared_at)


def of(commands: list[Any], kind: type) -> list[Any]:
    return [one for one in commands if isinstance(one, kind)]


def move(core: GatewayCore, attempt: int, holder: str, route: Route, now: float) -> list[Any]:
    """A tokenizer has named a group, and the holder lets go of the attempt: what is done then."""
    ref = AttemptRef("r", attempt)
    assert core.handle(MoveChosen("r", attempt, holder, route), now) == [SendCancel(holder, [ref])]
    return core.handle(CancelAcknowledged(holder, [ref]), now)


def mesh(
    numerics: dict[str, str] = EQUAL, stand_ins: frozenset[str] = frozenset(), config: GatewayConfig = CONFIG
) -> GatewayCore:
    core = GatewayCore("g0", config)
    core.handle(DetokenizersChanged(["t0"]), 0.0)
    bits = {name: Bits("w", one) for name, one in numerics.items()}
    core.handle(SchedulersChanged(dict.fromkeys(numerics, 1), stand_ins, bits), 0.0)
    return core


@pytest.fixture
def running() -> GatewayCore:
    return with_output(mesh())


def with_output(core: GatewayCore) -> GatewayCore:
    """A request with two output tokens, at `d0`."""
    core.handle(opened(), 0.0)
    core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 0.0)
    core.handle(text(0, 0, "d0", 2), 0.5)
    return core


def test_a_move_is_a_new_attempt_that_has_not_failed(running: GatewayCore) -> None:
    (asked,) = running.handle(GroupAway("d0", 0.3), 100.0)
    assert (asked.holder, asked.returns_in_s, asked.message.token_ids) == ("d0", pytest.approx(0.3), [1, 2, 3, 0, 1])
    assert (asked.message.weights, asked.message.numerics) == ("w", "bits")
    (submit,) = move(running, 0, "d0", THERE, 100.01)
    message = submit.message
    assert (submit.scheduler, message.attempt, message.output_ids, message.deaths) == ("d1", 1, [0, 1], 0)
    assert running.handle(SubmitAccepted([AttemptRef("r", 1)], "d1", 1), 100.02) != []
    assert (running.moves.num_moves, running.num_retries) == (1, 0)
    state = running.requests["r"]
    assert (state.num_failures, state.num_tries) == (0, 0)
    sample = state.so_far()
    assert [(one.scheduler, one.failure) for one in sample.attempts] == [("d0", "moved"), ("d1", "")]


def test_late_output_of_the_attempt_before_the_move_is_refused(running: GatewayCore) -> None:
    running.handle(GroupAway("d0", 0.3), 100.0)
    assert move(running, 0, "d0", THERE, 100.01)
    assert of(running.handle(text(2, 0, "d0"), 100.02), SendCancel), "and is cancelled once more"
    assert (running.num_refused, running.requests["r"].output_ids) == (1, [0, 1])


def test_all_requests_of_the_group_are_asked_for_and_no_others() -> None:
    core = mesh()
    for request_id in ("a", "b"):
        core.handle(opened(request_id), 0.0)
    core.handle(opened("other", "d1"), 0.0)
    core.handle(SubmitAccepted([AttemptRef("a", 0)], "d0", 1), 0.0)
    commands = core.handle(GroupAway("d0", 0.3), 1.0)
    assert [one.message.request_id for one in commands] == ["a", "b"], "that of the queue, and the one not answered yet"


def test_a_request_that_comes_too_late_to_know_is_asked_for_when_it_is_taken() -> None:
    core = mesh()
    assert core.handle(GroupAway("d0", 0.3), 1.0) == []
    core.handle(opened(), 1.1)
    (asked,) = of(core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 1.15), AskMove)
    assert asked.returns_in_s == pytest.approx(0.15)
    core.handle(opened("late"), 1.4)
    assert not of(core.handle(SubmitAccepted([AttemptRef("late", 0)], "d0", 1), 1.4), AskMove), (
        "the worker should be back"
    )


@pytest.mark.parametrize(
    ("numerics", "stand_ins"),
    [({"d0": "bits"}, []), ({"d0": "bits", "d1": "other"}, []), ({"d0": "", "d1": ""}, []), (EQUAL, ["d1", "d2"])],
)
def test_without_an_equal_group_nobody_is_asked(numerics: dict[str, str], stand_ins: list[str]) -> None:
    core = mesh(numerics, frozenset(stand_ins))
    core.handle(opened(), 0.0)
    assert core.handle(GroupAway("d0", 5.0), 1.0) == []
    if stand_ins:
        core.handle(opened("v", kind=VECTOR_KINDS[0]), 0.0)
        assert len(core.handle(GroupAway("d0", 5.0), 1.0)) == 1, "a prefill group makes vectors as well"


@pytest.mark.parametrize("returns_in_s", [math.nan, -1.0, 0.0, -math.inf])
def test_of_a_time_that_is_none_nothing_follows(running: GatewayCore, returns_in_s: float) -> None:
    assert running.handle(GroupAway("d0", returns_in_s, [suspected()]), 1.0) == []
    assert running.handle(MoveChosen("r", 0, "d0", THERE), 1.0) == []
    assert running.requests["r"].deaths == 1, "who is suspected is true all the same"


@pytest.mark.parametrize("returns_in_s", [1e300, math.inf])
def test_the_longest_time_is_an_hour(running: GatewayCore, returns_in_s: float) -> None:
    (asked,) = running.handle(GroupAway("d0", returns_in_s), 1.0)
    assert asked.returns_in_s == MAX_AWAY_S


@pytest.mark.parametrize(
    "answer",
    [
        MoveChosen("r", 1, "d0", THERE),
        MoveChosen("r", 0, "d1", THERE),
        MoveChosen("r", 0, "d0", Route(decode="d0")),
        MoveChosen("x", 0, "d0", THERE),
    ],
)
def test_an_answer_about_something_else_moves_nothing(running: GatewayCore, answer: MoveChosen) -> None:
    running.handle(GroupAway("d0", 0.3), 1.0)
    assert running.handle(answer, 1.1) == []


def test_an_answer_that_comes_after_the_worker_should_be_back_moves_nothing(running: GatewayCore) -> None:
    running.handle(GroupAway("d0", 0.3), 1.0)
    assert running.handle(MoveChosen("r", 0, "d0", THERE), 1.31) == []


def test_who_may_have_killed_the_worker_moves_once_and_its_deaths_go_with_it(running: GatewayCore) -> None:
    running.handle(GroupAway("d0", 0.3, [suspected()]), 1.0)
    (submit,) = move(running, 0, "d0", THERE, 1.01)
    assert (submit.message.deaths, submit.message.cleared_at) == (1, 4)
    running.handle(SubmitAccepted([AttemptRef("r", 1)], "d1", 1), 1.02)
    assert running.handle(GroupAway("d1", 0.3, [suspected(2, 4, attempt=1)]), 1.1) == []
    # Its next attempt, whatever leads to it, says what is known of it.
    assert running.requests["r"].submit("g0").deaths == 2


def test_who_gets_past_the_steps_that_it_died_in_is_cleared(running: GatewayCore) -> None:
    running.handle(GroupAway("d0", 0.3, [suspected()]), 1.0)
    move(running, 0, "d0", THERE, 1.01)
    running.handle(text(2, 1, "d1"), 1.1)
    assert running.requests["r"].deaths == 1, "the step after it may be the one"
    assert running.handle(GroupAway("d1", 0.3), 1.2) == []
    running.handle(text(3, 1, "d1"), 1.3)
    state = running.requests["r"]
    assert (state.deaths, state.num_moves, len(state.output_ids)) == (0, 0, 4)
    assert len(running.handle(GroupAway("d1", 0.3), 1.4)) == 1


def test_it_goes_when_the_holder_has_let_go_and_with_every_death_until_then(running: GatewayCore) -> None:
    """The worker was back already, computed it once more, and died again."""
    running.handle(GroupAway("d0", 5.0, [suspected()]), 1.0)
    ref = AttemptRef("r", 0)
    assert running.handle(MoveChosen("r", 0, "d0", THERE), 1.1) == [SendCancel("d0", [ref])]
    assert running.handle(MoveChosen("r", 0, "d0", THERE), 1.2) == [], "it is on its way"
    running.handle(CancelAcknowledged("d0", []), 1.3)
    running.handle(CancelFailed("d0", lost=False), 1.3)
    assert running.handle(Tick(), 1.7) == []
    assert running.handle(GroupAway("d0", 0.0, [suspected(2)]), 1.75) == []
    assert running.handle(Tick(), 1.81) == [SendCancel("d0", [ref])]
    (submit,) = running.handle(CancelAcknowledged("d0", [ref]), 1.9)
    assert (submit.scheduler, submit.message.attempt, submit.message.deaths) == ("d1", 1, 2)


def test_output_that_was_under_way_when_it_was_to_move_goes_with_it(running: GatewayCore) -> None:
    running.handle(GroupAway("d0", 5.0, [suspected()]), 1.0)
    running.handle(MoveChosen("r", 0, "d0", THERE), 1.1)
    running.handle(text(2, 0, "d0", 2), 1.2)
    (submit,) = running.handle(CancelAcknowledged("d0", [AttemptRef("r", 0)]), 1.3)
    assert (submit.message.output_ids, submit.message.deaths) == ([0, 1, 2, 3], 0), "it has got past the step"


def test_who_is_to_move_as_its_holder_is_lost_goes_on_like_any_other() -> None:
    running = with_output(mesh(config=GatewayConfig(model_name="m", context_length=100)))
    running.handle(GroupAway("d0", 5.0), 1.0)
    running.handle(MoveChosen("r", 0, "d0", THERE), 1.1)
    assert of(running.handle(PeerLost("d0", 1), 1.2), AskAlive)
    assert running.handle(CancelAcknowledged("d0", [AttemptRef("r", 0)]), 1.3) == [], "of another attempt by now"
    assert running.requests["r"].attempt == 1


def test_a_holder_that_never_lets_go_is_asked_for_output_in_the_end(running: GatewayCore) -> None:
    running.handle(GroupAway("d0", 5.0), 1.0)
    running.handle(MoveChosen("r", 0, "d0", THERE), 1.1)
    assert not of(running.handle(Tick(), CONFIG.recovery_timeout_s), SendResend)
    assert of(running.handle(Tick(), 1.1 + CONFIG.recovery_timeout_s), SendResend)


def test_who_is_to_move_is_asked_for_no_more() -> None:
    """Nor is its holder asked for output, whether or not it has said before that it took the request."""
    core = mesh()
    core.handle(opened(), 0.0)
    core.handle(GroupAway("d0", 60.0), 1.0)
    core.handle(MoveChosen("r", 0, "d0", THERE), 1.1)
    assert not of(core.handle(SubmitAccepted([AttemptRef("r", 0)], "d0", 1), 1.2), AskMove)
    assert core.handle(GroupAway("d0", 60.0), 1.3) == []
    assert core.handle(MoveChosen("r", 0, "d0", THERE), 1.4) == []
    assert not of(core.handle(Tick(), 1.1 + CONFIG.recovery_timeout_s - 0.1), SendResend)


def test_nobody_is_moved_without_end(running: GatewayCore) -> None:
    places = ["d0", "d1"]
    for attempt in range(MAX_MOVES):
        assert len(running.handle(GroupAway(places[attempt % 2], 0.3), 1.0)) == 1
        route = Route(decode=places[(attempt + 1) % 2], detokenizer="t0")
        assert of(move(running, attempt, places[attempt % 2], route, 1.0), SendSubmit)
    assert running.handle(GroupAway(places[MAX_MOVES % 2], 0.3), 1.0) == []


def test_a_group_that_refuses_what_moves_to_it_ends_nothing(running: GatewayCore) -> None:
    late = 10 * CONFIG.recovery_timeout_s
    running.handle(GroupAway("d0", 0.3), late)
    move(running, 0, "d0", THERE, late)
    commands = running.handle(SubmitFailed("r", 1, Failure("overloaded", "full")), late + 0.01)
    assert of(commands, AskRoute)[0].message.excluded == ["d1"]
    assert not of(commands, End)


BLOWS = st.lists(
    st.tuples(
        st.sampled_from(["away", "move", "let go", "accept", "text", "fail", "refuse", "wait"]),
        st.integers(0, 2),
        st.sampled_from([0.3, 5.0, math.nan, -1.0, math.inf, 0.0]),
        st.booleans(),
    ),
    max_size=40,
)


@given(BLOWS)
def test_whatever_dies_a_request_has_one_place_and_what_counts_is_what_failed(
    blows: list[tuple[str, int, float, bool]],
) -> None:
    """Against a model that only knows which attempts are held: each other one was cancelled, none counted as failed."""
    core, now, num_failed = mesh(), 0.0, 0
    core.handle(opened(), now)
    held = {("d0", 0)}
    for what, number, value, flag in blows:
        state = core.requests.get("r")
        if state is None:
            break
        before, place = state.attempt, state.scheduler
        commands: list[Any] = []
        if what == "away":
            suspects = [suspected(1, len(state.output_ids) + 1, state.attempt)] if flag else []
            commands = core.handle(GroupAway(f"d{number}", value, suspects), now)
            assert all(one.holder == place == f"d{number}" for one in commands)
            assert not (commands and state.deaths and state.num_moves), "a suspect has moved once"
        elif what == "move":
            commands = core.handle(MoveChosen("r", state.attempt, place, Route(decode=f"d{number}")), now)
            assert not of(commands, SendSubmit), "its holder has not let go of it"
        elif what == "let go":
            commands = core.handle(CancelAcknowledged(place, [AttemptRef("r", state.attempt)]), now)
            assert state.attempt - before == len(of(commands, SendSubmit))
            held -= {(place, before)} if of(commands, SendSubmit) else set()
        elif what == "accept":
            commands = core.handle(SubmitAccepted([AttemptRef("r", state.attempt)], place, 1), now)
        elif what == "text" and len(state.output_ids) < 19:
            commands = core.handle(text(len(state.output_ids), state.attempt, place), now)
        elif what == "refuse" and flag:
            commands = core.handle(SubmitFailed("r", state.attempt, Failure("overloaded", "full")), now)
        elif what == "fail" and flag:
            num_failed += 1
            failed = AttemptFailed(request_id="r", attempt=state.attempt, code="bad_step")
            commands = core.handle(failed, now)
        else:
            now += abs(value) if math.isfinite(value) else 0.01
        held |= {(one.scheduler, one.message.attempt) for one in of(commands, SendSubmit)}
        for cancel in of(commands, SendCancel):
            held -= {(cancel.scheduler, number) for number in range(cancel.attempts[0].attempt + 1)}
        if of(commands, AskRoute):
            held.discard((place, before))
        assert bool(of(commands, End)) <= (num_failed > 0), "nothing but what failed ends a request"
        if (state := core.requests.get("r")) is not None:
            assert held <= {(state.scheduler, state.attempt)}, "what it left was cancelled"
