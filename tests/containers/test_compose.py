"""compose.yaml as it is committed, with nothing beside it but deploy/: from `up` to a streamed answer, and `down`."""

import asyncio
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.containers.image import ROOT, podman
from benchmarks.containers.world import wait_until
from mesh.testing.ports import free_port
from tests.chaos.streams import Answer, bodies, stream

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

COMPOSE = shutil.which("podman-compose") or shutil.which("podman-compose", path=str(Path(sys.executable).parent))

Compose = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def compose(image: str, tmp_path: Path, port: int) -> Iterator[Compose]:
    """podman-compose in a folder that has what a clone has, with the image built already."""
    if COMPOSE is None:
        pytest.skip("podman-compose is not installed: pip install podman-compose")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    for name in ("compose.yaml", "compose.gpu.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    project = f"kvmesh-test-{uuid.uuid4().hex[:8]}"
    environment = os.environ | {"IMAGE": image, "PORT": str(port)}

    def run(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(COMPOSE), "--project-name", project, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    try:
        yield run
    finally:
        run("down", "--volumes", "--timeout", "5")
        left = podman("ps", "--all", "--quiet", "--filter", f"name={project}").stdout.split()
        podman("rm", "--force", "--time", "0", *left, check=False)
        for kind in ("network", "volume"):
            names = podman(kind, "ls", "--quiet", "--filter", f"name={project}").stdout.split()
            podman(kind, "rm", "--force", *names, check=False)
            left += names
        assert not left, "down leaves nothing"


def test_up_answers_and_down_leaves_nothing(compose: Compose, port: int) -> None:
    done = compose("up", "--detach")
    assert done.returncode == 0, done.stderr
    # Not one after the other: hosts may start in any order.
    for host in ("head", "prefill", "decode"):
        wait_until(
            lambda host=host: compose("exec", "-T", host, "meshctl", "probe", "generate").returncode == 0,
            f"{host} is ready",
            120.0,
        )
    answer = Answer()
    asyncio.run(stream(port, bodies("compose", 1)[0], answer, lambda: None))
    assert not answer.broken
    assert answer.text
    assert answer.num_events > 1
    listed = compose("exec", "-T", "head", "meshctl", "ps").stdout
    assert "links between hosts are encrypted" in listed
    for actor in ("supervisor.head", "worker-prefill-0.prefill", "worker-decode-0.decode"):
        assert actor in listed
    for name in podman("ps", "--format", "{{.Names}}", "--filter", "label=com.docker.compose.service").stdout.split():
        if "kvmesh-test-" in name:
            assert podman("healthcheck", "run", name, check=False).returncode == 0, name
    done = compose("down", timeout_s=200.0)
    assert done.returncode == 0, done.stderr


def test_the_override_for_gpus_is_merged(compose: Compose) -> None:
    """It has not run on a GPU; that it fits the file that it is laid over can be seen all the same."""
    done = compose("--file", "compose.yaml", "--file", "compose.gpu.yaml", "config")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    devices = {name: one.get("deploy", {}).get("resources", {}) for name, one in services.items()}
    assert [name for name in services if devices[name]] == ["decode", "prefill"]
    assert {one["image"].endswith("-gpu") for name, one in services.items() if devices[name]} == {True}
    assert {one["shm_size"] for name, one in services.items() if devices[name]} == {"1gb"}, (
        "laid over, not in its place"
    )
