"""The supervisor core by event lists.

What deaths cost is in test_restarts.py, what any order of events keeps in test_machine.py.
"""

import pytest

from mesh.supervision.core import Supervisor
from mesh.supervision.events import (
    AwaitOthers,
    Beat,
    Begin,
    Died,
    Exited,
    Kill,
    MeshReady,
    MeshStopped,
    OthersDone,
    Policy,
    Report,
    Restart,
    Served,
    Spawn,
    Spawned,
    SpawnFailed,
    StartOverdue,
    Stop,
    Supervised,
    Terminate,
    Tick,
)
from tests.mesh.supervision.supervised_meshes import TWINS, comes, done, ready_mesh, states


@pytest.fixture
def core():
    return ready_mesh()


def test_start_goes_through_hello_to_ready():
    core = Supervisor([Supervised("a"), Supervised("b")], Policy(), {"a": 6})
    assert done(core.handle(Begin(), 0.0)) == [Spawn("a", 7), Spawn("b", 1)]
    assert core.deadline() is None
    assert core.handle(Spawned("a", 7), 1.0) == [Report("a", 7, "starting")]
    assert core.deadline() == 61.0
    assert core.handle(Spawned("a", 7), 1.0) == []
    assert core.handle(Beat("a", 7, ready=False), 2.0) == []
    assert core.handle(Beat("a", 7, ready=True), 3.0) == [Report("a", 7, "ready")]
    core.handle(Spawned("b", 1), 3.0)
    assert done(core.handle(Beat("b", 1, ready=True), 3.5)) == [MeshReady()]
    assert done(core.handle(Beat("b", 1, ready=True), 3.6)) == []


def test_word_of_another_incarnation_or_actor_changes_nothing(core):
    for event in (
        Exited("a", 0, "late"),
        Exited("a", 2, "early"),
        Exited("x", 1, "who"),
        Beat("a", 0, ready=True),
        Spawned("a", 2),
    ):
        assert core.handle(event, 1.0) == []
    assert states(core) == {"a": "ready"}


def test_death_is_told_and_the_next_epoch_starts_at_once(core):
    assert core.handle(Exited("a", 1, "signal 9"), 20.0) == [
        Died("a", 1, "signal 9"),
        Report("a", 1, "backoff", "signal 9", 0.0),
    ]
    assert core.deadline() == 20.0
    assert done(core.handle(Tick(), 20.0)) == [Spawn("a", 2)]
    core.handle(Spawned("a", 2), 20.1)
    assert done(core.handle(Beat("a", 2, ready=True), 20.2)) == []
    assert core.watches["a"].num_restarts == 1


def test_what_happened_last_and_when_is_remembered_over_the_restart(core):
    watch = core.watches["a"]
    assert (watch.num_starts, watch.reason, watch.next_start_at) == (1, "", None)
    for now in (0.5, 1.0, 1.5):
        core.handle(Tick(), now)
    assert (watch.reason, watch.reason_at) == ("no heartbeat for 1.5 s", 1.5)
    core.handle(Exited("a", 1, "signal 11"), 2.0)
    assert (watch.reason, watch.reason_at, watch.next_start_at) == ("signal 11", 2.0, 2.0)
    core.handle(Tick(), 2.0)
    comes(core, "a", 3.0)
    assert (watch.num_starts, watch.reason, watch.reason_at, watch.next_start_at) == (2, "signal 11", 2.0, None)


def test_spent_budget_is_given_up_loudly_and_the_rest_goes_on():
    core = ready_mesh(*TWINS, policy=Policy(budget=2))
    for epoch in (1, 2):
        core.handle(Exited("a", epoch, "crash"), 1.0)
        core.handle(Tick(), 2.0)
        core.handle(Spawned("a", epoch + 1), 2.0)
    commands = core.handle(Exited("a", 3, "crash"), 3.0)
    assert commands[-1] == Report("a", 3, "given_up", "2 restarts in 60.0 s; crash", 60.0)
    assert states(core) == {"a": "given_up", "b": "ready"}
    assert not core.stopping
    commands = core.handle(Stop("enough"), 4.0)
    assert done(commands) == [Terminate("b", 30.0)]
    assert core.watches["a"].deadline is None


