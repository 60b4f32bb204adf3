"""Every role over and over, by death and by hang, and any two at once."""

import itertools
import random
import signal

import pytest

from tests.chaos.chaos_mesh import RECOMPUTED_MAX, ROLES, ChaosMesh, endure
from tests.chaos.streams import Answer

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.slow]

TIMES = 20
LATEST = 0.5
"""The last blows fall when this share of a wave's events has come: later, clients run out of requests to send."""


@pytest.mark.timeout(2400)
def test_each_role_twenty_times(mesh: ChaosMesh, undisturbed: list[Answer]) -> None:
    draw = random.Random(1)
    # Role by role, so that each has been stable for a while, and is started at once, when its turn comes again.
    for turn, role in itertools.product(range(TIMES), ROLES):
        recomputed = endure(mesh, undisturbed, [role], draw.uniform(0.0, LATEST), f"{turn} {role}")
        assert sum(recomputed.values()) <= RECOMPUTED_MAX.get(role, 0), (role, recomputed)


@pytest.mark.timeout(2400)
def test_each_role_hangs_twenty_times(mesh: ChaosMesh, undisturbed: list[Answer]) -> None:
    draw = random.Random(2)
    for turn, role in itertools.product(range(TIMES), ROLES):
        share = draw.uniform(0.0, LATEST)
        recomputed = endure(mesh, undisturbed, [role], share, f"hang {turn} {role}", signal.SIGSTOP)
        assert sum(recomputed.values()) <= RECOMPUTED_MAX.get(role, 0), (role, recomputed)


@pytest.mark.timeout(2400)
def test_two_roles_at_once(mesh: ChaosMesh, undisturbed: list[Answer]) -> None:
    draw = random.Random(3)
    pairs = list(itertools.combinations(ROLES, 2))
    draw.shuffle(pairs)
    for roles in pairs:
        endure(mesh, undisturbed, list(roles), draw.uniform(0.0, LATEST), f"pair {roles}")
