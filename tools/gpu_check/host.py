"""What the host has, the environment that steps run in, and running a step within its time limit."""

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NEEDED: Final = (
    "torch", "numpy", "safetensors", "tokenizers", "jinja2", "transformers", "pytest", "hypothesis", "pyzmq", "msgspec",
    "uvloop", "typer", "structlog", "llguidance", "httptools", "prometheus-client",
    "flashinfer-python", "apache-tvm-ffi", "nvidia-ml-py", "requests", "tqdm", "filelock", "packaging", "ninja",
)  # fmt: skip
"""Distributions that tests, benchmarks and FlashInfer import."""
EITHER: Final = ("cupy-cuda13x", "cupy-cuda12x")
WELCOME: Final = ("pytest-timeout", "torch-memory-saver", "psutil")
_END_S: Final = 5.0
_UNPACKED: Final = ".unpacked"
_MARK: Final = "GPU_CHECK_STEP"


def versions(path: str) -> dict[str, str]:
    """Versions of all that is needed, searched in `path` (as PYTHONPATH) first; `missing` for what is not there."""
    places = [part for part in path.split(os.pathsep) if part] + sys.path
    found = {"python": sys.version.split()[0]}
    found |= {name: _version(name, places) or "missing" for name in NEEDED}
    cupy = next((f"{name} {version}" for name in EITHER if (version := _version(name, places))), "missing")
    found["cupy"] = cupy
    found |= {name: _version(name, places) or "not there" for name in WELCOME}
    found["nvcc"] = _said(["nvcc", "--version"])
    found["device"] = _said(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    return found


def environment(root: Path, site: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Variables of all steps: the checkout and the wheels on the path, and settings for FlashInfer's compiler."""
    filled = dict(given)
    parts = [str(root), *([str(site)] if site is not None else []), given.get("PYTHONPATH", "")]
    filled["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    home = cuda_home(given)
    if home is not None:
        filled["CUDA_HOME"] = str(home)
    filled.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    filled.setdefault("TOKENIZERS_PARALLELISM", "false")
    filled.setdefault("HF_HUB_OFFLINE", "1")
    # A mesh that does not get ready must say so before its step's time is over.
    filled.setdefault("GPU_CHECK_READY_S", "100")
    filled["PYTHONUNBUFFERED"] = "1"
    return filled


def cuda_home(given: Mapping[str, str]) -> Path | None:
    """The folder with CUDA's compiler and its headers; None if it cannot be found.

    FlashInfer takes the folder above the `nvcc` that it finds, which has no headers if that is a link or a script.
    """
    nvcc = shutil.which("nvcc", path=given.get("PATH"))
    places = [Path(given["CUDA_HOME"])] if given.get("CUDA_HOME") else []
    places += [Path(nvcc).resolve().parents[1], Path(nvcc).parents[1]] if nvcc is not None else []
    places += [Path("/usr/local/cuda"), *(Path(part) / "nvidia/cu13" for part in sys.path)]
    return next(
        (one for one in places if (one / "bin/nvcc").exists() and (one / "include/cuda_runtime.h").exists()), None
    )


def site_for(directory: Path) -> Path:
    """Where the wheels of `directory` are unpacked: the same place each time.

    FlashInfer compiles a kernel again if its headers are now in another folder, or newer than the kernel.
    """
    names = ",".join(sorted(path.name for path in directory.glob("*.whl")))
    mark = hashlib.blake2b(f"{os.getuid()} {names}".encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"kvmesh-gpu-check-{mark}"


def install_wheels(directory: Path, site: Path) -> str:
    """Unpack the wheels of `directory` into `site`, nothing else and without a network; returns an error, or nothing.

    A folder that was unpacked completely before stays as it is.
    """
    wheels = sorted(str(path) for path in directory.glob("*.whl"))
    if not wheels:
        return f"there are no wheels in {directory}"
    done_before = site / _UNPACKED
    if done_before.exists():
        return ""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    done = subprocess.run([*command, "--target", str(site), *wheels], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"pip: {' '.join(done.stderr.split())[-500:]}"
    done_before.touch()
    return ""


def run(arguments: list[str], root: Path, variables: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run `python arguments` with its output in `log`; returns its exit code, or None if it took too long.

    Everything that it started is killed in any case: its process group, and processes in sessions of their own, as
    meshes have, which are recognised by a variable in their environment.
    """
    mark = f"{_MARK}={os.getpid()}-{time.monotonic_ns()}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=root,
            env=dict(variables) | dict([mark.split("=")]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # Some end what they have started when they get SIGTERM.
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            return None
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes whose environment has `mark`, a whole `NAME=value`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def pytest_options(has_timeout: bool) -> list[str]:
    """Options that replace those of pyproject.toml: another host's packages may warn, or lack pytest-timeout."""
    if has_timeout:
        return ["-W", "default"]
    return [
        "-W",
        "default",
        "-o",
        "addopts=--import-mode=importlib -ra",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
    ]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _version(name: str, places: list[str]) -> str | None:
    for found in importlib.metadata.distributions(name=name, path=places):
        return found.version
    return None


def _said(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    lines = [line.strip() for line in said if line.strip()]
    release = [line for line in lines if "release" in line]
    return (release or lines or ["missing"])[0]
