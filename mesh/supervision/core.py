"""The pure core of a supervisor: decides when actors are started, suspected, killed, restarted, given up and drained.

    state       the process                          leaves it by
    ---------   ----------------------------------   -------------------------------------------------------------
    waiting     none, never was                      Begin: spawning; stopping: stopped
    spawning    requested, not confirmed yet         Spawned: starting; SpawnFailed: backoff, given_up
    starting    alive, not ready yet                 Beat(ready): ready; start deadline: dying; Exited: backoff, …
    ready       serves                               silence: suspected; Exited: backoff, given_up
    suspected   silent for `missed` heartbeats       Beat: ready; silence goes on: dying; Exited: backoff, given_up
    dying       killed, not yet reaped               Exited: backoff, given_up
    backoff     none, waits for its next start       time: spawning
    given_up    none; the restart budget is spent    time: spawning; Restart: spawning; stopping: stopped
    draining    asked to finish and exit             drain deadline: dying; Exited: stopped, drained, spawning
    drained     none, on request                     Restart: spawning; stopping: stopped
    stopped     none, and none will follow           nothing

The start as a whole has a deadline too, until `Served`: actors that fail each in its turn, or are ready in turn, would
otherwise be started for ever. Slow loading puts it off, but only that of an actor's first starts.

An actor whose budget is spent is given up for a while and then tried once more: whatever killed it may be over, with no
operator there to say so. `restarts.py` decides what a death costs and how long the actor waits after it. Actors to be
restarted are drained and started again one at a time; the next one follows when the last is ready. Such a restart
costs no budget and restores what was spent of it.

A stop has `drain_timeout_s` for all tiers together, so that whoever gives it can know when it is over. Actors that are
shared are ready, and serve, until nobody else needs them or that time is over.

Invariants, checked by tests/mesh/supervision/test_machine.py: a new incarnation is spawned only after the previous one
was reaped (or never came to be), and with a higher epoch; restarts never exceed the budget; nothing is restarted while
stopping; actors drain in the order of their tiers. An `Exited` is the only proof of a death: missing heartbeats raise
suspicion, and suspicion only ever leads to a kill. Called by `cli/supervisor/keeper.py`, which performs the commands.
It persists an epoch before it starts the process, so that no epoch is issued twice, even across supervisor restarts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import assert_never

from mesh.supervision.events import (
    BACKOFF,
    DRAIN_OVERDUE,
    DRAINED,
    DRAINING,
    DYING,
    GIVEN_UP,
    IN_ORDER,
    NOT_WANTED,
    READY,
    SILENT,
    SPAWNING,
    START_OVERDUE,
    STARTING,
    STOPPED,
    SUSPECTED,
    WAITING,
    AwaitOthers,
    Beat,
    Begin,
    Command,
    Died,
    Event,
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
from mesh.supervision.restarts import Restarts

_ALIVE = (SPAWNING, STARTING, READY, SUSPECTED, DYING, DRAINING)
_AT_REST = (BACKOFF, GIVEN_UP, DRAINED)


@dataclass
class Watch:
    """What the supervisor knows about one actor; read-only outside this module."""

    spec: Supervised
    restarts: Restarts
    state: str = WAITING
    epoch: int = 0
    # A later epoch than its own that the mesh knew, as its last incarnation was told; 0: none.
    known_epoch: int = 0
    deadline: float | None = None
    last_beat: float = 0.0
    born_at: float = 0.0
    progress: str = ""
    ready_since: float | None = None
    ended_at: float = 0.0
    killed_for: str = ""
    # Of the drain that was asked for last.
    drain_s: float = 0.0
    num_starts: int = 0
    # Ends that nobody had asked for; starts after one, or after a start that failed; and starts because of a `Restart`.
    num_deaths: int = 0
    num_restarts: int = 0
    num_requested_restarts: int = 0
    # The reason for its last suspicion, kill or end, and the time of that.
    reason: str = ""
    reason_at: float = 0.0
    # What follows the drain, unless the whole mesh is stopping.
    comes_back: bool = False
    stays_away: bool = False

    @property
    def next_start_at(self) -> float | None:
        return self.deadline if self.state in (BACKOFF, GIVEN_UP) else None


class Supervisor:
    """Keeps a set of actors alive. New epochs exceed those in `epochs`, by actor id; times are of a monotonic clock."""

    def __init__(self, actors: Iterable[Supervised], policy: Policy, epochs: Mapping[str, int]) -> None:
        self.policy = policy
        self.watches = {
            spec.actor_id: Watch(spec, Restarts(policy), epoch=epochs.get(spec.actor_id, 0)) for spec in actors
        }
        self._kinds: defaultdict[str, list[Watch]] = defaultdict(list)
        for watch in self.watches.values():
            self._kinds[watch.spec.kind or watch.spec.actor_id].append(watch)
        self.was_ready = False
        self.stopping = False
        self.stopped = False
        self._failure = ""
        self._force = False
        self._start_deadline: float | None = None
        self._stop_by = 0.0
        # Until when shared actors wait for others; None: they do not, or not yet.
        self._others_by: float | None = None
        self._are_others_done = False
        self._last_tick: float | None = None
        self._rolling: dict[str, bool] = {}
        self._restarting: Watch | None = None
        self._now = 0.0
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        self._commands = []
        self._now = now
        match event:
            case Begin():
                self._last_tick = now
                self._put_off_start(now)
                for watch in self.watches.values():
                    self._spawn(watch)
            case Tick():
                self._tick(now)
            case Served():
                self._start_deadline = None
            case Stop():
                self._failure = self._failure or event.failure
                self._stop(event.reason, event.force, now)
            case OthersDone():
                self._others_done(now)
            case Restart():
                self._restart(event)
            case Spawned() | SpawnFailed() | Beat() | Exited():
                watch = self.watches.get(event.actor_id)
                # An event about any but the present incarnation changes nothing.
                if watch is not None and watch.epoch == event.epoch and watch.state in _ALIVE:
                    self._on_actor(event, watch, now)
            case _:
                assert_never(event)
        self._roll(now)
        return self._commands

    @property
    def drained(self) -> dict[str, int]:
        """The last epochs of actors that are drained on request, or are ending in order to be."""
        meant = (watch for watch in self.watches.values() if watch.stays_away or watch.state == DRAINED)
        return {watch.spec.actor_id: watch.epoch for watch in meant}

    def deadline(self) -> float | None:
        """The latest time at which `Tick` is due; None if nothing depends on time."""
        watches = self.watches.values()
        deadlines = [at for at in (self._start_deadline, *(watch.deadline for watch in watches)) if at is not None]
        # Suspicion does not wait for the next regular tick; those only show whether this process has slept.
        deadlines += [self._silent_at(watch) for watch in watches if watch.state == READY]
        if self._last_tick is not None and any(watch.state in (READY, SUSPECTED) for watch in watches):
            deadlines.append(self._last_tick + self.policy.heartbeat_s)
        if self._others_by is not None:
            deadlines.append(self._others_by)
        return min(deadlines, default=None)

    def _silent_at(self, watch: Watch) -> float:
        return watch.last_beat + self.policy.missed * self.policy.heartbeat_s

    def _on_actor(self, event: Spawned | SpawnFailed | Beat | Exited, watch: Watch, now: float) -> None:
        match event:
            case Spawned():
                self._spawned(watch, now)
            case SpawnFailed():
                self._ended(watch, event.reason, now, fatal=False, foreign=event.foreign)
            case Beat():
                self._beat(watch, event, now)
            case Exited():
                # If we killed an actor, the cause of its death is the one we killed it for.
                ours = watch.state == DYING
                watch.known_epoch = event.known_epoch
                cause = watch.killed_for if ours else event.cause
                in_order = watch.state == DRAINING and event.cause == IN_ORDER
                is_wished = in_order or cause == NOT_WANTED
                watch.num_deaths += not is_wished
                self._commands.append(Died(event.actor_id, event.epoch, event.reason, cause, is_wished))
                reason = watch.reason if ours else event.reason
                if in_order and not self.stopping:
                    reason = f"{'drained' if watch.stays_away else 'restarted'}, as requested"
                self._ended(watch, reason, now, fatal=event.fatal, foreign=event.foreign and not ours)
            case _:
                assert_never(event)

    def _spawn(self, watch: Watch) -> None:
        # Above any epoch this supervisor has issued, and above the one that made the mesh refuse the last incarnation:
        # one step, where counting up after a lost file, or from a clock a day behind, would take 86,400 refused starts.
        watch.epoch = max(watch.epoch, watch.known_epoch) + 1
        watch.num_starts += 1
        watch.progress = ""
        watch.ready_since = None
        watch.killed_for = ""
        self._commands.append(Spawn(watch.spec.actor_id, watch.epoch))
        self._enter(watch, SPAWNING)

    def _spawned(self, watch: Watch, now: float) -> None:
        if watch.state != SPAWNING:
            return
        watch.born_at = now
        if self.stopping or watch.stays_away:
            # Its spawn was requested earlier; it holds nothing yet that a drain could save.
            self._kill(watch, NOT_WANTED, "stopped while starting")
            return
        watch.deadline = now + watch.spec.start_timeout_s
        self._enter(watch, STARTING)

    def _beat(self, watch: Watch, beat: Beat, now: float) -> None:
        watch.last_beat = now
        if beat.progress != watch.progress:
            watch.progress = beat.progress
            if watch.state == STARTING and beat.progress:
                # Loading a hundred gigabytes of weights takes its time: a start is overdue only when progress stops.
                watch.deadline = now + watch.spec.start_timeout_s
                if self._start_deadline is not None and watch.num_starts <= self.policy.first_start_attempts:
                    self._put_off_start(now)
        if watch.state == SUSPECTED or (watch.state == STARTING and beat.ready):
            watch.deadline = None
            if watch.ready_since is None:
                watch.ready_since = now
            self._enter(watch, READY)
            self._check_ready()

    def _put_off_start(self, now: float) -> None:
        if self.policy.start_timeout_s is not None:
            self._start_deadline = now + self.policy.start_timeout_s

    def _check_ready(self) -> None:
        if not self.was_ready and all(watch.state == READY for watch in self.watches.values()):
            self.was_ready = True
            self._commands.append(MeshReady())

    def _ended(self, watch: Watch, reason: str, now: float, *, fatal: bool, foreign: bool) -> None:
        watch.deadline = None
        watch.reason, watch.reason_at, watch.ended_at = reason, now, now
        if self.stopping:
            self._enter(watch, STOPPED, reason)
            self._next_tier(now)
            return
        if watch.comes_back or watch.stays_away:
            self._drained(watch, comes_back=watch.comes_back)
            return
        account, since = watch.restarts, watch.ready_since
        # An actor killed for silence served until its last heartbeat.
        until = watch.last_beat if watch.killed_for == SILENT else now
        start_s, ready_s = (0.0, None) if since is None else (since - watch.born_at, until - since)
        account.ended(now, foreign=foreign, start_s=start_s, ready_s=ready_s)
        if not self.was_ready and (fatal or account.failures >= self.policy.first_start_attempts):
            self._enter(watch, GIVEN_UP, reason)
            self._failure = f"{watch.spec.actor_id}: {reason}"
            self._stop(self._failure, False, now)
            return
        wait_s = account.wait_s(is_last=not self._is_stood_in_for(watch))
        watch.deadline = now + wait_s
        if account.is_spent:
            reason = f"{self.policy.budget} restarts in {self.policy.budget_window_s} s; {reason}"
        self._enter(watch, GIVEN_UP if account.is_spent else BACKOFF, reason, wait_s)

    def _is_stood_in_for(self, watch: Watch) -> bool:
        kind = self._kinds[watch.spec.kind or watch.spec.actor_id]
        return any(other.state == READY for other in kind if other is not watch)

    def _start_now(self, gone: Watch) -> None:
        """`gone` is no longer ready: actors waiting to start that it stood in for may now be the last of their kind."""
        for watch in self._kinds[gone.spec.kind or gone.spec.actor_id]:
            if watch is not gone and watch.next_start_at is not None and not self._is_stood_in_for(watch):
                soonest = watch.ended_at + watch.restarts.wait_s(is_last=True)
                watch.deadline = max(self._now, min(watch.next_start_at, soonest))

    def _restart(self, wish: Restart) -> None:
        for actor_id in wish.actor_ids:
            watch = self.watches[actor_id]
            self._rolling.pop(actor_id, None)
            if self.stopping:
                continue
            if watch.state in _AT_REST:
                watch.deadline = None
                self._drained(watch, comes_back=not wish.stay_away)
            elif watch is self._restarting and watch.state in (DRAINING, DYING):
                watch.comes_back, watch.stays_away = not wish.stay_away, wish.stay_away
            else:
                self._rolling[actor_id] = wish.stay_away

    def _drained(self, watch: Watch, *, comes_back: bool) -> None:
        watch.restarts.forgive()
        watch.comes_back = watch.stays_away = False
        if not comes_back:
            self._enter(watch, DRAINED)
            return
        if watch.state in _AT_REST:
            # Or why it was away would be told of an actor that is back.
            watch.reason, watch.reason_at = "restarted, as requested", self._now
        watch.num_requested_restarts += 1
        self._spawn(watch)

    def _roll(self, now: float) -> None:
        """Restart the next actor once the last one is ready or drained. One that cannot start ends the round."""
        while self._restarting is None or self._restarting.state in (READY, GIVEN_UP, DRAINED, STOPPED):
            if self._restarting is not None and self._restarting.state in (GIVEN_UP, STOPPED):
                self._rolling.clear()
            self._restarting = None
            if not self._rolling:
                return
            actor_id = next(iter(self._rolling))
            watch, stays_away = self.watches[actor_id], self._rolling.pop(actor_id)
            watch.comes_back, watch.stays_away = not stays_away, stays_away
            self._restarting = watch
            if watch.state in (READY, SUSPECTED):
                self._drain(watch, now)
            elif watch.state == STARTING and stays_away:
                self._kill(watch, NOT_WANTED, "drained while starting")
            elif watch.state in _AT_REST:
                watch.deadline = None
                self._drained(watch, comes_back=watch.comes_back)
            elif not stays_away:
                # It is about to be a new incarnation anyway.
                watch.comes_back = False

    def _tick(self, now: float) -> None:
        policy = self.policy
        overslept = self._last_tick is not None and now - self._last_tick > 2 * policy.heartbeat_s
        self._last_tick = now
        if self._start_deadline is not None and now >= self._start_deadline:
            self._start_deadline = None
            unready = (actor_id for actor_id, watch in self.watches.items() if watch.state != READY)
            self._commands.append(StartOverdue(tuple(unready)))
        for watch in self.watches.values():
            if overslept:
                # We heard nothing because we were not running.
                watch.last_beat = now
                if watch.state == SUSPECTED:
                    watch.deadline = now + policy.kill_after_s
            if watch.state == READY and now >= self._silent_at(watch):
                watch.deadline = now + policy.kill_after_s
                self._enter(watch, SUSPECTED, f"no heartbeat for {now - watch.last_beat:.1f} s")
            elif watch.deadline is not None and now >= watch.deadline:
                self._overdue(watch, now)
        if self._others_by is not None and now >= self._others_by:
            self._others_done(now)

    def _overdue(self, watch: Watch, now: float) -> None:
        watch.deadline = None
        match watch.state:
            case "backoff" | "given_up":
                watch.num_restarts += 1
                self._spawn(watch)
            case "starting":
                self._kill(watch, START_OVERDUE, f"not ready within {watch.spec.start_timeout_s:g} s")
            case "suspected":
                self._kill(watch, SILENT, f"no heartbeat for {now - watch.last_beat:.1f} s")
            case state:
                assert state == DRAINING, f"{watch.spec.actor_id} has a deadline in state {state}"
                self._kill(watch, DRAIN_OVERDUE, f"not ended within {watch.drain_s + self.policy.end_timeout_s:g} s")

    def _kill(self, watch: Watch, cause: str, reason: str) -> None:
        watch.deadline = None
        watch.killed_for = cause
        self._enter(watch, DYING, reason)
        self._commands.append(Kill(watch.spec.actor_id))

    def _stop(self, reason: str, force: bool, now: float) -> None:
        if not self.stopping:
            self.stopping = True
            self._stop_by = now + self.policy.drain_timeout_s
        self._start_deadline = None
        self._rolling.clear()
        self._force = self._force or force
        for watch in self.watches.values():
            if watch.state in (WAITING, BACKOFF, GIVEN_UP, DRAINED):
                watch.deadline = None
                self._enter(watch, STOPPED, reason)
            elif watch.state == STARTING or (self._force and watch.state in (READY, SUSPECTED, DRAINING)):
                self._kill(watch, NOT_WANTED, reason)
        self._next_tier(now)

    def _next_tier(self, now: float) -> None:
        alive = [watch for watch in self.watches.values() if watch.state != STOPPED]
        if not alive:
            self._others_by = None
            if not self.stopped:
                self.stopped = True
                self._commands.append(MeshStopped(self._failure))
            return
        tier = min(watch.spec.drain_tier for watch in alive)
        due = [watch for watch in alive if watch.spec.drain_tier == tier and watch.state in (READY, SUSPECTED)]
        if any(watch.spec.is_shared for watch in due) and not (self._are_others_done or self._force):
            if self._others_by is None:
                self._others_by = max(now, self._stop_by)
                self._commands.append(AwaitOthers())
            return
        for watch in due:
            self._drain(watch, now)

    def _others_done(self, now: float) -> None:
        self._others_by, self._are_others_done = None, True
        self._next_tier(now)

    def _drain(self, watch: Watch, now: float) -> None:
        policy, within_s = self.policy, inf
        if self.stopping:
            within_s = max(self._stop_by - now, policy.late_drain_s)
        watch.drain_s = min(within_s, policy.drain_timeout_s)
        watch.deadline = now + watch.drain_s + policy.end_timeout_s
        self._enter(watch, DRAINING)
        self._commands.append(Terminate(watch.spec.actor_id, within_s))

    def _enter(self, watch: Watch, state: str, reason: str = "", wait_s: float | None = None) -> None:
        was_ready = watch.state == READY
        watch.state = state
        if reason:
            watch.reason, watch.reason_at = reason, self._now
        self._commands.append(Report(watch.spec.actor_id, watch.epoch, state, reason, wait_s))
        if was_ready and state != READY:
            self._start_now(watch)
