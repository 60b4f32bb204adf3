"""Each role killed once, and hung once, while clients stream: nobody can tell from an answer that anything happened."""

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_mesh import GATEWAY, RECOMPUTED_MAX, ROLES, ChaosMesh, endure
from tests.chaos.streams import NUM_CLIENTS, Answer, Wave, bodies

pytestmark = [pytest.mark.process, pytest.mark.chaos]

MOMENTS = {
    "registry": 0.3,
    "tokenizer": 0.0,
    "prefill scheduler": 0.0,
    "decode scheduler": 0.4,
    "prefill worker": 0.0,
    "decode worker": 0.4,
    "detokenizer": 0.3,
    "kv_agent": 0.0,
}
"""The share of an undisturbed wave's events after which the blow falls. At 0, most prompts are being computed."""

PAIRS = [("decode scheduler", "decode worker"), ("prefill worker", "kv_agent"), ("registry", "tokenizer")]
"""A few of those that `test_many_deaths.py` goes through: two that need each other."""

# Every role dies and hangs in seeds of tests/simulation, and `tests/process/test_deaths.py` kills each process once. In
# CI are those whose death takes away what streams are made of; and one hang, since the same heartbeats find any.
KILLED_IN_CI = {"decode scheduler", "prefill worker", "decode worker", "detokenizer", "kv_agent"}
HANG_IN_CI = {"prefill scheduler"}


def _slice(chosen: set[str]) -> list[object]:
    return [pytest.param(role, marks=() if role in chosen else pytest.mark.slow) for role in ROLES]


@pytest.mark.parametrize("role", _slice(KILLED_IN_CI))
def test_killed(mesh: ChaosMesh, undisturbed: list[Answer], role: str) -> None:
    recomputed = endure(mesh, undisturbed, [role], MOMENTS[role], f"killed {role}")
    assert sum(recomputed.values()) <= RECOMPUTED_MAX.get(role, 0), recomputed


@pytest.mark.parametrize("role", _slice(HANG_IN_CI))
def test_hung(mesh: ChaosMesh, undisturbed: list[Answer], role: str) -> None:
    recomputed = endure(mesh, undisturbed, [role], MOMENTS[role], f"hung {role}", signal.SIGSTOP)
    assert sum(recomputed.values()) <= RECOMPUTED_MAX.get(role, 0), recomputed


# Only the first in CI: the other two take the same paths as their halves, which `test_killed` has one by one.
@pytest.mark.parametrize(
    "roles", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:])], ids=" and ".join
)
def test_killed_together(mesh: ChaosMesh, undisturbed: list[Answer], roles: tuple[str, str]) -> None:
    endure(mesh, undisturbed, list(roles), 0.3, f"killed {roles}")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_killed_gateway_leaves_nothing_behind(mesh: ChaosMesh, share: float) -> None:
    mesh.settled()
    struck_at: list[float] = []

    def blow() -> None:
        mesh.strike(GATEWAY)
        struck_at.append(time.monotonic())

    asked = bodies(f"gateway {share}", NUM_CLIENTS, max_tokens=512)
    wave = Wave(mesh.port, asked, at=int(share * NUM_CLIENTS * 256), blow=blow)
    answers = asyncio.run(wave.run())
    assert wave.num_hit == NUM_CLIENTS
    assert all(answer.failure in ("reset", "ended_early") for answer in answers), answers
    mesh.wait_until_nothing_is_held(struck_at[0] + 10.0 - time.monotonic())
    mesh.settled()


CHAOS = ("chaos", "--seed", "1", "--yes")


@contextlib.contextmanager
def running(mesh: ChaosMesh, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`meshctl chaos`, as people start it; it ends with the test."""
    command = mesh.host.command(*arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=mesh.host.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as one:
        try:
            yield one
        finally:
            one.kill()


def stopped(mesh: ChaosMesh) -> list[str]:
    """Who is stopped now, by what the kernel says."""
    found = []
    for actor_id, pid in mesh.pids().items():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.append(actor_id)
    return found


def test_chaos_ends_at_ctrl_c_with_a_report_and_nobody_stays_stopped(mesh: ChaosMesh) -> None:
    before = mesh.settled()
    options = ("--blows", "stop", "--only", "registry", "--every", "0.5", "--seconds", "600", "-o", "json")
    with running(mesh, *CHAOS, *options) as chaos:
        mesh.host.wait_until(lambda: stopped(mesh) == ["registry"], "one is stopped")
        chaos.send_signal(signal.SIGINT)
        out, _ = chaos.communicate(timeout=20)
        assert stopped(mesh) == []
    assert chaos.returncode == 130
    report = json.loads(out)
    assert not report["failed"]
    assert report["total"]["lost"] == report["total"]["different"] == report["num_deaths"] == 0
    assert {blow["target"] for blow in report["blows"]} == {"registry"}
    assert mesh.settled().epochs == before.epochs


def test_chaos_says_what_was_lost_and_who_died_without_its_doing(mesh: ChaosMesh) -> None:
    mesh.settled()
    # Not the gateway, too: while one that was struck settles, connections may break, and a slow machine kills it then.
    options = ("--blows", "garbage", "--only", "registry", "--every", "0.5", "--seconds", "6")
    with running(mesh, *CHAOS, *options) as chaos:
        # Each blow is told once the mesh has settled after it; before the first one, nothing is lost.
        while " s  garbage " not in chaos.stderr.readline():
            assert chaos.poll() is None
        mesh.strike(GATEWAY)
        out, _ = chaos.communicate(timeout=60)
    assert chaos.returncode == 1, out
    assert "died without being struck: gateway-0: 1 times, last: signal 9 (SIGKILL)" in out
    assert "lost: 0" not in out
    assert "example: after" in out
    mesh.settled()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("only", ["", "gateway,worker"])
def test_a_minute_of_chaos(mesh: ChaosMesh, only: str) -> None:
    mesh.settled()
    done = mesh.host.meshctl(*CHAOS, "--seconds", "60", "--only", only, "-o", "json", timeout_s=250)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["total"]["lost"] == report["total"]["different"] == 0
    assert report["no_promise"] == report["unsettled"] == ""
    assert report["held"] == {}
    assert sum(blow["landed"] for blow in report["blows"]) >= 15
    assert {blow["kind"] for blow in report["blows"]} == {"kill", "stop", "garbage", "slow"}
    assert report["num_deaths"] > 3
    assert report["total"]["sent"] > 100
