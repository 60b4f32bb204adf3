"""Loads the kernels' library: chooses the build for this CPU, checks that it is of these sources, types its functions.

Loaded in the worker, when it is first needed: a role may be forked from a process that has imported this module, and
the library starts its threads with its first work. Without a library torch computes, which is slower but correct;
`Choice.note` says why, for people.
"""

import ctypes
import functools
import shutil
import sysconfig
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final, NamedTuple

from nodes.worker.ops.native.sources import DIRECTORY, builds_for, has_builds, sources_digest

TORCH: Final = "torch"
AUTO: Final = "auto"

_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "kvmesh_sources": (c_char_p, []),
    "kvmesh_set_threads": (None, [c_int]),
    "kvmesh_allocate": (c_void_p, [c_int64]),
    "kvmesh_free": (None, [c_void_p, c_int64]),
    "kvmesh_packed_bytes": (c_int64, [c_int, c_int, c_int, c_int64, c_int64]),
    "kvmesh_row_bytes": (c_int, [c_int]),
    "kvmesh_pack": (c_int, [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "kvmesh_linear": (None, [c_int, c_int, c_int, *[c_void_p] * 5, *[c_int64] * 3]),
    "kvmesh_norm": (None, [c_int, *[c_void_p] * 3, c_int64, c_int64, c_float]),
    "kvmesh_step": (None, [c_void_p, c_void_p, c_int, c_int]),
    "kvmesh_rows_scratch": (c_int64, [c_int64]),
    "kvmesh_rows": (None, [c_void_p]),
}


class Library(NamedTuple):
    """A loaded build: `name` is its instruction set, `functions` has what `_SIGNATURES` lists."""

    name: str
    functions: Any

    def set_threads(self, num_threads: int) -> None:
        """How many threads compute, the caller's included; one setting for the whole process."""
        self.functions.kvmesh_set_threads(num_threads)


class Choice(NamedTuple):
    """The build to compute with, or None, with the reason why torch computes in `note`."""

    build: Library | None
    note: str


class BuildUnfit(Exception):
    """A build cannot be used; the message says why, and what to do."""


def choose_library(wanted: str = AUTO) -> Choice:
    """The best build for this CPU, or the one that `wanted` names (`torch`: none); if there is none, says why."""
    if wanted == TORCH:
        return Choice(None, "torch kernels: set by `[roles.worker] kernels`")
    if wanted == AUTO and not has_builds():
        # No note, because the user can do nothing about an architecture other than x86-64.
        return Choice(None, "")
    names = [name for name in builds_for(cpu_flags()) if wanted in (AUTO, name)]
    if not names:
        missing = "AVX2" if wanted == AUTO else wanted.upper()
        return Choice(None, f"torch kernels: this CPU has no {missing}")
    reasons: list[str] = []
    for name in names:
        try:
            return Choice(load_build(name, path_of(name)), "")
        except BuildUnfit as error:
            reasons.append(str(error))
    return Choice(None, f"torch kernels: {reasons[0]}")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The features that programs may use on the first CPU, as the Linux kernel lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def compiler() -> str | None:
    """The C++ compiler that `make setup` would find."""
    return shutil.which("g++")


def path_of(name: str) -> Path:
    """Where the build of this name lies, if it was built."""
    return DIRECTORY / f"_{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def load_build(name: str, path: Path) -> Library:
    """The build at `path`. Raises BuildUnfit if it is missing, does not load or was built from other sources."""
    if not path.exists():
        if compiler() is None:
            raise BuildUnfit("no compiler; install g++, then make setup")
        raise BuildUnfit(f"{path.name} was not built; run make setup, and pip install -v -e . to see why it fails")
    try:
        functions = ctypes.CDLL(str(path))
        for function, (result, arguments) in _SIGNATURES.items():
            found = getattr(functions, function)
            found.restype, found.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BuildUnfit(f"{path.name} cannot be loaded ({error}); run make setup") from error
    # Otherwise an edited source would seem to be running, and two workers of one mesh would seem to compute alike.
    if (digest := sources_digest()) and functions.kvmesh_sources().decode() != digest:
        raise BuildUnfit(f"{path.name} was built from other sources; run make setup")
    return Library(name, functions)