@pytest.mark.parametrize(("specs", "wait_s"), [(TWINS, 60.0), ((Supervised("a"),), 10.0)])
def test_who_was_given_up_is_tried_again_after_the_window_and_the_last_of_its_kind_sooner(specs, wait_s):
    core = ready_mesh(*specs, policy=Policy(budget=1))
    core.handle(Exited("a", 1, "crash"), 1.0)
    core.handle(Tick(), 1.0)
    core.handle(Exited("a", 2, "crash"), 2.0)
    assert (states(core)["a"], core.watches["a"].next_start_at) == ("given_up", 2.0 + wait_s)
    again_at = 2.0 + wait_s
    core.handle(Beat("b", 1, ready=True), again_at - 0.2)
    assert done(core.handle(Tick(), again_at - 0.1)) == []
    assert done(core.handle(Tick(), again_at)) == [Spawn("a", 3)]
    comes(core, "a", again_at + 0.5)
    assert states(core)["a"] == "ready"
    assert core.watches["a"].num_restarts == 2
    # It has a budget again once the window is over.
    core.handle(Exited("a", 3, "crash"), 63.0)
    assert states(core)["a"] == "backoff"


def test_budget_counts_a_window_only():
    core = ready_mesh(policy=Policy(budget=1, budget_window_s=60.0))
    core.handle(Exited("a", 1, "crash"), 1.0)
    core.handle(Tick(), 1.0)
    core.handle(Spawned("a", 2), 1.0)
    core.handle(Exited("a", 2, "crash"), 61.0)
    assert states(core) == {"a": "backoff"}


def test_a_fatal_exit_before_the_mesh_was_ready_stops_everything():
    core = Supervisor([Supervised("a"), Supervised("b")], Policy(), {})
    core.handle(Begin(), 0.0)
    core.handle(Spawned("a", 1), 0.0)
    core.handle(Spawned("b", 1), 0.0)
    commands = core.handle(Exited("a", 1, "no such model", fatal=True), 1.0)
    assert done(commands) == [Died("a", 1, "no such model"), Kill("b")]
    assert done(core.handle(Exited("b", 1, "signal 9"), 1.1))[-1] == MeshStopped("a: no such model")


def test_a_fatal_exit_later_is_an_exit_like_others(core):
    core.handle(Exited("a", 1, "port taken", fatal=True), 1.0)
    assert states(core) == {"a": "backoff"}


def test_first_start_is_tried_a_few_times():
    core = Supervisor([Supervised("a")], Policy(first_start_attempts=2), {})
    core.handle(Begin(), 0.0)
    core.handle(SpawnFailed("a", 1, "zygote died"), 0.0)
    assert done(core.handle(Tick(), 0.1)) == [Spawn("a", 2)]
    assert done(core.handle(SpawnFailed("a", 2, "zygote died"), 0.2)) == [MeshStopped("a: zygote died")]


def test_start_deadline_kills():
    core = Supervisor([Supervised("a", start_timeout_s=5.0)], Policy(), {})
    core.handle(Begin(), 0.0)
    core.handle(Spawned("a", 1), 1.0)
    assert done(core.handle(Tick(), 5.9)) == []
    assert done(core.handle(Tick(), 6.0)) == [Kill("a")]
    assert core.handle(Exited("a", 1, "signal 9"), 6.1)[-1] == Report("a", 1, "backoff", "not ready within 5 s", 0.0)


