"""The statistics that one actor reports: its own, its process's, and how fast its totals rise."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mesh.handlers import Handlers
from mesh.runtime.history import FigureHistory
from mesh.runtime.process_usage import ProcessUsage
from mesh.runtime.rates import Rates
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.telemetry import Metrics
from mesh.wire.frames import StatsReply

_CPU: Final = "mesh_cpu_seconds"


class OwnFigures:
    """Owned by `ActorSystem`. `usage` is None if the actor shares its process with others."""

    def __init__(
        self, actor: Handlers, metrics: Metrics, tasks: TaskSupervisor, usage: Callable[[], ProcessUsage] | None
    ) -> None:
        self._actor = actor
        self._metrics = metrics
        self._tasks = tasks
        self._usage = usage
        self._rates = Rates()
        self._history = FigureHistory()

    def sample(self, now: float) -> None:
        """Called with every heartbeat."""
        totals = self._totals(self._usage() if self._usage is not None else None)
        self._rates.sample(now, totals)
        if self._actor.kept and self._history.is_due(now):
            self._keep(now, totals)

    def reply(self, now: float, gauges: Mapping[str, float], history_after: int | None = None) -> StatsReply:
        usage = self._usage() if self._usage is not None else None
        figures = dict(gauges)
        rates = self._rates.per_second(now, self._totals(usage))
        if usage is not None:
            figures[f"{_CPU}_total"] = usage.cpu_s
            figures["mesh_cpu_cores"] = rates.pop(_CPU)
            if usage.memory_bytes is not None:
                figures["mesh_resident_memory_bytes"] = float(usage.memory_bytes)
        figures |= {f"{name}_per_second": rate for name, rate in rates.items()}
        figures |= self._said("stats", self._actor.stats)
        said = self._metrics.snapshot(figures)
        if history_after is None:
            return said
        return msgspec.structs.replace(said, history=self._history.after(history_after, now))

    def _keep(self, now: float, totals: Mapping[str, float]) -> None:
        rates = self._rates.per_second(now, totals)
        figures = {f"{name}_per_second": rate for name, rate in rates.items() if name != _CPU}
        said = self._said("stats", self._actor.stats)
        figures |= {name: said[name] for name in self._actor.kept if name in said}
        self._history.add(now, figures, self._metrics.observed(self._actor.kept))

    def _totals(self, usage: ProcessUsage | None) -> dict[str, float]:
        return ({} if usage is None else {_CPU: usage.cpu_s}) | self._said("totals", self._actor.totals)

    def _said(self, what: str, by_actor: Callable[[], dict[str, float]]) -> dict[str, float]:
        try:
            return by_actor()
        except Exception as error:  # noqa: BLE001 - an actor that cannot count itself is still there
            self._tasks.failed(what, error)
            return {}
