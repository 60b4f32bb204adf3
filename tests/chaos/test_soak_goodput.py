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

from cli.bench.client import Server
from cli.chaos.asked import Request
from cli.chaos.clients import Clients
from tests.chaos.chaos_mesh import GATEWAY, ChaosMesh, started
from tests.chaos.conftest import MESH
from tests.chaos.storm_report import Death, StormReport
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


async def storm(mesh: ChaosMesh, deaths: list[Death], draw: random.Random) -> None:
    """Kill until time is up, and note who died."""
    end = time.monotonic() + STORM_S
    # The storm is a matter of time by its nature; nothing waits for these pauses.
    while time.monotonic() < end:
        await asyncio.sleep(KILL_EVERY_S)
        name, pid = draw.choice(victims(mesh))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        deaths.append((time.monotonic(), name, pid))


async def served_under_storm(mesh: ChaosMesh, expected: list[Answer]) -> None:
    draw = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    asked = [asking(f"storm {salt}", NUM_BODIES) for salt in range(NUM_SALTS)]
    deaths: list[Death] = []

    def make_request(number: int) -> Request:
        index = number % NUM_BODIES
        return request(asked[number // NUM_BODIES % NUM_SALTS][index], index)

    def is_excused(request_began_s: float, request_ended_s: float) -> bool:
        gateway = [at for at, name, _ in deaths if name == GATEWAY]
        return any(at <= request_ended_s and request_began_s <= at + GATEWAY_BACK_S for at in gateway)

    clients = Clients(Server("127.0.0.1", mesh.port), expected, make_request, NUM_CLIENTS, is_excused)
    began_s = time.monotonic()
    await storm(mesh, deaths, draw)
    ended_s = time.monotonic()
    await clients.stop()
    times_s = list(clients.event_times_s)
    report = StormReport(clients.sent, deaths, times_s, began_s, time.monotonic())
    per_second = Counter(int(at - began_s) for at in times_s)
    lost = [one.lost for one in clients.sent if one.lost]
    different = [one.different for one in clients.sent if one.different]
    print(
        f"\n{len(deaths)} deaths: {dict(Counter(name for _, name, _ in deaths))}\n{len(clients.sent)} sent, "
        f"{sum(one.is_cut for one in clients.sent)} of them to dead gateways, {len(lost)} lost, "
        f"{len(different)} different; "
        f"{len(times_s) / (ended_s - began_s):.0f} events/s; "
        f"the last answer {time.monotonic() - ended_s:.1f} s after the storm\n"
        f"longest gaps: {[round(end - start, 2) for start, end in report.gaps]} s\n"
        f"events each second: {[per_second[second] for second in range(int(time.monotonic() - began_s))]}"
    )
    # Whatever fails from here on.
    report.write(mesh.kept / "storm.txt")
    assert not lost, f"{len(lost)}, see {mesh.kept}"
    assert not different, f"{len(different)}, see {mesh.kept}"
    assert report.longest_gap_s <= LONGEST_GAP_S, f"see {mesh.kept}"


@pytest.mark.timeout(STORM_S + 300)
def test_goodput_goes_on_under_a_kill_a_second(rationed_mesh: ChaosMesh) -> None:
    expected = asyncio.run(Wave(rationed_mesh.port, asking("expected", NUM_BODIES)).run())
    assert not [answer.broken for answer in expected if answer.broken]
    asyncio.run(served_under_storm(rationed_mesh, expected))
    rationed_mesh.settled(20.0)
    rationed_mesh.wait_until_nothing_is_held(20.0)
