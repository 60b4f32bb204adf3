"""What the kernels are built from and for: read by `setup.py`, and by `builds.py` to check that a build is current.

Needs nothing but the standard library, because it runs before the project is installed.
"""

import hashlib
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

DIRECTORY: Final = Path(__file__).parent


class Build(NamedTuple):
    """One instruction set: the compiler's flags, and the names in /proc/cpuinfo that a CPU must have for it.

    `slow_with`: names that tell a CPU on which every other build that it runs is faster.
    """

    flags: tuple[str, ...]
    needs: tuple[str, ...]
    slow_with: tuple[str, ...] = ()


_AVX2: Final = ("avx2", "fma", "bmi2")
_AVX512: Final = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
BUILDS: Final[dict[str, Build]] = {
    # Intel's CPUs since Sapphire Rapids have tiles (AMX) for bfloat16, and a slow instruction for pairs: one every two
    # cycles, while float32 multiply-adds come at two a cycle. Emerald Rapids, one core: 87 and 175 GFLOP/s. A step of
    # the 0.5B shape took 1.05 to 1.13 times as long at 1 to 16 rows as with the build without it, 1.6 times at 128.
    # AMD's Zen 4 and 5 have no tiles, and Zen 4 does 231 and 106. A hypervisor may hide the tiles; arithmetic in
    # float16 came with them. So seen, 1,000 tokens of that shape took 4.85 s with this build, 3.07 s with the next.
    "avx512_bf16": Build(
        ("-march=x86-64-v4", "-mavx512bf16"), (*_AVX512, "avx512_bf16"), slow_with=("amx_bf16", "avx512_fp16")
    ),
    "avx512": Build(("-march=x86-64-v4",), _AVX512),
    "avx2": Build(("-march=x86-64-v3",), _AVX2),
}
"""Best first, on most CPUs. Never `-march=native`: a build may run on another machine than it was made on."""

FLAGS: Final = (
    "-std=c++17",
    "-O3",
    # Fused operations are written out: the compiler's own choice would differ between builds.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    # It warns about vectors as arguments of functions, which no other library calls here.
    "-Wno-psabi",
)


def has_builds() -> bool:
    """Whether the kernels are written for this machine's architecture."""
    return platform.machine() in ("x86_64", "AMD64")


def builds_for(cpu_flags: Collection[str]) -> list[str]:
    """The builds that a CPU with these flags runs, the fastest first.

    Decided by flags alone, never by a measurement: workers on equal machines must compute equal bits.
    """
    names = [name for name, build in BUILDS.items() if all(flag in cpu_flags for flag in build.needs)]
    return sorted(names, key=lambda name: any(flag in cpu_flags for flag in BUILDS[name].slow_with))


def source_files() -> list[Path]:
    """The translation unit and its headers; empty if only the builds are installed."""
    return sorted([*DIRECTORY.glob("*.cpp"), *DIRECTORY.glob("*.h")])


def sources_digest() -> str:
    """Equal for equal sources and flags; empty if there are no sources."""
    files = source_files()
    if not files:
        return ""
    digest = hashlib.blake2b(repr((BUILDS, FLAGS)).encode(), digest_size=16)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
