"""What a supervisor has seen and done, where it can be read later: its log, its counters, the lines of `meshctl up`.

The lines go to the command that started the mesh, while it runs. With `-d` it ends once the mesh is ready, so all of it
is logged too.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from cli.supervisor.processes.exits import OUT_OF_MEMORY, Exit
from cli.supervisor.told.progress import Progress
from mesh.actor import Context
from mesh.runtime.plain_structlog import structlog
from mesh.supervision.events import (
    BACKOFF,
    DRAIN_OVERDUE,
    DRAINED,
    DRAINING,
    DYING,
    GIVEN_UP,
    IN_ORDER,
    READY,
    SILENT,
    SPAWNING,
    START_OVERDUE,
    STARTING,
    STOPPED,
    SUSPECTED,
    Died,
    Report,
)

ZYGOTE: Final = "zygote"
"""The process that actors are forked from, as its log and counters name it."""


class _Told(NamedTuple):
    """How a state is reported: the event in the log, its level, the counter that always counts it, if any, and what
    people who wait are told; empty: nothing, or how far the start is.
    """

    event: str
    level: str = "info"
    counter: str = ""
    said: str = ""


_STATES: Final = {
    SPAWNING: _Told("actor_starts"),
    STARTING: _Told("actor_started", "debug"),
    READY: _Told("actor_ready"),
    SUSPECTED: _Told("actor_suspected", "warning", "mesh_supervisor_suspicions_total", "suspected: {reason}"),
    DYING: _Told("actor_killed", "warning", "mesh_supervisor_kills_total", "dying: {reason}"),
    BACKOFF: _Told("actor_restarts", "warning", said="ended: {reason}; starting it again{when}"),
    GIVEN_UP: _Told(
        "actor_given_up", "error", "mesh_supervisor_give_ups_total", "GIVEN UP: {reason}; see meshctl logs {actor_id}"
    ),
    DRAINING: _Told("actor_drains", said="draining"),
    DRAINED: _Told("actor_drained", said="drained"),
    STOPPED: _Told("actor_stopped"),
}
_STAGES: Final = {SPAWNING: "spawn", READY: "ready"}
"""States that are stages of a start."""
_DIED: Final = _Told("actor_died", "warning")
_ENDS: Final = {
    # By itself and in good order: somebody else than this supervisor asked it to, or what it depends on is gone.
    IN_ORDER: _Told("actor_ended"),
    DRAIN_OVERDUE: _Told("actor_cut_off", "warning"),
}
"""How an end is reported that is not the usual death, by its cause."""


_CAUSES: Final = ("SIGKILL", "SIGSEGV", "SIGABRT", "exit_1", OUT_OF_MEMORY, SILENT, START_OVERDUE, DRAIN_OVERDUE)
"""The usual causes of deaths, counted from 0. There are as many as signals and exit codes."""


class SupervisionRecord:
    """`context` is the supervisor's own; `roles` those of its actors, by actor id."""

    def __init__(self, progress: Progress, context: Callable[[], Context], roles: Mapping[str, str]) -> None:
        self._progress = progress
        self._context = context
        self._roles = roles
        self._started: set[str] = set()
        self._died: set[str] = set()

    @property
    def ctx(self) -> Context:
        """The supervisor's own; there is none before its actor is part of the mesh."""
        return self._context()

    def state(self, report: Report) -> None:
        told = _STATES[report.state]
        if stage := _STAGES.get(report.state):
            self._progress.stage(report.actor_id, stage)
        elif told.said:
            when = f" in {report.wait_s:.2f} s" if report.wait_s else ""
            said = told.said.format(reason=report.reason, actor_id=report.actor_id, when=when)
            self._progress.note(f"{report.actor_id:<22} {said}")
        is_first = report.state == SPAWNING and report.actor_id not in self._started
        if is_first:
            self._begin(report.actor_id)
        self._count_state(report)
        if report.state == SPAWNING:
            self._started.add(report.actor_id)
        fields: dict[str, Any] = {"peer": report.actor_id, "peer_epoch": report.epoch}
        if report.reason:
            fields["reason"] = report.reason
        if report.wait_s is not None:
            fields["next_start_in_s"] = round(report.wait_s, 3)
        # On a healthy start each actor's own log says that it joined, and this one that it is ready: that is enough.
        getattr(self._log, "debug" if is_first else told.level)(told.event, **fields)

    def working(self, actor_id: str, progress: str) -> None:
        """An actor says how far it is with slow work, or with an empty text that it is done."""
        self._progress.working(actor_id, progress)

    def apart(self, trouble: str) -> None:
        """The registry does not take this host in, for this reason; empty: it does again."""
        if trouble:
            self._log.warning("registry_missing", why=trouble)
        else:
            self._log.info("registry_found")

    def hello(self, actor_id: str) -> None:
        """An actor was heard from; only the first time counts."""
        self._progress.stage(actor_id, "hello")

    def death(self, died: Died) -> None:
        if died.is_wished:
            # An end by request is no death, and the next start no restart. The actor's states say that it has ended.
            return
        self._count("mesh_supervisor_deaths_total", died.actor_id, reason=died.cause)
        self._died.add(died.actor_id)
        told = _ENDS.get(died.cause, _DIED)
        end = {"peer": died.actor_id, "peer_epoch": died.epoch, "cause": died.cause, "reason": died.reason}
        getattr(self._log, told.level)(told.event, **end)

    def core_failure(self, actor_id: str, core: str) -> None:
        """A core of an actor failed. Counted here, since what the actor has counted dies with it."""
        self._count("mesh_supervisor_core_failures_total", actor_id, core=core)

    def zygote_death(self, end: Exit) -> None:
        self._count("mesh_supervisor_deaths_total", ZYGOTE, reason=end.cause)
        self._log.warning("zygote_died", cause=end.cause, reason=end.text)
        self._progress.note(f"{ZYGOTE:<22} ended: {end.text}; starting it again")

    def stops(self, reason: str, *, force: bool) -> None:
        self._progress.note(f"stopping: {reason}" + (", by force" if force else ""))
        self._log.info("mesh_stops", reason=reason, force=force)

    def trouble(self, text: str) -> None:
        """Something that the supervisor cannot do, but can go on without."""
        self._progress.note(text)
        self._log.warning("supervisor_trouble", reason=text)

    def _count_state(self, report: Report) -> None:
        actor_id = report.actor_id
        if counter := _STATES[report.state].counter:
            self._count(counter, actor_id)
        elif report.state == BACKOFF and report.wait_s:
            self._count("mesh_supervisor_backoffs_total", actor_id)
        elif report.state == SPAWNING and actor_id in self._died:
            # Not if it could not be forked because the zygote died: no process of its own was lost.
            self._count("mesh_supervisor_restarts_total", actor_id)
            self._died.remove(actor_id)

    def _begin(self, actor_id: str) -> None:
        begin = self.ctx.metrics.begin
        about = {"actor": (actor_id,), "role": (self._roles.get(actor_id, ZYGOTE),)}
        begin(*(told.counter for told in _STATES.values() if told.counter), **about)
        begin("mesh_supervisor_backoffs_total", "mesh_supervisor_restarts_total", **about)
        begin("mesh_supervisor_deaths_total", **about, reason=_CAUSES)
        begin("mesh_supervisor_deaths_total", actor=(ZYGOTE,), role=(ZYGOTE,), reason=_CAUSES[:3])

    def _count(self, name: str, actor_id: str, **labels: str) -> None:
        # The labels name the actor that this is about; a scrape does not replace them with the supervisor's own.
        self.ctx.metrics.count(name, 1.0, actor=actor_id, role=self._roles.get(actor_id, ZYGOTE), **labels)

    @property
    def _log(self) -> structlog.stdlib.BoundLogger:
        return self.ctx.log
