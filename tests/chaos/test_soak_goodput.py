"""A kill a second for five minutes, of any living actor or the zygote: the mesh goes on serving all the while.

SOAK_SECONDS and SOAK_SEED set another length and other victims. The restart budget is the default one.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.bench.client import Server
from cli.chaos.asked import Request
from cli.chaos.clients import Clients
from tests.chaos.chaos_mesh import GATEWAY, ChaosMesh, started
from tests.chaos.conftest import MESH
from tests.chaos.streams import Answer, Wave, asking, request

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.soak]

STORM_S = float(os.environ.get("SOAK_SECONDS", "300"))
KILL_EVERY_S = 1.0
NUM_CLIENTS = 32
LONGEST_GAP_S = 5.0
ZYGOTE = "zygote"
NUM_BODIES = 32
NUM_SALTS = 64
GATEWAY_BACK_S = 20.0
"""Within it a gateway is there again; until then connections to it break."""


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


async def storm(mesh: ChaosMesh, gateway_deaths_s: list[float], draw: random.Random) -> Counter[str]:
    """Kill until time is up. Returns how often each died; notes when the gateway did."""
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
            gateway_deaths_s.append(time.monotonic())
    return deaths


def gaps_s(times_s: list[float]) -> list[float]:
    """From one event, of any client, to the next, the longest first."""
    return sorted((after - before for before, after in itertools.pairwise(times_s)), reverse=True)


async def served_under_storm(mesh: ChaosMesh, expected: list[Answer]) -> None:
    draw = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    asked = [asking(f"storm {salt}", NUM_BODIES) for salt in range(NUM_SALTS)]
    gateway_deaths_s: list[float] = []

    def make_request(number: int) -> Request:
        index = number % NUM_BODIES
        return request(asked[number // NUM_BODIES % NUM_SALTS][index], index)

    def is_excused(request_began_s: float, request_ended_s: float) -> bool:
        return any(at <= request_ended_s and request_began_s <= at + GATEWAY_BACK_S for at in gateway_deaths_s)

    clients = Clients(Server("127.0.0.1", mesh.port), expected, make_request, NUM_CLIENTS, is_excused)
    began_s = time.monotonic()
    deaths = await storm(mesh, gateway_deaths_s, draw)
    ended_s = time.monotonic()
    await clients.stop()
    times_s = list(clients.event_times_s)
    gaps = gaps_s([began_s, *times_s, time.monotonic()])
    per_second = Counter(int(at - began_s) for at in times_s)
    lost = [one.lost for one in clients.sent if one.lost]
    different = [one.different for one in clients.sent if one.different]
    print(
        f"\n{deaths.total()} deaths: {dict(deaths)}\n{len(clients.sent)} sent, "
        f"{sum(one.is_cut for one in clients.sent)} of them to dead gateways, {len(lost)} lost, "
        f"{len(different)} different; "
        f"{len(times_s) / (ended_s - began_s):.0f} events/s; "
        f"the last answer {time.monotonic() - ended_s:.1f} s after the storm\n"
        f"longest gaps: {[round(gap, 2) for gap in gaps[:12]]} s\n"
        f"events each second: {[per_second[second] for second in range(int(time.monotonic() - began_s))]}"
    )
    assert not lost
    assert not different
    assert gaps[0] <= LONGEST_GAP_S


@pytest.mark.timeout(STORM_S + 300)
def test_goodput_goes_on_under_a_kill_a_second(rationed_mesh: ChaosMesh) -> None:
    expected = asyncio.run(Wave(rationed_mesh.port, asking("expected", NUM_BODIES)).run())
    assert not [answer.broken for answer in expected if answer.broken]
    asyncio.run(served_under_storm(rationed_mesh, expected))
    rationed_mesh.settled(20.0)
    rationed_mesh.wait_until_nothing_is_held(20.0)
