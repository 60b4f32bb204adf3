"""A kill a second for five minutes, of any living actor or the zygote: the mesh goes on serving all the while.

SOAK_SECONDS and SOAK_SEED set another length and other victims. The restart budget is the default one.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_mesh import GATEWAY, ChaosMesh, started
from tests.chaos.conftest import MESH
from tests.chaos.reconnecting import NUM_BODIES, ReconnectingClients
from tests.chaos.streams import Answer, Wave, asking

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.soak]

STORM_S = float(os.environ.get("SOAK_SECONDS", "300"))
KILL_EVERY_S = 1.0
NUM_CLIENTS = 32
LONGEST_GAP_S = 5.0
ZYGOTE = "zygote"


@pytest.fixture
def rationed_mesh() -> Iterator[ChaosMesh]:
    """A mesh whose supervisor has the default settings."""
    with started(*MESH) as mesh:
        yield mesh


def zygotes(supervisor: int) -> list[int]:
    """Pids of zygotes. Forks have the same command line, but another log."""
    found: list[int] = []
    for task in Path(f"/proc/{supervisor}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            try:
                if os.readlink(f"/proc/{pid}/fd/1").endswith("zygote.log"):
                    found.append(pid)
            except OSError:
                continue
    return found


def victims(mesh: ChaosMesh) -> list[tuple[str, int]]:
    """All living processes except the supervisor, by name and pid."""
    actors = sorted(mesh.pids().items())
    return actors + [(ZYGOTE, pid) for pid in zygotes(mesh.process.pid)]


async def storm(mesh: ChaosMesh, clients: ReconnectingClients, draw: random.Random) -> Counter[str]:
    """Kill until time is up. Returns how often each died."""
    deaths: Counter[str] = Counter()
    end = time.monotonic() + STORM_S
    # The storm is a matter of time by its nature; nothing waits for these pauses.
    while time.monotonic() < end:
        await asyncio.sleep(KILL_EVERY_S)
        name, pid = draw.choice(victims(mesh))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        deaths[name] += 1
        if name == GATEWAY:
            clients.gateway_deaths_s.append(time.monotonic())
    return deaths


async def served_under_storm(mesh: ChaosMesh, expected: list[Answer]) -> ReconnectingClients:
    draw = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    clients = ReconnectingClients(mesh.port, expected, NUM_CLIENTS)
    began_s = time.monotonic()
    deaths = await storm(mesh, clients, draw)
    ended_s = time.monotonic()
    await clients.stop()
    gaps_s = clients.gaps_s(began_s, time.monotonic())
    per_second = clients.events_each_second(began_s)
    seconds = range(int(time.monotonic() - began_s))
    print(
        f"\n{deaths.total()} deaths: {dict(deaths)}\n{clients.num_answered} answered, {clients.num_cut} cut by dead "
        f"gateways, {len(clients.lost)} lost, {len(clients.different)} different; "
        f"{len(clients.event_times_s) / (ended_s - began_s):.0f} events/s; "
        f"the last answer {time.monotonic() - ended_s:.1f} s after the storm\n"
        f"longest gaps: {[round(gap_s, 2) for gap_s in gaps_s[:12]]} s\n"
        f"events each second: {[per_second[second] for second in seconds]}\n"
        f"lost: {Counter(text.partition(': ')[2] for text in clients.lost)}"
    )
    assert not clients.lost
    assert not clients.different
    assert gaps_s[0] <= LONGEST_GAP_S
    return clients


@pytest.mark.timeout(STORM_S + 300)
def test_goodput_goes_on_under_a_kill_a_second(rationed_mesh: ChaosMesh) -> None:
    expected = asyncio.run(Wave(rationed_mesh.port, asking("expected", NUM_BODIES)).run())
    assert not [answer.broken for answer in expected if answer.broken]
    asyncio.run(served_under_storm(rationed_mesh, expected))
    rationed_mesh.settled(20.0)
    rationed_mesh.wait_until_nothing_is_held(20.0)
