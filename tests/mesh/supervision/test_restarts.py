"""What a death costs an actor, and how long it then waits."""

import pytest

from mesh.supervision.events import Beat, Died, Exited, Kill, Policy, Spawn, Spawned, SpawnFailed, Supervised, Tick
from tests.mesh.supervision.supervised_meshes import TWINS, done, ready_mesh, states


def dies(core, now, actor_id="a", **how):
    """Its present incarnation ends; how long it then waits."""
    core.handle(Exited(actor_id, core.watches[actor_id].epoch, "crash", **how), now)
    return core.watches[actor_id].next_start_at - now


def crash_loop(core, num, now=0.0, serves_s=0.0, **how):
    """Starts in 0.1 s, is ready for `serves_s`, dies, `num` times; the waits, and the time after the last start."""
    waits = []
    for _ in range(num):
        waits.append(dies(core, now, **how))
        now = core.watches["a"].next_start_at
        core.handle(Tick(), now)
        core.handle(Spawned("a", core.watches["a"].epoch), now)
        core.handle(Beat("a", core.watches["a"].epoch, ready=True), now + 0.1)
        now += 0.1 + serves_s
    return waits, now


def test_backoff_doubles_and_is_bounded():
    waits, _ = crash_loop(ready_mesh(*TWINS, policy=Policy(budget=100)), 10)
    assert waits == pytest.approx([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0])


def test_a_foreign_kill_costs_neither_a_pause_nor_the_budget():
    core = ready_mesh(*TWINS, policy=Policy(budget=2))
    waits, now = crash_loop(core, 100, foreign=True)
    assert waits == [0.0] * 100
    # One that is killed while it starts has not failed either.
    core.handle(Exited("a", 101, "signal 9", foreign=True), now)
    core.handle(Tick(), now)
    core.handle(SpawnFailed("a", 102, "the zygote was killed", foreign=True), now)
    assert (states(core)["a"], core.watches["a"].next_start_at) == ("backoff", now)


def test_a_kill_of_our_own_is_not_foreign():
    core = ready_mesh(*TWINS, policy=Policy(budget=1))
    for now in (0.5, 1.0, 1.5, 2.0):
        core.handle(Beat("b", 1, ready=True), now)
        core.handle(Tick(), now)
    assert done(core.handle(Tick(), 2.5)) == [Kill("a", 1)]
    assert Died("a", 1, "signal 9", "no_heartbeat") in core.handle(
        Exited("a", 1, "signal 9", cause="SIGKILL", foreign=True), 2.6
    )
    assert core.watches["a"].restarts.failures == 1


def test_who_was_ready_for_twice_its_start_has_served_well():
    # Started within 5 s, so 10 s are enough, and less is not.
    for serves_s, waits in ((9.9, [0.0, 0.25, 0.5]), (10.1, [0.0, 0.0, 0.0])):
        core = ready_mesh(*TWINS)
        found, now = [], 0.0
        for epoch in range(1, 4):
            found.append(dies(core, now))
            now = core.watches["a"].next_start_at
            core.handle(Tick(), now)
            core.handle(Spawned("a", epoch + 1), now)
            core.handle(Beat("a", epoch + 1, ready=True), now + 5.0)
            now += 5.0 + serves_s
        assert found == waits, serves_s


def test_what_dies_before_silence_would_show_has_not_served_well_however_quick_its_start():
    assert crash_loop(ready_mesh(*TWINS), 3, serves_s=1.4)[0] == [0.0, 0.25, 0.5]


def test_who_hangs_has_served_until_it_fell_silent():
    core = ready_mesh(*TWINS)
    for now in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        core.handle(Beat("b", 1, ready=True), now)
        core.handle(Tick(), now)
    core.handle(Exited("a", 1, "signal 9"), 3.1)
    assert core.watches["a"].restarts.failures == 1, "it was not ready for the 2.6 s until it was killed"


def test_serving_well_forgives_the_pauses_and_costs_no_budget():
    core = ready_mesh(*TWINS, policy=Policy(budget=4))
    waits, now = crash_loop(core, 4)
    assert waits == pytest.approx([0.0, 0.25, 0.5, 1.0])
    waits, now = crash_loop(core, 40, now + 1.6, serves_s=1.6)
    assert waits == [0.0] * 40
    assert states(core)["a"] == "ready"


def test_the_last_of_its_kind_does_not_wait():
    core = ready_mesh(*TWINS, Supervised("c"), policy=Policy(budget=100))
    core.handle(Exited("b", 1, "crash"), 0.0)
    assert crash_loop(core, 5)[0] == [0.0] * 5
    assert crash_loop(ready_mesh(policy=Policy(budget=100)), 5)[0] == [0.0] * 5, "alone of its kind from the beginning"


def test_the_last_whose_start_fails_waits_a_second_at_most():
    core = ready_mesh(policy=Policy(budget=100))
    waits, now = [dies(core, 0.0)], 0.0
    for epoch in range(2, 7):
        now = core.deadline()
        core.handle(Tick(), now)
        core.handle(SpawnFailed("a", epoch, "no memory"), now)
        waits.append(core.deadline() - now)
    assert waits == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]


def test_who_waits_starts_at_once_when_the_last_ready_one_is_gone():
    core = ready_mesh(*TWINS, policy=Policy(budget=100))
    _, now = crash_loop(core, 8)
    assert dies(core, now) == 10.0
    core.handle(Beat("b", 1, ready=True), now)
    core.handle(Exited("b", 1, "crash"), now + 1.0)
    assert core.watches["a"].next_start_at == now + 1.0
    assert set(done(core.handle(Tick(), now + 1.0))) == {Spawn("a", 10), Spawn("b", 2)}
