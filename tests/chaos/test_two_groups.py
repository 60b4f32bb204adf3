"""Two decode groups: the streams of a killed worker go on in the other group at once, and no text shows it."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.chaos_mesh import UNRATIONED, ChaosMesh, started
from tests.chaos.streams import NUM_CLIENTS, Answer, Wave, asking, bodies, differences

pytestmark = [pytest.mark.process, pytest.mark.chaos]

GROUPS = ("--prefill", "1", "--decode", "2", "--detokenizers", "2")
ECHO = "echo?step_ms=10"
WORKERS = ("worker-decode-0", "worker-decode-1")
MOVES = 'mesh_gateway_moves_total{actor="gateway-0",role="gateway"}'


@pytest.fixture(scope="module")
def mesh() -> Iterator[ChaosMesh]:
    with started("--model", "tiny", "--pooling", "mean", *GROUPS, **UNRATIONED) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(mesh: ChaosMesh) -> list[Answer]:
    answers = asyncio.run(Wave(mesh.port, asking("undisturbed")).run())
    assert not [answer.broken for answer in answers if answer.broken]
    return answers


def endure(mesh: ChaosMesh, bodies: list[dict[str, object]], undisturbed: list[Answer], *workers: str) -> int:
    """A wave in whose middle these workers are killed. Returns how many requests moved."""
    before, num_moves = mesh.settled(), mesh.metrics()[MOVES]

    def blow() -> None:
        for worker in workers:
            mesh.strike(worker)

    wave = Wave(mesh.port, bodies, at=int(0.4 * sum(answer.num_events for answer in undisturbed)), blow=blow)
    answers = asyncio.run(wave.run())
    after = mesh.settled()
    for worker in workers:
        assert after.epochs[worker] == before.epochs[worker] + 1, f"{worker} did not die once"
    assert wave.num_hit >= NUM_CLIENTS // 2, "too few streams ran when the blow fell"
    assert not differences(answers, undisturbed)
    mesh.wait_until_nothing_is_held(15.0)
    return int(mesh.metrics()[MOVES] - num_moves)


# One of them alone dies in `test_what_a_dead_worker_had_moves`, in CI.
_SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in (WORKERS[:1], WORKERS[1:])]


@pytest.mark.parametrize("workers", [*_SLOW, WORKERS], ids=" and ".join)
def test_killed_under_streams(mesh: ChaosMesh, undisturbed: list[Answer], workers: tuple[str, ...]) -> None:
    # How many move is not asked: a busy machine computes so slowly that the worker, which is forked, is back sooner.
    endure(mesh, asking(f"killed {workers}"), undisturbed, *workers)


def test_what_a_dead_worker_had_moves() -> None:
    """A model that takes its time for a step, but none for a prompt: a worker's start takes longer than any move."""
    with started("--model", ECHO, *GROUPS, **UNRATIONED) as mesh:
        known = asyncio.run(Wave(mesh.port, bodies("undisturbed", model="echo")).run())
        moved = [endure(mesh, bodies(worker, model="echo"), known, worker) for worker in WORKERS]
        assert min(moved) > 0, moved
