"""The supervisor core against a model of processes: any order of events keeps its invariants."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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

POLICY = Policy(budget=4, budget_window_s=20.0, drain_timeout_s=5.0, start_timeout_s=30.0)
SHARED = "w"
SPECS = [Supervised("g", 0), Supervised("s", 1, 5.0, "k"), Supervised(SHARED, 1, 5.0, "k", True), Supervised("r", 2)]
ACTORS = [spec.actor_id for spec in SPECS]
STAND_INS = {"s": "w", "w": "s"}
SILENCE_S = POLICY.missed * POLICY.heartbeat_s
TIERS = {spec.actor_id: spec.drain_tier for spec in SPECS}


class Processes(RuleBasedStateMachine):
    """Performs the core's commands on imaginary processes, and checks each command as it comes."""

    @initialize(epochs=st.dictionaries(st.sampled_from(ACTORS), st.integers(0, 5)), gets_ready=st.booleans())
    def begin(self, epochs, gets_ready):
        self.now = 0.0
        self.core = Supervisor(SPECS, POLICY, epochs)
        self.issued = {actor_id: epochs.get(actor_id, 0) for actor_id in ACTORS}
        self.requested = {}  # spawn asked for, not answered
        self.alive = {}
        self.told_dead = set()
        self.born_at, self.ready_at = {}, {}
        self.charged = {actor_id: [] for actor_id in ACTORS}
        self.failures = dict.fromkeys(ACTORS, 0)
        self.num_ready = self.num_stopped = self.num_overdue = 0
        self.stop_asked = self.awaits_others = False
        self.stopped_at = 0.0
        self.perform(Begin())
        if gets_ready:
            # From here on failures do not end the mesh, so there is time for many of them.
            self.alive, self.requested = self.requested, {}
            for actor_id, epoch in self.alive.items():
                self.perform(Spawned(actor_id, epoch))
            self.all_beat()
            self.perform(Served())

    def perform(self, event):
        wished = {actor_id for actor_id, watch in self.core.watches.items() if watch.comes_back or watch.stays_away}
        # What still waits for its turn is nobody else's business than the core's and this model's.
        wished |= set(self.core._rolling) | set(getattr(event, "actor_ids", ()))
        before = {actor_id: watch.state for actor_id, watch in self.core.watches.items()}
        restarts = {actor_id: watch.num_restarts for actor_id, watch in self.core.watches.items()}
        if not self.core.stopping:
            # It may stop by itself, too.
            self.stopped_at = self.now
        for command in self.core.handle(event, self.now):
            match command:
                case Spawn(actor_id, epoch):
                    assert not self.core.stopping, "restart while draining"
                    assert actor_id not in self.alive, "two live incarnations"
                    assert actor_id not in self.requested, "two live incarnations"
                    assert epoch == self.issued[actor_id] + 1, "epochs out of order"
                    assert before[actor_id] != "drained" or actor_id in wished, "started again although drained"
                    if self.core.watches[actor_id].num_restarts == restarts[actor_id]:
                        # Somebody wanted it, which forgives what was.
                        self.charged[actor_id].clear()
                        self.failures[actor_id] = 0
                    self.issued[actor_id] = epoch
                    self.requested[actor_id] = epoch
                case Kill(actor_id):
                    assert self.alive.get(actor_id) == self.issued[actor_id]
                case Terminate(actor_id):
                    assert self.alive.get(actor_id) == self.issued[actor_id]
                    if not self.core.stopping:
                        assert actor_id in wished
                        continue
                    lower = [other for other in [*self.alive, *self.requested] if TIERS[other] < TIERS[actor_id]]
                    assert not lower, "a later tier drained before an earlier one was gone"
                    left_s = self.stopped_at + POLICY.drain_timeout_s - self.now
                    assert command.within_s == max(left_s, POLICY.late_drain_s)
                    if actor_id == SHARED:
                        assert not self.awaits_others or left_s <= 0.0, "others may need it"
                case AwaitOthers():
                    assert self.core.stopping
                    assert not self.awaits_others, "asked twice"
                    self.awaits_others = True
                case Died(actor_id, epoch):
                    assert actor_id not in self.alive
                    assert (actor_id, epoch) not in self.told_dead
                    self.told_dead.add((actor_id, epoch))
                case MeshReady():
                    self.num_ready += 1
                case StartOverdue(unready):
                    self.num_overdue += 1
                    assert not self.core.stopping
                    assert set(unready) == {a for a, w in self.core.watches.items() if w.state != "ready"}
                case MeshStopped():
                    self.num_stopped += 1
                    assert not self.alive
                    assert not self.requested
                case Report(actor_id, epoch):
                    assert epoch == self.issued[actor_id]
                    self.look_at(command)

    def look_at(self, report):
        actor_id = report.actor_id
        match report.state:
            case "spawning":
                self.ready_at.pop(actor_id, None)
            case "starting":
                self.born_at[actor_id] = self.now
            case "ready":
                self.ready_at.setdefault(actor_id, self.now)

    def ends(self, event, ours=""):
        """An end, and what it may cost: nothing if it is foreign or the actor had served well."""
        actor_id, ready_at = event.actor_id, self.ready_at.get(event.actor_id)
        until = self.core.watches[actor_id].last_beat if ours == "no_heartbeat" else self.now
        start_s = ready_at - self.born_at[actor_id] if ready_at is not None else 0.0
        is_well = ready_at is not None and until - ready_at >= max(2 * start_s, SILENCE_S)
        is_free = is_well or (event.foreign and not ours)
        self.failures[actor_id] = (0 if is_well else self.failures[actor_id]) + (not is_free)
        self.perform(event)
        watch = self.core.watches[actor_id]
        if watch.state in ("backoff", "given_up"):
            assert watch.restarts.failures == self.failures[actor_id]
        if watch.state == "backoff" and not is_free:
            self.charged[actor_id].append(self.now)
        if watch.state in ("backoff", "given_up") and is_free:
            assert watch.state == "backoff", "given up for what costs nothing"
            assert watch.next_start_at == self.now, "waits for what costs nothing"

    @precondition(lambda self: self.requested)
    @rule(data=st.data())
    def spawned(self, data):
        actor_id = data.draw(st.sampled_from(sorted(self.requested)))
        epoch = self.alive[actor_id] = self.requested.pop(actor_id)
        self.perform(Spawned(actor_id, epoch))

    @precondition(lambda self: self.requested)
    @rule(data=st.data(), foreign=st.booleans())
    def spawn_fails(self, data, foreign):
        actor_id = data.draw(st.sampled_from(sorted(self.requested)))
        self.ends(SpawnFailed(actor_id, self.requested.pop(actor_id), "no memory", foreign))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), ready=st.booleans())
    def beats(self, data, ready):
        actor_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.perform(Beat(actor_id, self.alive[actor_id], ready))

    @rule()
    def all_beat(self):
        for actor_id in sorted(self.alive):
            self.perform(Beat(actor_id, self.alive[actor_id], ready=True))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), fatal=st.booleans(), foreign=st.booleans())
    def dies(self, data, fatal, foreign):
        actor_id = data.draw(st.sampled_from(sorted(self.alive)))
        watch = self.core.watches[actor_id]
        ours = watch.killed_for if watch.state == "dying" else ""
        event = Exited(actor_id, self.alive.pop(actor_id), "died", fatal and not foreign, "SIGKILL", foreign)
        self.ends(event, ours)

    @rule(
        actor_id=st.sampled_from(ACTORS),
        times=st.integers(1, 5),
        start_s=st.sampled_from((0.25, 1.0)),
        serves_s=st.sampled_from((None, 0.0, 1.6, 2.0)),
        foreign=st.booleans(),
    )
    def crash_loop(self, actor_id, times, start_s, serves_s, foreign):
        """It dies again and again, while all others are well; the last time it still waits."""
        watch = self.core.watches[actor_id]
        for _ in range(times):
            self.now = max(self.now, watch.next_start_at or 0.0)
            self.all_beat()
            self.perform(Tick())
            if actor_id in self.requested:
                self.alive[actor_id] = self.requested.pop(actor_id)
                self.perform(Spawned(actor_id, self.alive[actor_id]))
            if actor_id not in self.alive or watch.state == "dying":
                return
            if serves_s is not None:
                self.now += start_s
                self.all_beat()
                self.now += serves_s
            self.ends(Exited(actor_id, self.alive.pop(actor_id), "died", cause="SIGSEGV", foreign=foreign))

    @rule(actor_id=st.sampled_from([*ACTORS, "stranger"]), back=st.integers(1, 3))
    def late_word_of_the_past(self, actor_id, back):
        epoch = self.issued.get(actor_id, 9) - back
        before = dict(self.alive)
        self.perform(Exited(actor_id, epoch, "late"))
        self.perform(Beat(actor_id, epoch, ready=True))
        assert self.alive == before

    @rule()
    def time_comes(self):
        deadline = self.core.deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.perform(Tick())

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds):
        self.now += seconds
        self.perform(Tick())

    @precondition(lambda self: self.now > 0)
    @rule(force=st.booleans())
    def stop(self, force):
        self.stop_asked = True
        self.perform(Stop("told to", force))

    @precondition(lambda self: self.awaits_others)
    @rule()
    def others_are_done(self):
        self.awaits_others = False
        self.perform(OthersDone())

    @rule(actor_ids=st.lists(st.sampled_from(ACTORS), min_size=1, max_size=4), stay_away=st.booleans())
    def restart(self, actor_ids, stay_away):
        self.perform(Restart(tuple(actor_ids), stay_away))

    @invariant()
    def one_is_restarted_at_a_time(self):
        watches = self.core.watches.values()
        assert sum(watch.comes_back or watch.stays_away for watch in watches) <= 1
        assert not (self.core._rolling and self.core._restarting is None)
        away = {actor_id for actor_id, watch in self.core.watches.items() if watch.state == "drained"}
        assert not away & (set(self.alive) | set(self.requested))

    @invariant()
    def budget_is_respected(self):
        for times in self.charged.values():
            assert len([at for at in times if at > self.now - POLICY.budget_window_s]) <= POLICY.budget

    @invariant()
    def a_kind_with_nobody_left_does_not_wait(self):
        for actor_id, watch in self.core.watches.items():
            stand_in = self.core.watches.get(STAND_INS.get(actor_id))
            if watch.next_start_at is None or (stand_in is not None and stand_in.state == "ready"):
                continue
            if watch.state == "given_up":
                longest_s = POLICY.max_backoff_s
            else:
                longest_s = 0.0 if actor_id in self.ready_at else POLICY.lone_backoff_s
            assert watch.next_start_at <= self.now + longest_s

    @invariant()
    def ends_are_told_once(self):
        assert self.num_ready <= 1
        assert self.num_stopped <= 1
        assert self.num_overdue <= 1

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.perform(Stop("the end"))
        for _ in range(100):
            if self.core.stopped:
                break
            for actor_id in sorted(self.requested):
                self.alive[actor_id] = self.requested.pop(actor_id)
                self.perform(Spawned(actor_id, self.alive[actor_id]))
            dying = [a for a in sorted(self.alive) if self.core.watches[a].state == "dying"]
            for actor_id in dying:
                self.perform(Exited(actor_id, self.alive.pop(actor_id), "signal 9"))
            deadline = self.core.deadline()
            if not dying and deadline is not None:
                self.now = max(self.now, deadline)
                self.perform(Tick())
        assert self.core.stopped, {a: w.state for a, w in self.core.watches.items()}
        assert self.num_stopped == 1
        assert self.core.deadline() is None


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
