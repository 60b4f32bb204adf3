"""Bugs planted in the supervision core, and that its machine sees each of them.

The simulated meshes of tests/simulation have no supervisor: they play one. So what guards it is the machine.
"""

import random
from typing import Any

import pytest

from mesh.supervision.core import Supervisor, Watch
from mesh.supervision.events import READY, Beat, Exited, Spawned, Tick
from mesh.supervision.restarts import Restarts
from tests.mesh.supervision.test_machine import ACTORS, POLICY, Processes
from tests.simulation.planting import Patches, around, first_caught, nothing


def _as_if(**told: Any) -> Any:
    return lambda ended, self, now, **given: ended(self, now, **given | told)


def _forget_who_killed(on_actor: Any, self: Supervisor, event: Any, watch: Watch, now: float) -> None:
    if isinstance(event, Exited):
        watch.state = READY
    on_actor(self, event, watch, now)


def _start_the_next_at_once(kill: Any, self: Supervisor, watch: Watch, cause: str, reason: str) -> None:
    kill(self, watch, cause, reason)
    if not self.stopping:
        self._spawn(watch)


def _never_spent(ended: Any, self: Restarts, now: float, **given: Any) -> None:
    ended(self, now, **given)
    self.is_spent = False


PLANTED: dict[str, Patches] = {
    "foreign kills cost what crashes cost": [around(Restarts, "ended", _as_if(foreign=False))],
    "every death is taken for a foreign kill": [around(Restarts, "ended", _as_if(foreign=True))],
    "a kill of our own is taken for a foreign one": [around(Supervisor, "_on_actor", _forget_who_killed)],
    "who served well is punished like who did not": [around(Restarts, "ended", _as_if(ready_s=None))],
    "whoever was ready at all has served well": [around(Restarts, "ended", _as_if(start_s=0.0))],
    "the last of its kind waits": [around(Supervisor, "_is_stood_in_for", lambda _, self, watch: True)],
    "who waits is not told that nobody is left": [around(Supervisor, "_start_now", nothing)],
    "the budget is never spent": [around(Restarts, "ended", _never_spent)],
    "the next incarnation starts before the last one is reaped": [around(Supervisor, "_kill", _start_the_next_at_once)],
}


INVARIANTS = (
    Processes.budget_is_respected,
    Processes.a_kind_with_nobody_left_does_not_wait,
    Processes.one_is_restarted_at_a_time,
    Processes.ends_are_told_once,
)
NUM_STEPS, NUM_SEEDS = 30, 60


def hang(machine: Processes, actor_id: str) -> None:
    """It says nothing after its first word, until it is killed and a while longer; all others go on."""
    machine.time_comes()
    if actor_id in machine.requested:
        machine.alive[actor_id] = machine.requested.pop(actor_id)
        machine.perform(Spawned(actor_id, machine.alive[actor_id]))
        machine.all_beat()
    for _ in range(6):
        machine.now += POLICY.heartbeat_s
        for other, epoch in sorted(machine.alive.items()):
            if other != actor_id:
                machine.perform(Beat(other, epoch, ready=True))
        machine.perform(Tick())


def walk(seed: int) -> None:
    """The machine's own rules, drawn without hypothesis: a mesh that has become ready and in which much crashes."""
    draw = random.Random(seed)
    machine = Processes()
    machine.begin(epochs={}, gets_ready=True)
    for _ in range(NUM_STEPS):
        match draw.randrange(8):
            case 0:
                machine.time_passes(draw.choice((0.5, 5.0, 30.0)))
            case 1 | 2:
                machine.time_comes()
            case 3:
                hang(machine, draw.choice(ACTORS))
            case _:
                machine.crash_loop(
                    actor_id=draw.choice(ACTORS),
                    times=draw.randint(1, 5),
                    start_s=draw.choice((0.25, 1.0)),
                    serves_s=draw.choice((None, 0.0, 1.6, 2.0)),
                    foreign=draw.random() < 0.3,
                )
        for actor_id in [one for one in machine.alive if machine.core.watches[one].state == "dying"]:
            event = Exited(actor_id, machine.alive.pop(actor_id), "signal 9", cause="SIGKILL", foreign=True)
            machine.ends(event, machine.core.watches[actor_id].killed_for)
        for holds in INVARIANTS:
            holds(machine)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_of_supervision_is_seen(name: str) -> None:
    assert first_caught(PLANTED[name], walk, most=NUM_SEEDS) is not None, f"nobody noticed that {name}"


def test_where_nothing_is_planted_nothing_is_seen() -> None:
    assert first_caught([], walk, most=NUM_SEEDS) is None
