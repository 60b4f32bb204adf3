"""The image that tests run: built once for given inputs, and tagged with their hash."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPOSITORY = "localhost/kvmesh-test"

BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.11-slim")

DEPENDENCIES = [ROOT / "Containerfile", ROOT / "constraints.txt"]
INPUTS = [
    *DEPENDENCIES,
    *(ROOT / name for name in (".containerignore", "pyproject.toml", "README.md", "setup.py", "MANIFEST.in")),
]
PACKAGES = ("mesh", "kvstore", "nodes", "cli")
NOT_COPIED = {".pyc", ".so"}

BUILD_TIMEOUT_S = 1800.0


class NoContainers(Exception):
    """No container can run here; the message says why."""


def podman(*arguments: str, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a podman command to its end. If it fails, raises AssertionError with its output."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, f"podman {shlex.join(arguments)}: {done.returncode}\n{done.stderr}"
    return done


def base_image() -> str:
    """The id of the base image. Raises NoContainers if podman or the image is missing here: nothing is fetched."""
    if shutil.which("podman") is None:
        raise NoContainers("podman is not installed")
    found = podman("image", "inspect", "--format", "{{.Id}}", BASE_IMAGE, check=False)
    if found.returncode != 0:
        raise NoContainers(f"podman has no image {BASE_IMAGE}: podman pull {BASE_IMAGE}, or set BASE_IMAGE")
    return found.stdout.strip()


def _digest(base: str, files: list[Path]) -> str:
    found = hashlib.sha256(base.encode())
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def image_name(base: str) -> str:
    """The name of the image that is built from the sources as they are now."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*")) if path.is_file()]
    return f"{REPOSITORY}:{_digest(base, [*INPUTS, *(path for path in files if path.suffix not in NOT_COPIED)])}"


def dependencies_name(base: str) -> str:
    """The name of the image part without the project, which takes minutes and a network to build."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return f"{REPOSITORY}-dependencies:{_digest(f'{base} {asked}', DEPENDENCIES)}"


def is_built(name: str) -> bool:
    """Whether podman has it."""
    return podman("image", "exists", name, check=False).returncode == 0


def build(base: str) -> None:
    """Build the image, with CONTAINER_BUILD_ARGS added to `podman build`; images of earlier sources lose their tags."""
    arguments = ["build", "--layers", *shlex.split(os.environ.get("CONTAINER_BUILD_ARGS", ""))]
    arguments += ["--build-arg", f"BASE_IMAGE={BASE_IMAGE}"]
    earlier = podman("images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY).stdout.split()
    parts = (["--target", "dependencies", "--tag", dependencies_name(base)], ["--tag", image_name(base)])
    for options in parts:
        podman(*arguments, *options, str(ROOT), timeout_s=BUILD_TIMEOUT_S)
    used = podman("ps", "--all", "--format", "{{.Image}}").stdout.split()
    for name in set(earlier) - {image_name(base), *used}:
        podman("untag", name, name, check=False)
