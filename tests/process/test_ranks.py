"""Meshes of groups of two tensor-parallel ranks: they say what one worker says, and a rank that dies loses nothing."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from tests.chaos.chaos_mesh import UNRATIONED, ChaosMesh, started
from tests.chaos.streams import Answer, Wave, bodies, differences
from tests.process.device_mesh import pages_moved

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.timeout(300)]

# float32 and greedy: what the order of a sum changes does not show in which token is the likeliest.
TINY = ("--model", "tiny", "--dtype", "float32", "--local-prefill-max", "0")
NUM_CLIENTS = 6


def asked(salt: str) -> list[dict]:
    return [{**body, "temperature": 0.0} for body in bodies(salt, num_requests=10, max_tokens=48)]


def ask(mesh: ChaosMesh, salt: str, **options) -> tuple[list[Answer], Wave]:
    wave = Wave(mesh.port, asked(salt), num_clients=NUM_CLIENTS, **options)
    return asyncio.run(wave.run()), wave


def rank_mesh(*options: str) -> AbstractContextManager[ChaosMesh]:
    return started(*TINY, *options, **UNRATIONED)


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """What groups of one worker answer."""
    with rank_mesh() as mesh:
        answers, _ = ask(mesh, "alone")
    assert not [answer.broken for answer in answers if answer.broken]
    assert len({answer.text for answer in answers}) > len(answers) // 2, "texts that are all alike prove nothing"
    return answers


@pytest.fixture(scope="module")
def ranks() -> Iterator[ChaosMesh]:
    with rank_mesh("--tp", "2") as mesh:
        yield mesh


def test_two_ranks_say_what_one_worker_says(ranks: ChaosMesh, alone: list[Answer]) -> None:
    before = pages_moved(ranks)
    answers, _ = ask(ranks, "ranks")
    assert not differences(answers, alone)
    assert pages_moved(ranks) > before, "pages did move"
    assert set(ranks.host.ps()) >= {"worker-decode-0", "worker-decode-0.1", "worker-prefill-0", "worker-prefill-0.1"}


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker-decode-0.1", signal.SIGKILL),
        pytest.param("worker-decode-0.1", signal.SIGSTOP, marks=pytest.mark.slow),
        ("worker-prefill-0", signal.SIGKILL),
        pytest.param("worker-decode-0", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("worker-decode-0", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("worker-prefill-0.1", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("worker-prefill-0.1", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_takes_its_group_and_no_request(
    ranks: ChaosMesh, alone: list[Answer], victim: str, number: signal.Signals
) -> None:
    before = ranks.settled()
    share = 0.0 if "prefill" in victim else 0.4
    at = int(share * sum(answer.num_events for answer in alone))
    answers, wave = ask(ranks, f"{victim} {number}", at=at, blow=lambda: ranks.strike(victim, number))
    after = ranks.settled(60.0)
    assert wave.num_hit >= NUM_CLIENTS // 2, "too few streams ran when the blow fell"
    assert not differences(answers, alone)
    restarted = {actor_id for actor_id, epoch in after.epochs.items() if epoch > before.epochs[actor_id]}
    group = victim.removesuffix(".1")
    assert restarted == {group, f"{group}.1"}, "its group, and nobody else"


@pytest.mark.slow
def test_groups_are_renewed_while_they_serve(ranks: ChaosMesh, alone: list[Answer]) -> None:
    """One actor after the other, each of which takes its group with it."""
    before = ranks.settled()
    restarting: list[subprocess.Popen[bytes]] = []

    def blow() -> None:
        command = ranks.host.command("restart", "worker")
        restarting.append(subprocess.Popen(command, env=ranks.host.environment, stdout=subprocess.DEVNULL))

    answers, _ = ask(ranks, "renewed", at=20, blow=blow)
    [restart] = restarting
    assert restart.wait(120) == 0
    after = ranks.settled(60.0)
    assert not differences(answers, alone)
    restarted = {actor_id for actor_id, epoch in after.epochs.items() if epoch > before.epochs[actor_id]}
    assert restarted == {one for one in after.epochs if one.startswith("worker")}


# In CI such meshes are simulated, and pages cut and put together by tests of transfers.
@pytest.mark.slow
@pytest.mark.parametrize("options", [("--prefill-tp", "2"), ("--decode-tp", "2")], ids=["2 to 1", "1 to 2"])
def test_pages_move_between_groups_of_unequal_size(alone: list[Answer], options: tuple[str, ...]) -> None:
    with rank_mesh(*options) as mesh:
        answers, _ = ask(mesh, "unequal")
        assert not differences(answers, alone)
        samples = mesh.metrics()
        assert pages_moved(mesh) > 0
        assert not [name for name, n in samples.items() if name.startswith("mesh_kv_transfer_failures_total") and n]
