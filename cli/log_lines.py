"""Lines of actors' logs: read, chosen, and written for a terminal. Pure.

An actor writes one JSON object a line. What libraries, the interpreter or a crash write stands between these lines as
it is, and gets the time of the line before it.
"""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec

from cli.errors import WrongUsage
from mesh.runtime.telemetry import LOG_LEVELS

_FOREIGN_LEVEL: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
"""How a library's own logging begins its lines, see `mesh.runtime.telemetry.setup_log`."""
_OWN_FIELDS: Final = frozenset({"actor", "epoch", "event", "level", "timestamp", "exception"})
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_COLOURS: Final = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31;1m"}
_PLAIN: Final = "\x1b[0m"


class LogLine(NamedTuple):
    """One line. `at` is Unix time, `fields` is empty unless the line is an actor's JSON."""

    actor_id: str
    at: float
    level: str
    text: str
    fields: dict[str, Any]


def read_lines(actor_id: str, texts: Iterable[str], default_at: float) -> list[LogLine]:
    """The lines of one actor, in their order. `default_at` is their time if no line has one."""
    parsed = [_parse(actor_id, text) for text in texts if text.strip()]
    at = next((line.at for line in parsed if line.fields), default_at)
    lines: list[LogLine] = []
    for line in parsed:
        at = line.at if line.fields else at
        lines.append(line._replace(at=at))
    return lines


def choose(lines: Iterable[LogLine], since: float, level: str) -> list[LogLine]:
    """The lines from `since` on, of `level` or above, in order of time; lines of the same time keep their order."""
    least = LOG_LEVELS.index(level)
    chosen = [line for line in lines if line.at >= since and LOG_LEVELS.index(line.level) >= least]
    return sorted(chosen, key=lambda line: line.at)


def to_json(line: LogLine) -> str:
    """One JSON object, the actor's own where it wrote one."""
    if line.fields:
        return line.text
    when = datetime.fromtimestamp(line.at).astimezone().isoformat()
    fields = {"actor": line.actor_id, "event": line.text, "level": line.level, "timestamp": when}
    return msgspec.json.encode(fields).decode()


def to_text(line: LogLine, width: int, *, colours: bool) -> str:
    """For a terminal: local time, actor (padded to `width`), level, what happened, and what goes with it."""
    at = datetime.fromtimestamp(line.at)
    when = at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03}"
    if at.date() != datetime.now().date():
        when = at.strftime("%m-%d ") + when
    said = line.text
    if line.fields:
        pairs = [f"{name}={_value(value)}" for name, value in line.fields.items() if name not in _OWN_FIELDS]
        said = "  ".join([str(line.fields.get("event", "")), *pairs])
        if line.fields.get("exception"):
            said += "\n" + str(line.fields["exception"])
    text = f"{when}  {line.actor_id:<{width}}  {line.level:<7}  {said}"
    colour = _COLOURS.get(line.level, "") if colours else ""
    return f"{colour}{text}{_PLAIN}" if colour else text


def parse_since(text: str, now: datetime) -> float:
    """Unix time of `30s`, `10m`, `2h`, `1d` before `now`, or of a date and time. Raises WrongUsage."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is not None:
        return (now - timedelta(**{_UNITS[match[2]]: float(match[1])})).timestamp()
    try:
        # Without a time zone it is local time.
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise WrongUsage(
            f"--since {text} is not a time",
            why="it is neither a number followed by s, m, h or d nor a date and time",
            do="write it like 30s, 10m, 2h, 1d or 2026-01-31T12:00",
        ) from error


def _parse(actor_id: str, text: str) -> LogLine:
    text = text.rstrip("\n")
    if text.startswith("{"):
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
            at = datetime.fromisoformat(fields["timestamp"]).timestamp()
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            pass
        else:
            level = fields.get("level")
            return LogLine(actor_id, at, level if level in LOG_LEVELS else "info", text, fields)
    found = _FOREIGN_LEVEL.match(text)
    # Only a crash writes lines that are neither ours nor a library's.
    return LogLine(actor_id, 0.0, found[1].lower() if found else "error", text, {})


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if value and not set(" =\"'\n") & set(value) else repr(value)
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    return str(value)
