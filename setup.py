"""Builds the CPU kernels, if there is a compiler; all else is said in pyproject.toml.

One extension for each instruction set, of the same sources. They are no Python modules: ctypes loads them. Each is
optional, since torch computes without them; what went wrong then is seen by `pip install -v -e .` only, and said by
the worker (see nodes/worker/ops/native/builds.py).
"""

import copy
import runpy

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SOURCES = runpy.run_path("nodes/worker/ops/native/sources.py")


class BuildKernels(build_ext):
    """All instruction sets at once."""

    def initialize_options(self) -> None:
        """As many at a time as there are."""
        super().initialize_options()
        self.parallel = True

    def build_extension(self, ext: Extension) -> None:
        """In a folder of its own: the extensions are of one source, and would overwrite each other's object file."""
        own = copy.copy(self)
        own.build_temp = f"{self.build_temp}/{ext.name}"
        super(BuildKernels, own).build_extension(ext)


def extension(name: str, flags: tuple[str, ...]) -> Extension:
    """The kernels for one instruction set."""
    directory = "nodes/worker/ops/native"
    return Extension(
        f"nodes.worker.ops.native._{name}",
        [f"{directory}/kernels.cpp"],
        depends=[f"{directory}/{path.name}" for path in _SOURCES["source_files"]()] + [f"{directory}/sources.py"],
        define_macros=[("KVMESH_SOURCES", '"{}"'.format(_SOURCES["sources_digest"]()))],
        extra_compile_args=[*_SOURCES["FLAGS"], *flags],
        extra_link_args=["-pthread"],
        # Linked as C, for nothing of the C++ library is used: GCC knows -nostdlib++ from 13 on only.
        language="c",
        optional=True,
    )


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[extension(name, build.flags) for name, build in _SOURCES["BUILDS"].items()]
    if _SOURCES["has_builds"]()
    else [],
)