def test_silence_is_suspected_after_three_heartbeats_then_killed(core):
    for now in (0.5, 1.0):
        assert core.deadline() == now
        assert core.handle(Tick(), now) == []
    assert core.handle(Tick(), 1.5) == [Report("a", 1, "suspected", "no heartbeat for 1.5 s")]
    assert core.handle(Tick(), 2.0) == []
    assert core.deadline() == 2.5
    assert done(core.handle(Tick(), 2.5)) == [Kill("a")]
    assert core.handle(Beat("a", 1, ready=True), 2.6) == []
    assert core.handle(Exited("a", 1, "signal 9"), 2.7) == [
        Died("a", 1, "signal 9", "no_heartbeat"),
        Report("a", 1, "backoff", "no heartbeat for 2.5 s", 0.0),
    ]


def test_suspicion_does_not_wait_for_the_next_tick(core):
    core.handle(Beat("a", 1, ready=True), 0.1)
    for now in (0.5, 1.0, 1.5):
        core.handle(Tick(), now)
    assert core.deadline() == 1.6
    assert core.handle(Tick(), 1.6) == [Report("a", 1, "suspected", "no heartbeat for 1.5 s")]


def test_a_suspect_that_beats_is_ready_again(core):
    for now in (0.5, 1.0, 1.5):
        core.handle(Tick(), now)
    assert core.handle(Beat("a", 1, ready=True), 1.6) == [Report("a", 1, "ready")]
    assert core.handle(Tick(), 2.0) == []
    assert core.watches["a"].ready_since == 0.0


def test_a_detector_that_overslept_accuses_nobody():
    core = ready_mesh(Supervised("a"), Supervised("b"))
    for now in (0.5, 1.0, 1.5):
        core.handle(Beat("b", 1, ready=True), now)
        core.handle(Tick(), now)
    assert states(core) == {"a": "suspected", "b": "ready"}
    assert core.handle(Tick(), 100.0) == []
    assert states(core) == {"a": "suspected", "b": "ready"}
    core.handle(Beat("b", 1, ready=True), 100.5)
    assert core.handle(Tick(), 100.5) == []
    assert done(core.handle(Tick(), 101.0)) == [Kill("a")]


def test_drain_goes_tier_by_tier():
    core = ready_mesh(Supervised("r", 2), Supervised("g", 0), Supervised("s"), Supervised("w"))
    assert done(core.handle(Stop("SIGTERM"), 10.0)) == [Terminate("g", 30.0)]
    assert done(core.handle(Stop("again, softly"), 10.0)) == []
    assert core.deadline() <= 46.0
    assert done(core.handle(Exited("g", 1, "exit 0"), 11.0)) == [
        Died("g", 1, "exit 0"),
        Terminate("s", 29.0),
        Terminate("w", 29.0),
    ], "all tiers together have the time of one drain"
    assert done(core.handle(Exited("w", 1, "exit 0"), 12.0)) == [Died("w", 1, "exit 0")]
    assert done(core.handle(Tick(), 41.0)) == [], "it is telling its clients"
    assert done(core.handle(Tick(), 46.0)) == [Kill("s")]
    assert core.watches["s"].reason == "not ended within 35 s"
    assert done(core.handle(Exited("s", 1, "signal 9"), 47.1)) == [
        Died("s", 1, "signal 9", "not_drained_in_time"),
        Terminate("r", 1.0),
    ]
    assert done(core.handle(Exited("r", 1, "exit 0"), 47.2)) == [Died("r", 1, "exit 0"), MeshStopped("")]
    assert core.handle(Stop("once more"), 48.0) == []
    assert core.deadline() is None


@pytest.fixture
def ending():
    """A host that was told to end, whose shared actor waits for others beside a worker."""
    core = ready_mesh(Supervised("g", 0), Supervised("t", is_shared=True), Supervised("w"), Supervised("r", 2))
    core.handle(Stop("SIGTERM"), 10.0)
    assert done(core.handle(Exited("g", 1, "exit 0"), 12.0))[1:] == [AwaitOthers()]
    assert states(core)["t"] == states(core)["w"] == "ready"
    return core


def test_shared_actors_serve_until_nobody_else_needs_them(ending):
    assert done(ending.handle(Stop("SIGTERM once more"), 13.0)) == [], "they are awaited once"
    assert done(ending.handle(OthersDone(), 14.0)) == [Terminate("t", 26.0), Terminate("w", 26.0)]
    assert done(ending.handle(OthersDone(), 14.1)) == []


