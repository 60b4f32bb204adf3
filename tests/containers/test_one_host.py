"""`meshctl` is process 1 of a container: it serves, answers health checks, and drains when it is told to stop."""

import asyncio
import json

import pytest

from benchmarks.containers.image import podman
from benchmarks.containers.world import World, wait_until
from tests.chaos.streams import Answer, Wave, bodies

# In CI too, where podman and the image's dependencies are: see `image`.
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

HEALTH = "meshctl probe {} --timeout 20"


def test_a_mesh_in_one_container(world: World) -> None:
    options = (
        "--publish",
        "127.0.0.1::8000",
        "--health-cmd",
        HEALTH.format("generate"),
        "--health-interval",
        "disable",
    )
    one = world.container("one", options=options)
    wait_until(one.is_healthy, "a token is generated")
    for question in ("live", "ready", "generate"):
        assert one.meshctl("probe", question).stdout.startswith(f"{question}: ")
    assert one.exec("id", "-u").stdout.strip() != "0"
    processes = one.ps()
    assert processes["supervisor"]["pid"] == 1
    assert "torch kernels" not in one.logs(), "the kernels are in the image"

    # Whoever loses its parent is process 1's child from then on.
    one.exec("sh", "-c", "sleep 0.1 &")
    # Some end while they are listed.
    look = ("sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null")
    wait_until(lambda: " Z " not in one.exec(*look, check=False).stdout, "orphans are reaped")

    answers: list[Answer] = []

    async def stop_under_streams() -> int:
        # The blow comes from within the wave; stopping takes as long as the streams do.
        stopping: list[asyncio.Task[int]] = []
        loop = asyncio.get_running_loop()
        wave = Wave(
            one.port(),
            bodies("drained", num_requests=16),
            at=64,
            blow=lambda: stopping.append(loop.create_task(asyncio.to_thread(one.stop))),
        )
        answers.extend(await wave.run())
        return await stopping[0]

    assert asyncio.run(stop_under_streams()) == 0
    assert not [answer.broken for answer in answers if answer.broken], "streams end before their container does"
    assert one.logs().rstrip().endswith("stopped")


@pytest.mark.containers
@pytest.mark.timeout(900)
def test_what_the_image_says_of_itself(image: str) -> None:
    config = json.loads(podman("image", "inspect", image).stdout)[0]["Config"]
    assert config["Entrypoint"] == ["meshctl"]
    assert config["User"] not in ("", "0", "root")
    assert podman("run", "--rm", image, "version").stdout.startswith("meshctl")
    assert podman("run", "--rm", "--entrypoint", "sh", image, "-c", "command -v g++ || true").stdout == ""
