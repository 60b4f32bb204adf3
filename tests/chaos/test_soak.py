"""A storm: one kill or hang every 1.5 s, any role but the gateway, for ten minutes or SOAK_SECONDS.

Nothing is lost, nothing is wrong, and at the end the processes that were never killed are as large as at the start, and
there are as many segments, sockets and pages as before.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.chaos_mesh import GATEWAY, ROLES, ChaosMesh
from tests.chaos.streams import Answer, Wave, asking, calling, differences

pytestmark = [pytest.mark.process, pytest.mark.chaos, pytest.mark.soak]

SOAK_S = float(os.environ.get("SOAK_SECONDS", "600"))
KILL_EVERY_S = 1.5
HANGS = 0.2
"""The share of hangs. A role that hangs is killed after three heartbeats, so more of them would leave little alive."""
NO_HANGS_S = 10.0
"""None at the end: an actor that hangs looks settled until it is killed."""
MIN_CLIENTS, MAX_CLIENTS = 8, 32
REQUESTS_PER_WAVE = 40
CALLS_PER_WAVE = 8
NUM_SALTS = 64
WARM_S = 20.0
MAX_GROWTH_BYTES = 24 << 20
MAX_MORE_DESCRIPTORS = 8


def requests(salt: str) -> list[dict[str, Any]]:
    """Those of one wave."""
    return asking(salt, REQUESTS_PER_WAVE - CALLS_PER_WAVE) + calling(salt, CALLS_PER_WAVE)


class Size:
    """Resident bytes and open descriptors of processes that are never killed, and what the mesh holds on its host."""

    def __init__(self, mesh: ChaosMesh) -> None:
        pids = {"supervisor": mesh.process.pid, GATEWAY: mesh.pid(GATEWAY)}
        self.bytes = {name: resident_bytes(pid) for name, pid in pids.items()}
        self.descriptors = {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()}
        self.segments = sorted(mesh.host.segments())
        self.num_sockets = len(mesh.host.sockets())
        self.num_processes = len(mesh.host.processes())

    def __repr__(self) -> str:
        megabytes = {name: f"{size / 2**20:.1f} MiB" for name, size in self.bytes.items()}
        return f"{megabytes}, fds {self.descriptors}, {self.num_sockets} sockets, {self.num_processes} processes"


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


async def storm(
    mesh: ChaosMesh, seconds: float, expected: list[Answer], draw: random.Random
) -> tuple[int, Counter[str]]:
    """Waves of changing width under kills. Returns how many requests were answered, and how often each role died.

    Of four in five requests a quarter reads logprobs, a quarter is bound to a schema, a quarter looks back and reads;
    every fifth is a question of an agent with tools.
    """
    deaths: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def kill() -> None:
        # The storm is a matter of time by its nature; nothing waits for these pauses.
        while time.monotonic() < end:
            await asyncio.sleep(KILL_EVERY_S)
            role = draw.choice(list(ROLES))
            is_hang = draw.random() < HANGS and time.monotonic() < end - NO_HANGS_S
            number = signal.SIGSTOP if is_hang else signal.SIGKILL
            deaths[f"{role} hangs" if is_hang else role] += bool(mesh.strike(ROLES[role], number))

    killer = asyncio.create_task(kill())
    num_requests = 0
    for number in itertools.count():
        if time.monotonic() >= end:
            break
        asked = requests(f"storm {number % NUM_SALTS}")
        answers = await Wave(mesh.port, asked, num_clients=draw.randint(MIN_CLIENTS, MAX_CLIENTS)).run()
        num_requests += len(answers)
        assert not differences(answers, expected), f"wave {number} after {dict(deaths)}"
    await killer
    return num_requests, deaths


@pytest.mark.timeout(SOAK_S + 300)
def test_a_storm_of_kills(mesh: ChaosMesh) -> None:
    expected = asyncio.run(Wave(mesh.port, requests("expected")).run())
    assert not [answer.broken for answer in expected if answer.broken]
    # With the spare of the zygote, which is no actor, and which a death may take and a new one follow a while later.
    num_processes = len(mesh.host.processes())

    def are_all_there() -> bool:
        return len(mesh.host.processes()) == num_processes

    draw = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    # What a first storm makes stays for good: links, buffers, caches.
    asyncio.run(storm(mesh, WARM_S, expected, draw))
    mesh.settled(60.0)
    mesh.host.wait_until(are_all_there, "all processes are there", 20.0)
    before = Size(mesh)
    num_requests, deaths = asyncio.run(storm(mesh, SOAK_S, expected, draw))
    mesh.settled(60.0)
    mesh.wait_until_nothing_is_held(20.0)
    mesh.host.wait_until(are_all_there, "all processes are there again", 20.0)
    after = Size(mesh)
    print(f"\n{num_requests} requests, {deaths.total()} deaths: {dict(deaths)}\nbefore: {before}\nafter:  {after}")
    for name, size in after.bytes.items():
        assert size - before.bytes[name] < MAX_GROWTH_BYTES, (name, before, after)
        assert after.descriptors[name] <= before.descriptors[name] + MAX_MORE_DESCRIPTORS, (name, before, after)
    assert after.segments == before.segments
    assert (after.num_sockets, after.num_processes) == (before.num_sockets, before.num_processes)
    violations = [value for name, value in mesh.metrics().items() if "page_violations" in name]
    assert sum(violations) == 0
