"""Two decode groups: the streams of a killed worker go on in the other group at once, and no text shows it."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.chaos_mesh import UNRATIONED, ChaosMesh, started
from tests.chaos.streams import NUM_CLIENTS, Answer, Wave, asking, differences

pytestmark = [pytest.mark.process, pytest.mark.chaos]

MESH = ("--model", "tiny", "--pooling", "mean", "--prefill", "1", "--decode", "2", "--detokenizers", "2")
WORKERS = ("worker-decode-0", "worker-decode-1")
MOVES = 'mesh_gateway_moves_total{actor="gateway-0",role="gateway"}'


@pytest.fixture(scope="module")
def mesh() -> Iterator[ChaosMesh]:
    with started(*MESH, **UNRATIONED) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(mesh: ChaosMesh) -> list[Answer]:
    answers = asyncio.run(Wave(mesh.port, asking("undisturbed")).run())
    assert not [answer.broken for answer in answers if answer.broken]
    return answers


@pytest.mark.parametrize("workers", [WORKERS[:1], WORKERS[1:], WORKERS], ids=" and ".join)
def test_killed_under_streams(mesh: ChaosMesh, undisturbed: list[Answer], workers: tuple[str, ...]) -> None:
    before, num_moves = mesh.settled(), mesh.metrics()[MOVES]

    def blow() -> None:
        for worker in workers:
            mesh.strike(worker)

    at = int(0.4 * sum(answer.num_events for answer in undisturbed))
    wave = Wave(mesh.port, asking(f"killed {workers}"), at=at, blow=blow)
    answers = asyncio.run(wave.run())
    after = mesh.settled()
    for worker in workers:
        assert after.epochs[worker] == before.epochs[worker] + 1, f"{worker} did not die once"
    assert wave.num_hit >= NUM_CLIENTS // 2, "too few streams ran when the blow fell"
    assert not differences(answers, undisturbed)
    if len(workers) == 1:
        # With both dead at once there is nowhere to go, or it is dead by the time it is asked.
        assert mesh.metrics()[MOVES] > num_moves, "nothing moved"
    mesh.wait_until_nothing_is_held(15.0)
