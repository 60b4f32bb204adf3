"""`meshctl logs`: what actors wrote, one file each in the run directory; works after the mesh has ended, too."""

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final, TextIO

from cli.errors import NotRunning
from cli.exit_codes import ExitCode
from cli.launch.mesh_directory import MeshDirectory

_POLL_S: Final = 0.2


def logs(name: str, actor: str | None, *, follow: bool, num_lines: int) -> ExitCode:
    """Print the last lines, and with `follow` what comes after. Raises NotRunning if there is no such log."""
    directory = MeshDirectory(name)
    known = {path.stem: path for path in sorted(directory.logs.glob("*.log"))}
    if not known or (actor is not None and actor not in known):
        raise NotRunning(
            f"there is no log of {actor} in mesh {name!r}" if actor else f"there are no logs of a mesh {name!r}",
            why=f"there are logs of {', '.join(known)}" if known else "",
            do="give one of these" if known else "start a mesh with `meshctl up`",
        )
    chosen = {actor: known[actor]} if actor is not None else known
    followed = {actor_id: _Followed(path, num_lines) for actor_id, path in chosen.items()}
    width = max(map(len, chosen)) if len(chosen) > 1 else 0
    try:
        while True:
            for actor_id, log in followed.items():
                for line in log.new_lines():
                    sys.stdout.write(f"{actor_id:<{width}}  {line}" if width else line)
            sys.stdout.flush()
            if not follow:
                return ExitCode.OK
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return ExitCode.OK


class _Followed:
    """One growing file; begins again where it was cut (rotated)."""

    def __init__(self, path: Path, num_lines: int) -> None:
        self._path = path
        self._file: TextIO = path.open(errors="replace")
        self._pending = deque(self._file, maxlen=num_lines)

    def new_lines(self) -> list[str]:
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
        lines = [*self._pending, *self._file.readlines()]
        self._pending.clear()
        return [line if line.endswith("\n") else f"{line}\n" for line in lines]
