"""The builds of the native kernels that this machine runs, made first where `make setup` has not; and a wide one.

The kernels for vectors of 16 numbers are also compiled for AVX2, in two halves, so that their logic runs anywhere.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nodes.worker.ops.native.builds import Library, choose_library, compiler, cpu_flags, load_build
from nodes.worker.ops.native.sources import BUILDS, DIRECTORY, FLAGS, builds_for, has_builds, sources_digest

ROOT = Path(__file__).parents[3]
WIDE = "wide"
RUNNABLE = builds_for(cpu_flags()) if has_builds() else []
NAMES = [*RUNNABLE, *([WIDE] if RUNNABLE == ["avx2"] else [])]


def resident_mb() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@functools.cache
def build_all() -> None:
    """Skips where there is no compiler, and only there."""
    if compiler() is None:
        pytest.skip("no compiler")
    if choose_library().build is None:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@functools.cache
def library_of(name: str) -> Library:
    build_all()
    if name != WIDE:
        found = choose_library(name)
        assert found.build is not None, found.note
        return found.build
    path = Path(tempfile.mkdtemp()) / "wide.so"
    flags = [*FLAGS, *BUILDS["avx2"].flags, "-O1", "-DLANES=16", f'-DKVMESH_SOURCES="{sources_digest()}"']
    subprocess.run(["g++", *flags, "-shared", "-fPIC", DIRECTORY / "kernels.cpp", "-o", path], check=True)
    return load_build(WIDE, path)