def test_shared_actors_wait_for_others_as_long_as_for_a_drain(ending):
    for now in range(13, 40):
        for actor_id in "twr":
            ending.handle(Beat(actor_id, 1, ready=True), float(now))
        assert done(ending.handle(Tick(), float(now))) == []
    assert ending.deadline() <= 40.0
    assert done(ending.handle(Tick(), 40.0)) == [Terminate("t", 1.0), Terminate("w", 1.0)]


def test_shared_actors_wait_for_nobody_by_force_or_if_one_is_drained_alone(ending):
    assert done(ending.handle(Stop("SIGTERM", force=True), 13.0)) == [Kill("t"), Kill("w"), Kill("r")]
    core = ready_mesh(Supervised("t", is_shared=True))
    assert done(core.handle(Restart(("t",)), 1.0)) == [Terminate("t")]


def test_a_stop_before_the_beginning_is_the_end():
    core = Supervisor([Supervised("a")], Policy(), {})
    assert done(core.handle(Stop("before the beginning"), 1.1)) == [MeshStopped("")]


def test_the_second_signal_forces():
    core = ready_mesh(Supervised("g", 0), Supervised("w"))
    core.handle(Stop("SIGINT"), 1.0)
    assert done(core.handle(Stop("SIGINT", force=True), 2.0)) == [Kill("g"), Kill("w")]
    assert done(core.handle(Stop("SIGINT", force=True), 2.1)) == []


@pytest.mark.parametrize("failures", [3, 500])
def test_backoff_of_many_failures_stays_finite(failures):
    core = ready_mesh(policy=Policy(budget=10_000))
    core.watches["a"].restarts.failures = failures
    core.handle(Exited("a", 1, "crash"), 1.0)
    assert core.deadline() <= 11.0


def ended(core, actor_id, now, reason="exit 0"):
    return done(core.handle(Exited(actor_id, core.watches[actor_id].epoch, reason), now))


def test_actors_are_restarted_one_after_the_other_and_it_costs_no_budget():
    core = ready_mesh(Supervised("a"), Supervised("b"), policy=Policy(budget=1))
    for _ in range(3):
        epoch = core.watches["a"].epoch
        assert done(core.handle(Restart(("a", "b")), 1.0)) == [Terminate("a")]
        assert ended(core, "a", 2.0) == [Died("a", epoch, "exit 0"), Spawn("a", epoch + 1)]
        assert comes(core, "a", 3.0) == [Terminate("b")]
        assert ended(core, "b", 4.0) == [Died("b", epoch, "exit 0"), Spawn("b", epoch + 1)]
        assert comes(core, "b", 5.0) == []
    assert {watch.num_restarts for watch in core.watches.values()} == {0}


def test_deaths_and_restarts_that_were_wished_are_counted_apart():
    core = ready_mesh(policy=Policy(drain_timeout_s=5.0))
    watch = core.watches["a"]

    def counts():
        assert watch.num_starts == 1 + watch.num_restarts + watch.num_requested_restarts
        return watch.num_deaths, watch.num_restarts, watch.num_requested_restarts

    core.handle(Restart(("a",)), 1.0)
    assert done(core.handle(Exited("a", 1, "exit 0", cause="exit_0"), 2.0)) == [
        Died("a", 1, "exit 0", "exit_0", is_wished=True),
        Spawn("a", 2),
    ]
    comes(core, "a", 3.0)
    assert counts() == (0, 0, 1)
    core.handle(Exited("a", 2, "signal 9", cause="SIGKILL"), 20.0)
    core.handle(Tick(), 20.0)
    comes(core, "a", 21.0)
    assert counts() == (1, 1, 1)
    core.handle(Restart(("a",)), 30.0)
    core.handle(Exited("a", 3, "signal 11", cause="SIGSEGV"), 31.0)
    comes(core, "a", 32.0)
    assert counts() == (2, 1, 2), "it died while it was asked to end"
    core.handle(Stop("down", force=True), 40.0)
    core.handle(Exited("a", 4, "signal 9", cause="SIGKILL"), 40.1)
    assert counts() == (2, 1, 2)


