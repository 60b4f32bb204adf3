"""A core gets its events one after the other, whatever performing brings about; one that raises ends its actor."""

import enum
import io
import json
import sys
from array import array
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from mesh.address import Address
from mesh.runtime.driver import CoreDriver
from mesh.runtime.recording import LOOK_EVERY, EventRecorder, Opaque, Reader, Recorded, Writer
from mesh.runtime.telemetry import Metrics, setup_log
from mesh.runtime.timers import SHORTEST_S, DeadlineTimer
from mesh.testing.replay import read_failure, replay
from mesh.wire.message import HotPart

HERE = sys.modules[__name__]


class Owner:
    """An actor, as far as a driver goes: its own context."""

    def __init__(self):
        self.ctx: Any = self
        self.metrics = Metrics()
        self.ended = []
        self.at = 0.0

    @property
    def log(self):
        return structlog.get_logger(actor="me", epoch=1)

    def now(self):
        self.at += 1.0
        return self.at

    def end(self, reason, why=None):
        self.ended.append(reason)
        self.over = why


def driver_of(handle, perform, **options):
    owner = Owner()
    return CoreDriver(owner, "test", lambda event, _: handle(event), perform, **options), owner


class Countdown:
    """A core: each event asks for `width` commands, each of which feeds a smaller event; keeps who is inside."""

    def __init__(self, width):
        self.width = width
        self.handled = []
        self.performed = []
        self.turns = []
        self.driver, _ = driver_of(self.handle, self.perform)

    def handle(self, event):
        self.handled.append(event)
        return [event] * (self.width if event else 0)

    def perform(self, command):
        assert self.handled[-1] == command, "all commands of an event come before the next event"
        self.performed.append(command)
        self.turns.append(self.driver.feed(command - 1))


@given(first=st.integers(0, 6), width=st.integers(0, 3))
def test_events_come_in_order_and_are_never_recursed_into(first, width):
    core = Countdown(width)
    assert core.driver.feed(first) is True
    assert core.handled == [first - depth for depth in range(first + 1) for _ in range(width**depth)]
    assert not any(core.turns)


def test_a_chain_of_events_is_no_deeper_than_one():
    core = Countdown(1)
    core.driver.feed(20_000)
    assert core.handled[-1] == 0


class Colour(enum.IntEnum):
    RED = 1


class Piece(HotPart, frozen=True):
    name: str
    ids: list[int]


class Came(NamedTuple):
    """An event with everything in it that events have."""

    number: int
    sender: Address = Address("a", 3)
    piece: Piece | None = None
    values: Any = None


class Large(NamedTuple):
    """An event of another kind."""

    number: int
    values: list[int]


class Adder:
    """A core that cannot count to three, and remembers who told it."""

    def __init__(self):
        self.numbers = []

    def handle(self, event, now):
        self.numbers.append((now, event.number, event.values))
        if sum(number for _, number, _ in self.numbers) == 3:
            raise ZeroDivisionError("three is too much")
        return []


@pytest.fixture
def log():
    stream = io.StringIO()
    setup_log(stream=stream)
    return stream


@pytest.mark.parametrize("where", ["handle", "perform"])
def test_a_core_that_raises_ends_its_actor_and_handles_nothing_more(log, where):
    seen = []

    def handle(event):
        seen.append(event)
        if where == "handle":
            raise ZeroDivisionError("a bug")
        return [event, "lost"]

    def perform(command):
        driver.feed("left")
        raise ZeroDivisionError("a bug")

    driver, owner = driver_of(handle, perform)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        driver.feed("fails")
    assert owner.ended == ["its core test failed: ZeroDivisionError: a bug"]
    assert (owner.over.code, owner.over.core) == ("core_failed", "test")
    assert "a bug" not in owner.over.message, "peers read it"
    assert owner.metrics.value("mesh_core_failures_total", core="test") == 1
    assert driver.feed("next") is False
    assert seen == ["fails"]
    said = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [one["event"] for one in said] == ["core failed", "core event"]


def test_a_core_whose_owner_may_not_end_goes_on_and_writes_its_events_once(log):
    handled = []

    def handle(event):
        handled.append(event)
        if event == "bad":
            raise ZeroDivisionError("a bug")
        return [event]

    performed = []
    driver, owner = driver_of(handle, performed.append, ends_owner=False)
    for event in ("bad", "good", "bad", "good"):
        assert driver.feed(event) is True
    assert (handled, performed, owner.ended) == (["bad", "good", "bad", "good"], ["good", "good"], [])
    assert owner.metrics.value("mesh_core_failures_total", core="test") == 2
    said = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [one["event"] for one in said] == ["core goes on", "core failed", "core event", "core goes on"]
    assert all("a bug" in one["exception"] for one in said if one["event"] == "core goes on")


def test_an_event_of_which_nothing_was_taken_is_refused_and_the_core_goes_on():
    def handle(event):
        if event == "bad":
            raise KeyError(event)
        return [event]

    performed = []
    driver, owner = driver_of(handle, performed.append, refusals=(KeyError,))
    with pytest.raises(KeyError):
        driver.feed("bad")
    assert driver.feed("good")
    assert (performed, owner.ended) == (["good"], [])


