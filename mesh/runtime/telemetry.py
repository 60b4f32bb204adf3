"""Metrics of one actor, and the set-up of its log.

Each actor keeps its own numbers and answers `StatsRequest` with them; a gateway's `/metrics` gathers those of the mesh.
Used on the event loop's thread only, so plain dictionaries suffice.
"""

import bisect
import contextvars
import functools
import logging
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from random import Random
from typing import Final, NamedTuple, TextIO, cast

import msgspec

from mesh.errors import BadSetting
from mesh.runtime.log_stream import LogStream
from mesh.runtime.plain_structlog import structlog
from mesh.wire.frames import Histogram, StatsReply

SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds of all histograms, seconds: from a round trip on one host to a long answer."""
current_trace: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("traceparent", default="")
"""W3C trace context of the message being handled; inherited by tasks and timers started while handling it."""
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS: Final = ("json", "console")
_MAX_SERIES: Final = 4096
"""Actors have some hundred; labels with names from outside could make any number. A reply with so many has 300 KB."""
_DROPPED: Final = "mesh_series_dropped_total"


def new_traceparent(random: Random) -> str:
    """The W3C trace context of a new trace, sampled."""
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-01"


def series(name: str, labels: dict[str, str]) -> str:
    """The Prometheus text of one series: `name{label="value",…}`, with labels sorted by name."""
    return _series(name, *labels.items()) if labels else name


# Made once for each series: a request counts in two that have labels, and writing a text takes ten calls.
@functools.lru_cache(maxsize=_MAX_SERIES)
def _series(name: str, *labels: tuple[str, str]) -> str:
    pairs = (f'{key}="{_escaped(value)}"' for key, value in sorted(labels))
    return f"{name}{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Metrics:
    """Counters, gauges and histograms by series. The number of series is bounded; those beyond it are only counted."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, _Observations] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        key = series(name, labels) if labels else name
        if key in self._counters or self._has_room():
            self._counters[key] = self._counters.get(key, 0.0) + value

    def begin(self, *names: str, **labels: Iterable[str]) -> None:
        """Let these counters be 0 if they have counted nothing yet, with each combination of `labels`.

        Of a series that begins with its first event, Prometheus' `increase()` does not see that event.
        """
        for name in names:
            for values in product(*labels.values()):
                self.count(name, 0.0, **dict(zip(labels, values, strict=True)))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        key = series(name, labels)
        if key in self._gauges or self._has_room():
            self._gauges[key] = value

    def observe(self, name: str, value: float, count: int = 1, **labels: str) -> None:
        """Add an observation, seconds, to a histogram; with `count` as many that are equal."""
        key = series(name, labels) if labels else name
        histogram = self._histograms.get(key)
        if histogram is None:
            if not self._has_room():
                return
            histogram = self._histograms[key] = _Observations()
        # Here and not in a method of it: this is called for every token.
        histogram.counts[bisect.bisect_left(SECONDS, value)] += count
        histogram.total += value * count

    def value(self, name: str, **labels: str) -> float:
        key = series(name, labels)
        return self._counters.get(key, self._gauges.get(key, 0.0))

    def observed(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Of those names that are histograms: how many observations there were, and their sum."""
        found = ((name, self._histograms.get(name)) for name in names)
        return {name: (sum(kept.counts), kept.total) for name, kept in found if kept is not None}

    def snapshot(self, gauges: dict[str, float] | None = None) -> StatsReply:
        return StatsReply(
            counters=dict(self._counters),
            gauges={**self._gauges, **(gauges or {})},
            histograms={key: kept.frozen() for key, kept in self._histograms.items()},
        )

    def _has_room(self) -> bool:
        if len(self._counters) + len(self._gauges) + len(self._histograms) < _MAX_SERIES:
            return True
        self._counters[_DROPPED] = self._counters.get(_DROPPED, 0.0) + 1
        return False


class _Observations:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def frozen(self) -> Histogram:
        return Histogram(bounds=list(SECONDS), counts=list(self.counts), total=self.total)


class LogSettings(NamedTuple):
    """The environment's settings for the log. `json` is None if unset."""

    level: str
    json: bool | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LogSettings":
        """From KVMESH_LOG_LEVEL and KVMESH_LOG_FORMAT. Raises BadSetting."""
        level = _choice(environment, "KVMESH_LOG_LEVEL", LOG_LEVELS) or "info"
        form = _choice(environment, "KVMESH_LOG_FORMAT", LOG_FORMATS)
        return cls(level, form == "json" if form else None)


def _choice(environment: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environment.get(name, "")
    if value and value not in choices:
        raise BadSetting(f"{name} is {value!r}, but must be one of {', '.join(choices)}", param=name)
    return value


def setup_log(*, level: str = "info", json: bool = True, stream: TextIO | None = None) -> None:
    """Set up structlog, and `logging` from warnings on: one JSON object a line, or coloured lines. Called once."""
    out = LogStream(stream if stream is not None else sys.stderr)
    structlog.configure(
        processors=_processors(out, json=json),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=cast("TextIO", out), level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")


def log_to(stream: TextIO, level: str) -> structlog.stdlib.BoundLogger:
    """A log of JSON lines of its own, whatever the process's own log is; nothing else is set up."""
    out = LogStream(stream)
    return structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", out)),
        processors=_processors(out, json=True),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def _processors(out: LogStream, *, json: bool) -> list[structlog.typing.Processor]:
    renderer: structlog.typing.Processor
    if json:
        renderer = structlog.processors.JSONRenderer(serializer=_to_json)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=out.target.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if json:
        processors.append(structlog.processors.format_exc_info)
    return [*processors, renderer]


def _to_json(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