def test_a_drained_actor_stays_away_until_it_is_asked_for():
    core = ready_mesh(Supervised("a"), Supervised("b"))
    assert done(core.handle(Restart(("a",), stay_away=True), 1.0)) == [Terminate("a")]
    ended(core, "a", 2.0)
    assert states(core)["a"] == "drained"
    core.handle(Tick(), 50.0)
    assert states(core)["a"] == "drained"
    assert done(core.handle(Restart(("b", "a")), 51.0)) == [Spawn("a", 2), Terminate("b")], "b may wait for a"
    core.handle(Restart(("a",), stay_away=True), 52.0)
    assert done(core.handle(Stop("enough"), 53.0)) == []
    assert ended(core, "b", 54.0) == [Died("b", 1, "exit 0")]


@pytest.mark.parametrize("why_away", ["drained", "backoff", "given_up"])
def test_who_was_brought_back_by_request_is_not_said_to_be_away(why_away):
    core = ready_mesh(policy=Policy(budget=int(why_away == "backoff")))
    if why_away == "drained":
        core.handle(Restart(("a",), stay_away=True), 1.0)
    ended(core, "a", 1.2)
    assert states(core) == {"a": why_away}
    assert done(core.handle(Restart(("a",)), 3.0)) == [Spawn("a", 2)]
    comes(core, "a", 4.0)
    assert (core.watches["a"].reason, core.watches["a"].reason_at) == ("restarted, as requested", 3.0)


def test_what_does_not_drain_in_time_is_killed_and_restarted_all_the_same():
    core = ready_mesh(policy=Policy(drain_timeout_s=5.0))
    core.handle(Restart(("a",)), 1.0)
    core.handle(Beat("a", 1, ready=True), 11.0)
    assert done(core.handle(Tick(), 12.0)) == [Kill("a")]
    assert ended(core, "a", 12.1, "signal 9") == [Died("a", 1, "signal 9", "not_drained_in_time"), Spawn("a", 2)]


def test_one_that_cannot_start_ends_the_round():
    core = ready_mesh(Supervised("a"), Supervised("b"), policy=Policy(budget=0))
    core.handle(Restart(("a", "b")), 1.0)
    ended(core, "a", 2.0)
    core.handle(SpawnFailed("a", 2, "no memory"), 3.0)
    assert states(core) == {"a": "given_up", "b": "ready"}
    assert done(core.handle(Restart(("a",)), 4.0)) == [Spawn("a", 3)]
    assert comes(core, "a", 5.0) == []
    assert states(core) == {"a": "ready", "b": "ready"}


def test_a_wish_may_change_while_it_is_fulfilled():
    core = ready_mesh(Supervised("a"), Supervised("b"))
    core.handle(Restart(("a",), stay_away=True), 1.0)
    core.handle(Restart(("a",)), 1.5)
    assert ended(core, "a", 2.0) == [Died("a", 1, "exit 0"), Spawn("a", 2)]
    core.handle(Restart(("a",), stay_away=True), 2.5)
    assert done(core.handle(Spawned("a", 2), 3.0)) == []
    assert comes(core, "a", 4.0) == [Terminate("a")], "what is starting is drained once it is ready"
    ended(core, "a", 5.0)
    assert states(core)["a"] == "drained"


def test_an_actor_is_drained_while_it_starts():
    core = ready_mesh(Supervised("a"), Supervised("b"))
    core.handle(Exited("a", 1, "crash"), 1.0)
    core.handle(Tick(), 1.0)
    core.handle(Spawned("a", 2), 1.1)
    assert done(core.handle(Restart(("a",), stay_away=True), 1.2)) == [Kill("a")], "it holds nothing yet"
    assert ended(core, "a", 1.3, "signal 9") == [Died("a", 2, "signal 9", "not_wanted", is_wished=True)]
    assert states(core) == {"a": "drained", "b": "ready"}


