"""One timer for everything that a core has to do at a time."""

from mesh.runtime.deadlines import Deadlines


def test_keys_come_in_order_and_once() -> None:
    deadlines = Deadlines()
    deadlines.set(("b", ""), 2.0)
    deadlines.set(("a", ""), 1.0)
    assert deadlines.next() == deadlines.at(("a", "")) == 1.0
    assert deadlines.at(("c", "")) is None
    assert deadlines.pop_due(0.5) is None
    assert [deadlines.pop_due(5.0) for _ in range(3)] == [("a", ""), ("b", ""), None]
    assert deadlines.next() is None
    assert len(deadlines) == 0


def test_a_moved_key_is_due_at_its_new_time_only() -> None:
    deadlines = Deadlines()
    deadlines.set(("a", ""), 1.0)
    deadlines.set(("a", ""), 3.0)
    assert deadlines.pop_due(2.0) is None
    deadlines.set_default(("a", ""), 9.0)
    assert deadlines.next() == 3.0
    assert deadlines.clear(("a", "")) is True
    assert deadlines.clear(("a", "")) is False
    assert deadlines.next() is None
    deadlines.set_default(("a", ""), 9.0)
    assert deadlines.next() == 9.0


def test_moving_a_key_for_ever_takes_no_memory() -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.set(("a", ""), float(index))
    # By a private name: what else shows it is memory.
    assert len(deadlines._heap) < 100
    assert deadlines.pop_due(1e9) == ("a", "")
    assert deadlines.pop_due(1e9) is None
