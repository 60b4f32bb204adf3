"""What a death costs an actor, and how long it then waits."""

import pytest

from mesh.supervision.events import Beat, Exited, Policy, Spawned, SpawnFailed, Tick
from tests.mesh.supervision.supervised_meshes import TWINS, ready_mesh


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


def test_what_dies_before_silence_would_show_has_not_served_well_however_quick_its_start():
    assert crash_loop(ready_mesh(*TWINS), 3, serves_s=1.4)[0] == [0.0, 0.25, 0.5]


def test_the_last_whose_start_fails_waits_a_second_at_most():
    core = ready_mesh(policy=Policy(budget=100))
    waits, now = [dies(core, 0.0)], 0.0
    for epoch in range(2, 7):
        now = core.deadline()
        core.handle(Tick(), now)
        core.handle(SpawnFailed("a", epoch, "no memory"), now)
        waits.append(core.deadline() - now)
    assert waits == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]