def test_a_start_that_says_how_far_it_is_has_its_time_again_and_one_that_stands_still_has_not():
    core = Supervisor([Supervised("a", start_timeout_s=10.0)], Policy(), {})
    core.handle(Begin(), 0.0)
    core.handle(Spawned("a", 1), 0.0)
    for now in (4.0, 13.0, 22.0):
        core.handle(Beat("a", 1, ready=False, progress=f"loading, {now} GB"), now)
        assert done(core.handle(Tick(), now)) == []
    core.handle(Beat("a", 1, ready=False, progress="loading, 22.0 GB"), 30.0)
    core.handle(Beat("a", 1, ready=False), 31.0)
    assert done(core.handle(Tick(), 31.9)) == []
    assert done(core.handle(Tick(), 32.0)) == [Kill("a")], "neither words heard before nor silence are progress"


def starting(**policy):
    """A mesh of two whose whole start may take 10 s; `a` is ready at once."""
    core = Supervisor([Supervised("a"), Supervised("b")], Policy(start_timeout_s=10.0, **policy), {})
    core.handle(Begin(), 0.0)
    for actor_id in "ab":
        core.handle(Spawned(actor_id, 1), 0.0)
    core.handle(Beat("a", 1, ready=True), 0.5)
    return core


def beats(core, until, *events, step_s=0.5):
    """Let time pass in which `a` is alive; returns when the start was overdue, and what was said then."""
    now = 0.5
    while now < until:
        now = round(now + step_s, 3)
        core.handle(Beat("a", 1, ready=True), now)
        for event in events:
            core.handle(event(now), now)
        for command in core.handle(Tick(), now):
            if isinstance(command, StartOverdue):
                return now, command
    return None


def test_a_start_that_gets_nowhere_is_over_at_its_time():
    core = starting()
    assert beats(core, 60.0) == (10.0, StartOverdue(("b",)))
    core.handle(Stop("too long", failure="b: no peer"), 10.0)
    core.handle(Exited("b", 1, "signal 9"), 10.1)
    assert MeshStopped("b: no peer") in core.handle(Exited("a", 1, "exit 0", cause="exit_0"), 10.2)


def test_an_actor_that_is_ready_again_and_again_does_not_put_the_end_of_a_start_off():
    core = starting(budget=1000, first_start_attempts=1000)

    def dies(now):
        epoch = core.watches["b"].epoch
        core.handle(Spawned("b", epoch), now)
        return Exited("b", epoch, "exit 1")

    assert beats(core, 60.0, dies) == (10.0, StartOverdue(("b",)))


def test_loading_puts_it_off_as_long_as_it_goes_on():
    core = starting()
    assert beats(core, 30.0, lambda now: Beat("b", 1, ready=False, progress=f"loaded {now} GB")) is None
    assert beats(core, 60.0)[0] <= 40.5


def test_loading_for_the_fourth_time_does_not():
    core = starting(budget=1000, first_start_attempts=3)
    core.watches["b"].num_starts = 4
    assert beats(core, 60.0, lambda now: Beat("b", 1, ready=False, progress=f"loaded {now} GB"))[0] == 10.0


def test_all_actors_may_be_ready_and_the_mesh_not():
    core = starting()
    assert MeshReady() in core.handle(Beat("b", 1, ready=True), 1.0)
    events = [lambda now: Beat("b", 1, ready=True)]
    assert beats(core, 60.0, *events) == (10.0, StartOverdue(()))
    core = starting()
    core.handle(Beat("b", 1, ready=True), 1.0)
    core.handle(Served(), 9.0)
    assert beats(core, 60.0, *events) is None


@pytest.mark.parametrize("end", [Stop("SIGTERM"), Served()])
def test_a_start_that_has_ended_is_not_overdue(end):
    core = starting()
    core.handle(end, 5.0)
    assert beats(core, 30.0) is None
