"""The log files of a mesh: bounded, with one predecessor each, and read in parts."""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Final

import msgspec

from cli.plan.names import on_host
from cli.protocol import LogPart, LogParts, ReadLogs
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.told.record import ZYGOTE
from mesh.membership.view import SUPERVISOR

_CHECK_INTERVAL_S: Final = 10.0
"""A log grows beyond `max_log_bytes` by what an actor writes in 10 s; a look is a `stat` for each file."""
_BLOCK_BYTES: Final = 1 << 16
"""Some hundred lines: most `--lines` (50) are found in one read."""
_MAX_BYTES: Final = 1 << 20
"""Limit of one answer: while the supervisor reads, its own heartbeats wait."""
_NUM_LAST_LINES: Final = 3
"""The error of a traceback and the two lines above it; the log has the rest."""
_MAX_LAST_CHARS: Final = 400
"""It goes into a reason that `ps` and each log line about the death repeat."""
_UNNAMED: Final = (SUPERVISOR, ZYGOTE)
"""Actors whose log files do not name the host."""


async def keep_small(folder: Path, max_bytes: int) -> None:
    """Rotate the logs that actors append to, now and then, until cancelled."""
    while True:
        await asyncio.sleep(_CHECK_INTERVAL_S)
        # A full disk is a reason to try again, not to stop.
        with contextlib.suppress(OSError):
            rotate(folder, max_bytes)


def rotate(folder: Path, max_bytes: int) -> list[Path]:
    """Move the content of files over the bound to `NAME.log.1`. Returns those files.

    Actors keep their descriptors, so a full file is copied and cut, not renamed.
    """
    full = [path for path in sorted(folder.glob("*.log")) if path.stat().st_size > max_bytes]
    for path in full:
        # Lines that are written between copy and cut are lost: the price of descriptors that stay open.
        shutil.copyfile(path, _predecessor(path))
        with path.open("r+b") as file:
            file.truncate(0)
    return full


class _Reason(msgspec.Struct):
    """Of a line of a log, what says why: each actor names it in one of three ways."""

    event: str = ""
    what: str = ""
    why: str = ""
    reason: str = ""
    error: str = ""


class LastLines:
    """The last lines that a process wrote to its log. Made before the process starts: earlier lines are another's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = _size(path)

    def added_to(self, text: str) -> str:
        # An actor's JSON says nothing of a crash, and goes to people and peers who may not read the log.
        lines = [line for line in self._lines() if line.strip("^~") and not line.startswith("{")]
        found = " | ".join(lines[-_NUM_LAST_LINES:])
        shown = found if len(found) <= _MAX_LAST_CHARS else f"...{found[-_MAX_LAST_CHARS:]}"
        return f"{text} (last lines: {shown})" if shown else text

    def last_reason(self) -> str:
        """What the actor last logged that it waits for, or that is wrong, with the reason; empty if it did not."""
        for line in reversed(self._lines()):
            with contextlib.suppress(msgspec.MsgspecError):
                logged = msgspec.json.decode(line, type=_Reason)
                if why := logged.why or logged.reason or logged.error:
                    return f"{logged.what or logged.event}: {why}"[:_MAX_LAST_CHARS]
        return ""

    def _lines(self) -> list[str]:
        size = _size(self._path)
        # A file that was cut since begins anew.
        start = max(self._place if self._place <= size else 0, size - _BLOCK_BYTES)
        return [line.strip() for line in _read(self._path, start, _BLOCK_BYTES).decode(errors="replace").splitlines()]


def log_roles(directory: MeshDirectory) -> dict[str, str]:
    """Roles by actor id: of the actors of the last mesh, or if those are not known, of all that have a log.

    On one of several hosts every id names the host, as in `read_logs`.
    """
    return {actor_id: role for actor_id, (role, _) in _logged(directory).items()}


def read_logs(directory: MeshDirectory, request: ReadLogs) -> LogParts:
    """What the request asks for of the logs of one host; nothing for ids that are not in `log_roles`."""
    actors = _logged(directory)
    max_bytes = _MAX_BYTES // max(len(request.places), 1)
    return LogParts(
        parts={
            actor_id: read_part(actors[actor_id][1], place, request.num_lines, max_bytes)
            for actor_id, place in request.places.items()
            if actor_id in actors
        }
    )


def _logged(directory: MeshDirectory) -> dict[str, tuple[str, Path]]:
    # A directory serves many meshes of its name, one after the other, each with other actors.
    roles = directory.actors() or {path.stem: "" for path in sorted(directory.logs.glob("*.log"))}
    host = directory.host
    return {
        on_host(name, host if role in _UNNAMED else ""): (role, directory.log(name)) for name, role in roles.items()
    }


def read_part(path: Path, place: int | None, num_lines: int | None, max_bytes: int) -> LogPart:
    """What was written to a log from `place` on, see `ReadLogs`; `max_bytes` at most."""
    older = _predecessor(path)
    num_older, size = (_size(file) for file in (older, path))
    if place is None:
        place = -num_older if num_lines is None else _last_lines(path, older, num_lines)
    elif place > size:
        # The file was cut since, and what was there is in the file before it, unless somebody else emptied it.
        place = min(place - num_older, 0)
    place = max(place, -num_older)
    file, start = (older, num_older + place) if place < 0 else (path, place)
    content = _read(file, start, min(max_bytes, -place) if place < 0 else max_bytes)
    place += len(content)
    modified_at = path.stat().st_mtime if path.exists() else 0.0
    return LogPart(content=content, place=place, more=place < size, modified_at=modified_at)


def _last_lines(path: Path, older: Path, num_lines: int) -> int:
    """Where the last lines begin; or a few before them."""
    start, found = _tail(path, num_lines)
    if start == 0 and found < num_lines:
        start = _tail(older, num_lines - found)[0] - _size(older)
    return start


def _tail(path: Path, num_lines: int) -> tuple[int, int]:
    """The same in one file, and how many lines begin from there on."""
    at, found, block = _size(path), 0, b""
    while at > 0 and found <= num_lines:
        num_bytes = min(at, _BLOCK_BYTES)
        at -= num_bytes
        block = _read(path, at, num_bytes)
        found += block.count(b"\n")
    # A line is whole only at the file's beginning, or after the end of another.
    return (at + block.index(b"\n") + 1 if at > 0 else 0), found


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    if num_bytes <= 0 or not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)


def _size(path: Path) -> int:
    # An actor that has not been started yet has none.
    return path.stat().st_size if path.exists() else 0


def _predecessor(path: Path) -> Path:
    return path.with_name(path.name + ".1")
