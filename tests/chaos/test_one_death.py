"""Each role killed once, and hung once, while clients stream: nobody can tell from an answer that anything happened."""

import asyncio
import signal
import time

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

# The same heartbeats find a hang of any role, and `test_killed` has each role's death: roles that streams wait for and
# one that nobody waits for are the quick slice. Every role hangs in seeds of tests/simulation.
HANG_IN_CI = {"registry", "decode worker", "prefill scheduler"}


@pytest.mark.parametrize("role", ROLES)
def test_killed(mesh: ChaosMesh, undisturbed: list[Answer], role: str) -> None:
    recomputed = endure(mesh, undisturbed, [role], MOMENTS[role], f"killed {role}")
    assert sum(recomputed.values()) <= RECOMPUTED_MAX.get(role, 0), recomputed


@pytest.mark.parametrize(
    "role", [pytest.param(role, marks=() if role in HANG_IN_CI else pytest.mark.slow) for role in ROLES]
)
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
