"""Builds an NCCL that accepts two ranks on one GPU, with the few functions that kvmesh uses.

    python3 -m tools.build_nccl SOURCE [--out DIR] [--arch 90] [--functions PATTERN] [--jobs N]

SOURCE is NCCL's source tree, 2.30 or newer (earlier ones refuse a second rank on a device). The NCCL that torch and
CuPy bring is not touched: the library is put into DIR, and at the end the program prints the variable by which
`tests/gpu/test_nccl_one_device.py` and `tools.gpu_check` find it. Needs nvcc, make, g++ and Python. It is for tests
only: the mesh itself gives each rank a device of its own. This program uses only Python's standard library. What it
built of 2.30.7 with CUDA 13.0 ran on an H200.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

VARIABLE: Final = "KVMESH_NCCL_LIBRARY"
LEAST: Final = (2, 30)
# Send and receive for pages; sums and gathers for tensor parallelism, as rings, which two ranks on one host use.
FUNCTIONS: Final = "SendRecv|AllReduce Sum (f32|bf16) RING *|AllGather RING *|Broadcast RING *"


class BuildError(RuntimeError):
    """NCCL cannot be built; the message says why and what to do."""


def version_of(source: Path) -> tuple[int, int, int]:
    """The version in `makefiles/version.mk`. Raises BuildError."""
    path = source / "makefiles" / "version.mk"
    if not path.exists():
        raise BuildError(f"{source} is not an NCCL source tree: {path} does not exist")
    text = path.read_text()
    found = [re.search(rf"^NCCL_{part}\s*:=\s*(\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR", "PATCH")]
    major, minor, patch = (int(one[1]) if one else 0 for one in found)
    if (major, minor) < LEAST:
        raise BuildError(f"{source} is NCCL {major}.{minor}.{patch}: two ranks on one device need 2.30 or newer")
    return major, minor, patch


def command(source: Path, out: Path, arch: int, functions: str, jobs: int, cuda_home: Path) -> list[str]:
    """The command line of make."""
    return [
        "make",
        "-C",
        str(source),
        f"-j{jobs}",
        "src.build",
        f"BUILDDIR={out}",
        f"CUDA_HOME={cuda_home}",
        f"NVCC_GENCODE=-gencode=arch=compute_{arch},code=sm_{arch}",
        f"ONLY_FUNCS={functions}",
    ]


def cuda_home() -> Path:
    """The folder above nvcc. Raises BuildError."""
    given = os.environ.get("CUDA_HOME")
    if given:
        return Path(given)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BuildError("there is no nvcc on the PATH: install the CUDA toolkit, or set CUDA_HOME")
    for place in (Path(nvcc).resolve().parents[1], Path("/usr/local/cuda")):
        if (place / "include" / "cuda_runtime.h").exists():
            return place
    raise BuildError(f"CUDA's headers are not beside {nvcc}: set CUDA_HOME to the toolkit's folder")


def library_in(out: Path) -> Path:
    """The library that was built. Raises BuildError."""
    library = out / "lib" / "libnccl.so.2"
    if not library.exists():
        raise BuildError(f"make succeeded, but {library} does not exist")
    return library.resolve()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/nccl"))
    parser.add_argument("--arch", type=int, default=90, help="compute capability of the device: 90 for H100 and H200")
    parser.add_argument("--functions", default=FUNCTIONS, help="value of NCCL's ONLY_FUNCS")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    try:
        version = ".".join(map(str, version_of(args.source)))
        out = args.out.resolve()
        words = command(args.source.resolve(), out, args.arch, args.functions, args.jobs, cuda_home())
        print(f"NCCL {version}: {' '.join(words)}", flush=True)
        code = subprocess.run(words).returncode
        if code:
            raise BuildError(f"make exited with {code}")
        library = library_in(out)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"export {VARIABLE}={library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
