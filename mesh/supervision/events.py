"""Events, commands and actor states of a supervisor; `core.py` makes the decisions.

Structs, so that the events before a failure are in the log as data (`mesh/runtime/recording.py`).
"""

from math import inf

import msgspec

WAITING = "waiting"
SPAWNING = "spawning"
STARTING = "starting"
READY = "ready"
SUSPECTED = "suspected"
DYING = "dying"
BACKOFF = "backoff"
GIVEN_UP = "given_up"
DRAINING = "draining"
DRAINED = "drained"
STOPPED = "stopped"

# Causes for which a supervisor kills.
SILENT = "no_heartbeat"
START_OVERDUE = "not_ready_in_time"
DRAIN_OVERDUE = "not_drained_in_time"
NOT_WANTED = "not_wanted"

IN_ORDER = "exit_0"
"""The cause of death of a process that exits normally."""


class Policy(msgspec.Struct, frozen=True):
    """In seconds; see `restarts.py`. `kill_after_s` comes after the `missed` heartbeats that make an actor suspect.

    An actor itself ends its drain after `drain_timeout_s`, and tells its clients; it is killed `end_timeout_s` later.
    The whole start is over after `start_timeout_s` without progress, whatever the actors do; None: never. When
    everything stops, all drains together have that time, and those that begin after it `late_drain_s` each.
    """

    heartbeat_s: float = 0.5
    missed: int = 3
    kill_after_s: float = 1.0
    backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    lone_backoff_s: float = 1.0
    budget: int = 10
    budget_window_s: float = 60.0
    first_start_attempts: int = 3
    start_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    # An actor's own limit for its end is 5 s (`mesh/run.py`).
    end_timeout_s: float = 6.0
    # What is left after the gateways have cut off their streams: cancels, and steps that run.
    late_drain_s: float = 1.0

    @property
    def gone_after_s(self) -> float:
        """By then an actor that was asked to end has ended, or is killed."""
        return self.drain_timeout_s + self.end_timeout_s


class Supervised(msgspec.Struct, frozen=True):
    """One actor to keep alive. Lower tiers drain first; a tier is gone entirely before the next one is drained.

    Actors of one `kind` stand in for each other; if it is empty, no actor stands in for this one. One that is shared
    may be needed by others than this supervisor's actors, for what those finish.
    """

    actor_id: str
    drain_tier: int = 1
    start_timeout_s: float = 60.0
    kind: str = ""
    is_shared: bool = False


# Events


class Begin(msgspec.Struct, frozen=True):
    """Start everything."""


class Spawned(msgspec.Struct, frozen=True):
    """The process of an incarnation exists."""

    actor_id: str
    epoch: int


class SpawnFailed(msgspec.Struct, frozen=True):
    """No process came to be. `foreign`: because the process to fork it from was killed by somebody else."""

    actor_id: str
    epoch: int
    reason: str
    foreign: bool = False


class Beat(msgspec.Struct, frozen=True):
    """A sign of life; `ready` is the actor's own statement, `progress` describes a long operation."""

    actor_id: str
    epoch: int
    ready: bool
    progress: str = ""


class Exited(msgspec.Struct, frozen=True):
    """The process was reaped. `fatal`: it reported that starting it again unchanged cannot help.

    `cause` is one of a few words, for counters. `foreign`: it was killed, and not for lack of memory; ignored if this
    supervisor killed it. `known_epoch`: a later epoch of this actor that the mesh knows, or 0.
    """

    actor_id: str
    epoch: int
    reason: str
    fatal: bool = False
    cause: str = ""
    foreign: bool = False
    known_epoch: int = 0


class Tick(msgspec.Struct, frozen=True):
    """Time passed; due at `Supervisor.deadline()`."""


class Served(msgspec.Struct, frozen=True):
    """The mesh serves: its start is over, and no deadline of it counts any more."""


class Stop(msgspec.Struct, frozen=True):
    """Drain everything, tier by tier; with `force`, in this Stop or a later one, kill instead.

    `failure`: why the start has failed, if it is for that.
    """

    reason: str
    force: bool = False
    failure: str = ""


class OthersDone(msgspec.Struct, frozen=True):
    """The answer to `AwaitOthers`."""


class Restart(msgspec.Struct, frozen=True):
    """Drain these actors one after the other and start each again; with `stay_away`, only at a later `Restart`.

    All those without a process are started at once, since others may be waiting for them.
    """

    actor_ids: tuple[str, ...]
    stay_away: bool = False


Event = Begin | Spawned | SpawnFailed | Beat | Exited | Tick | Served | Stop | OthersDone | Restart

# Commands


class Spawn(msgspec.Struct, frozen=True):
    """Persist the epoch, then start the process; answer with Spawned or SpawnFailed."""

    actor_id: str
    epoch: int


class Kill(msgspec.Struct, frozen=True):
    """End the process at once; answer with Exited once it is reaped."""

    actor_id: str


class Terminate(msgspec.Struct, frozen=True):
    """Ask the process to finish its work within `drain_timeout_s`, or `within_s` if that is less, and exit."""

    actor_id: str
    within_s: float = inf


class AwaitOthers(msgspec.Struct, frozen=True):
    """Answer with `OthersDone` once nobody else needs the shared actors; they wait for that as long as for a drain."""


class Report(msgspec.Struct, frozen=True):
    """An actor changed its state; for people, logs and `ps`. `wait_s`: seconds until its next start, if known."""

    actor_id: str
    epoch: int
    state: str
    reason: str = ""
    wait_s: float | None = None


class Died(msgspec.Struct, frozen=True):
    """Tell the mesh that an incarnation is certainly dead. `cause`: why we killed it, or the cause in `Exited`.

    `is_wished`: it was asked to end and did, or was killed because it was not wanted any more.
    """

    actor_id: str
    epoch: int
    reason: str
    cause: str = ""
    is_wished: bool = False


class MeshReady(msgspec.Struct, frozen=True):
    """Every actor is ready, for the first time."""


class StartOverdue(msgspec.Struct, frozen=True):
    """The whole start has taken too long. `unready`: who is not ready, or nobody, if only the mesh as a whole is not.

    Answer with a Stop that says why.
    """

    unready: tuple[str, ...]


class MeshStopped(msgspec.Struct, frozen=True):
    """No process is left. `failure` is why the mesh never became ready, empty if it was told to stop."""

    failure: str


Command = Spawn | Kill | Terminate | AwaitOthers | Report | Died | MeshReady | StartOverdue | MeshStopped