def test_an_event_that_waited_and_is_refused_holds_up_none_behind_it(log):
    handled = []

    def handle(event):
        handled.append(event)
        if event == "bad":
            raise KeyError(event)
        return [event]

    def perform(command):
        if command == "first":
            for event in ("bad", "good"):
                assert driver.feed(event) is False

    driver, owner = driver_of(handle, perform, refusals=(KeyError,))
    assert driver.feed("first") is True
    assert (handled, owner.ended) == (["first", "bad", "good"], [])
    assert [json.loads(line)["event"] for line in log.getvalue().splitlines()] == ["event refused"]


def test_what_performing_raises_is_no_refusal(log):
    def perform(command):
        driver.feed("left")
        raise KeyError(command)

    driver, owner = driver_of(lambda event: [event], perform, refusals=(KeyError,))
    with pytest.raises(KeyError):
        driver.feed("first")
    assert owner.ended == ["its core test failed: KeyError: 'first'"]
    assert driver.feed("next") is False


def test_a_failure_is_run_again_from_the_log(log):
    core = Adder()
    driver = CoreDriver(Owner(), "adder", core.handle, print, setup={"start": 0, "address": Address("me", 4)})
    call = object()
    driver.feed(Came(1, values=(call, b"secret", {2: {"x"}}, float("inf"))))
    driver.feed(Came(1, piece=Piece("p", [1, 2]), values=[Colour.RED, array("i", [3]), call, None]))
    with pytest.raises(ZeroDivisionError):
        driver.feed(Came(1))
    assert "secret" not in log.getvalue()
    failure = read_failure(log.getvalue().splitlines(), "adder")
    assert (failure.actor, failure.error, failure.num_left_out) == ("me", "ZeroDivisionError: three is too much", 0)
    reader = Reader([HERE])
    assert reader.read(failure.setup["address"]) == Address("me", 4)
    again = Adder()
    with pytest.raises(ZeroDivisionError, match="three is too much"):
        replay(again.handle, failure, reader)
    (first, second, third) = again.numbers
    assert [one[:2] for one in (first, second, third)] == [one[:2] for one in core.numbers]
    made, zeros, table, far = first[2]
    assert (type(made), zeros, table, far) == (Opaque, bytes(6), {2: {"x"}}, float("inf"))
    assert second[2] == [Colour.RED, array("i", [3]), made, None]
    with pytest.raises(ValueError, match="in none of the modules"):
        Reader([]).read(failure.events[0][1])
    with pytest.raises(ValueError, match="no failure"):
        read_failure(log.getvalue().splitlines(), "another")


def test_what_is_kept_is_bounded():
    recorder = EventRecorder(max_events=3, max_bytes=10_000)
    for number in range(5):
        recorder.add(float(number), Came(number))
    assert [one.event.number for one in recorder.events()] == [2, 3, 4]
    recorder.add(5.0, Large(5, [1] * 2000))
    assert [one.event.number for one in recorder.events()] == [5], "the newest stays, whatever its size"
    assert recorder.num_seen == 6


def test_events_that_are_large_are_found_to_be_soon():
    recorder = EventRecorder(max_bytes=1_000_000)
    for number in range(100):
        recorder.add(float(number), Large(number, []))
    for number in range(200):
        recorder.add(float(number), Large(number, [1] * 20_000))
    held = sum(8 * len(one.event.values) for one in recorder.events())
    assert held < 1_000_000 + LOOK_EVERY * 160_000


def test_what_is_written_is_bounded():
    events = [Recorded(float(number), Came(number)) for number in range(100)]
    written = Writer().write_newest(events, max_bytes=2000)
    assert 3 < len(written) < 30
    assert written[-1] == {"at": 99.0, "data": Writer().write(Came(99))}
    assert len(json.dumps(written)) < 2500


class HandTurned:
    """A context whose timers are rung by hand."""

    def __init__(self) -> None:
        self.at = 10.0
        self.timers: list[tuple[float, Any, Mock]] = []

    def now(self) -> float:
        return self.at

    def later(self, delay_s: float, callback: Any) -> Mock:
        handle = Mock()
        self.timers.append((delay_s, callback, handle))
        return handle


def test_a_core_s_timer_rings_for_the_earliest_deadline_and_is_never_put_off() -> None:
    ctx, deadlines, rung = HandTurned(), [None], []
    timer = DeadlineTimer(lambda: cast("Any", ctx), lambda: deadlines[0], rung.append)
    timer.arm()
    assert ctx.timers == []
    deadlines[0] = 12.0
    timer.arm()
    deadlines[0] = 13.0
    timer.arm()
    assert [delay_s for delay_s, _, _ in ctx.timers] == [2.0], "early is harmless"
    deadlines[0] = 9.0
    timer.arm()
    (_, _, first), (delay_s, ring, second) = ctx.timers
    first.cancel.assert_called_once_with()
    assert delay_s == 0.0
    ring()
    assert rung == [10.0]
    deadlines[0] = 10.001
    timer.arm()
    assert ctx.timers[2][0] == pytest.approx(SHORTEST_S), "those of the next moment are worked through together"
    timer.cancel()
    deadlines[0] = 20.0
    timer.arm()
    assert ctx.timers[3][0] == 10.0
    timer.cancel()
    timer.cancel()
    ctx.timers[3][2].cancel.assert_called_once_with()
    second.cancel.assert_not_called()
