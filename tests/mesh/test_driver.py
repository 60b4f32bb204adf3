"""A core gets its events one after the other, whatever performing brings about."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.driver import CoreDriver


class Countdown:
    """A core: each event asks for `width` commands, each of which feeds a smaller event; keeps who is inside."""

    def __init__(self, width):
        self.width = width
        self.handled = []
        self.performed = []
        self.turns = []
        self.driver = CoreDriver(self.handle, self.perform)

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


def test_after_a_failure_the_rest_is_handled_with_the_next_event():
    seen = []

    def handle(event):
        seen.append(event)
        return [event]

    def perform(command):
        if command == "fails":
            driver.feed("left")
            raise ValueError("a bug")

    driver = CoreDriver(handle, perform)
    with pytest.raises(ValueError, match="a bug"):
        driver.feed("fails")
    assert seen == ["fails"]
    assert driver.feed("next")
    assert seen == ["fails", "left", "next"]
