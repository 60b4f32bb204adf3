"""Removes what is left of engines whose processes were all killed. Their meshes' names are never used again."""

import shutil
import time
from typing import Final

from cli.errors import CliError
from cli.supervisor.kept.mesh_directory import MeshDirectory
from cli.supervisor.kept.sweep import sweep
from cli.supervisor.processes.by_pid import is_alive
from nodes.engine.startup import MESH_NAME

_UNSIGNED_S: Final = 60.0
"""A supervisor signs its lock milliseconds after it has made the directory; one that was killed between never does."""


def sweep_engines() -> list[str]:
    """Kill and remove all leftovers of engines that are dead. Returns what was found, in words."""
    found: list[str] = []
    for name in MeshDirectory.all_names():
        directory = MeshDirectory(name)
        if MESH_NAME.fullmatch(name) and _is_dead(directory):
            try:
                with directory.locked():
                    found += [f"{what} of {name}" for what in sweep(directory)]
                    shutil.rmtree(directory.path, ignore_errors=True)
            except CliError:
                # Another start is at it.
                continue
    return found


def _is_dead(directory: MeshDirectory) -> bool:
    holder = directory.holder()
    if holder is not None:
        return not is_alive(*holder)
    try:
        return time.time() - directory.path.stat().st_mtime > _UNSIGNED_S
    except OSError:
        return False
