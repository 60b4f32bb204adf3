"""`meshctl logs`: what actors wrote, in one stream in order of time; works after the mesh has ended, too."""

import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from cli.client import not_running
from cli.errors import NotRunning
from cli.exit_codes import ExitCode
from cli.log_lines import LogLine, choose, parse_since, read_lines, to_json, to_text
from cli.plan.faults import unknown_name
from cli.supervisor.mesh_directory import MeshDirectory

_POLL_S: Final = 0.2
_DEFAULT_LINES: Final = 50
_BLOCK_BYTES: Final = 1 << 16


class Wanted(NamedTuple):
    """Which lines: of these actors or roles (none: of all), the last `num_lines`, from `since` on, from `level` up."""

    names: tuple[str, ...] = ()
    num_lines: int | None = None
    since: str | None = None
    level: str = "debug"


def logs(name: str, wanted: Wanted, *, follow: bool, output: Literal["text", "json"] | None) -> ExitCode:
    """Print the last lines, and with `follow` what comes after. Raises NotRunning if there is no such log."""
    directory = MeshDirectory(name)
    since = parse_since(wanted.since, datetime.now()) if wanted.since is not None else 0.0
    files = sorted(directory.logs.glob("*.log"))
    if not files:
        error = not_running(name)
        raise NotRunning(f"there are no logs of a mesh {name!r}", why=error.why, do=error.do)
    # A directory serves many meshes of the name, one after the other, with other actors each.
    chosen = _choose_actors(name, wanted.names, directory.actors() or {path.stem: "" for path in files})
    as_text = output == "text" if output else sys.stdout.isatty()
    colours = as_text and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(map(len, chosen))

    def show(lines: list[LogLine]) -> None:
        for line in lines:
            sys.stdout.write((to_text(line, width, colours=colours) if as_text else to_json(line)) + "\n")
        sys.stdout.flush()

    num_lines = wanted.num_lines
    if num_lines is None and wanted.since is None:
        num_lines = _DEFAULT_LINES
    # Whole files are read only where a filter may leave little of them.
    enough = num_lines if wanted.since is None and wanted.level == "debug" else None
    followed = [_Followed(actor_id, directory.log(actor_id), enough) for actor_id in chosen]
    first = choose((line for log in followed for line in log.first_lines()), since, wanted.level)
    show(first if num_lines is None else first[len(first) - min(num_lines, len(first)) :])
    try:
        while follow:
            time.sleep(_POLL_S)
            show(choose((line for log in followed for line in log.new_lines()), since, wanted.level))
    except KeyboardInterrupt:
        pass
    return ExitCode.OK


def _choose_actors(name: str, wanted: tuple[str, ...], actors: Mapping[str, str]) -> list[str]:
    """Ids of the actors that are meant."""
    for one in wanted:
        if one not in actors and one not in actors.values():
            fault = unknown_name(one, [*actors.values(), *actors], "actor or role")
            raise NotRunning(f"there is no log of {one} in mesh {name!r}", why=fault.why, do=fault.do)
    return [actor for actor, role in actors.items() if not wanted or actor in wanted or role in wanted]


class _Followed:
    """One growing file; begins again where it was cut (rotated). `enough`: lines to begin with, None for all."""

    def __init__(self, actor_id: str, path: Path, enough: int | None) -> None:
        self._actor_id = actor_id
        self._path = path
        self._enough = enough
        self._at = 0
        self._rest = b""

    def first_lines(self) -> list[LogLine]:
        """What is there already, the rotated file before it."""
        content = b""
        for path in (self._path, self._path.with_name(self._path.name + ".1")):
            # An actor that has not been started yet has none.
            if path.exists() and (self._enough is None or content.count(b"\n") < self._enough):
                with path.open("rb") as file:
                    tail, end = self._tail(file)
                content = tail + content
                if path is self._path:
                    self._at = end
        return self._lines(content)

    def new_lines(self) -> list[LogLine]:
        """What was written since."""
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._at:
            self._at, self._rest = 0, b""
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = self._rest + file.read()
            self._at = file.tell()
        # A line that is just being written comes whole the next time.
        whole, newline, self._rest = content.rpartition(b"\n")
        return self._lines(whole + newline)

    def _tail(self, file: BinaryIO) -> tuple[bytes, int]:
        """As much from the end as `enough` lines take, or all; and where that end is."""
        if self._enough is None:
            content = file.read()
            return content, len(content)
        at = end = file.seek(0, os.SEEK_END)
        content = b""
        while at > 0 and content.count(b"\n") <= self._enough:
            size = min(at, _BLOCK_BYTES)
            at = file.seek(at - size)
            content = file.read(size) + content
        # The first line is whole only at the file's beginning.
        return content if at == 0 else content.partition(b"\n")[2], end

    def _lines(self, content: bytes) -> list[LogLine]:
        if not content:
            return []
        # Not splitlines, which breaks at characters that JSON leaves as they are.
        texts = content.decode(errors="replace").split("\n")
        return read_lines(self._actor_id, texts, self._path.stat().st_mtime)
