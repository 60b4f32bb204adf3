"""A mesh of processes, watched and struck from outside, and what it has to endure."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery import ROLES
from cli.chaos.held import held, samples
from tests.chaos.streams import NUM_CLIENTS, Answer, Wave, asking, differences
from tests.process.conftest import Host

GATEWAY = "gateway-0"

PAGES_AND_A_CHUNK = NUM_CLIENTS * 16 + 256
STEPS = 2 * 512
RECOMPUTED_MAX = {
    "prefill scheduler": PAGES_AND_A_CHUNK,
    "decode scheduler": PAGES_AND_A_CHUNK,
    "prefill worker": STEPS,
    "decode worker": PAGES_AND_A_CHUNK,
}
"""Tokens that may be computed again when a role dies: a page of each running request, and a chunk; for a worker that
prefills, what it can have in flight: two steps full of prompts, of which the second may not have begun."""


@dataclass(frozen=True)
class Incarnations:
    """Epoch of each actor at one moment, and how many tokens each scheduler had computed again by then."""

    epochs: dict[str, int]
    recomputed: dict[str, float]


class ChaosMesh:
    """A running mesh, watched and struck from outside."""

    def __init__(self, host: Host, process: Any) -> None:
        self.host = host
        self.process = process
        self.port = host.port
        self.left: dict[str, float] = {}
        # For what tells of a failure; it is removed where there is none.
        self.kept = Path(tempfile.mkdtemp(prefix="kvmesh-chaos-"))

    def pids(self) -> dict[str, int]:
        """Those of living actors, by the manifest: asking the supervisor takes too long while a stream runs."""
        manifest = json.loads((self.host.run_directory / "manifest.json").read_text())
        return {record["actor_id"]: record["pid"] for record in manifest["processes"]}

    def pid(self, actor_id: str) -> int:
        """The actor's pid; 0 if it has none."""
        return self.pids().get(actor_id, 0)

    def strike(self, actor_id: str, number: signal.Signals = signal.SIGKILL) -> bool:
        """Signal the process that runs under this id now; False if it is being started again."""
        pid = self.pid(actor_id)
        if not pid:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name with labels."""
        with urllib.request.urlopen(self.host.url + "/metrics", timeout=10) as response:
            return samples(response.read().decode())

    def wait_until_nothing_is_held(self, timeout_s: float) -> None:
        """Wait until no page, grant, slot or step is held for any request."""

        def look() -> bool:
            try:
                self.left = held(self.metrics())
            except OSError:
                self.left = {"the gateway does not answer": 1.0}
            return not self.left

        try:
            self.host.wait_until(look, "nothing is held", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"after {timeout_s:.1f} s: {self.left}") from error

    def settled(self, timeout_s: float = 30.0) -> Incarnations:
        """Wait until every actor is ready and answers a scrape."""

        def look() -> Incarnations | None:
            actors = self.host.ps()
            if any(entry["state"] != "ready" for entry in actors.values()):
                return None
            try:
                samples = self.metrics()
            except OSError:
                return None
            recomputed = {
                actor_id: samples.get(f'mesh_recomputed_tokens_total{{actor="{actor_id}",role="scheduler"}}')
                for actor_id in actors
                if actor_id.startswith("scheduler")
            }
            if None in recomputed.values():
                return None
            return Incarnations({actor_id: entry["epoch"] for actor_id, entry in actors.items()}, recomputed)

        return self.host.wait_until(look, "every actor is ready again", timeout_s)


UNRATIONED = {"KVMESH_SUPERVISION__RESTART_BUDGET": "100000"}
"""Restarts are not rationed: tests/process/test_deaths.py tests the budget."""


@contextlib.contextmanager
def started(*options: str, start_s: float = 60.0, **environment: str) -> Iterator[ChaosMesh]:
    """A settled mesh, which leaves nothing behind at the end; or its actors' last words go to stdout, and all their
    logs, the supervisor's with every exit, are kept."""
    # Under /tmp and short: paths of sockets are at most a hundred bytes.
    host = Host(tempfile.mkdtemp(prefix="kc"))
    host.environment |= environment
    mesh: ChaosMesh | None = None
    try:
        process = host.up(*options, wait=False)
        host.wait_ready(process, start_s)
        mesh = ChaosMesh(host, process)
        mesh.settled(90.0)
        yield mesh
        host.ends_well(process)
        shutil.rmtree(mesh.kept)
    except BaseException:
        logs = host.run_directory / "logs"
        for log in sorted(logs.glob("*.log")):
            print(f"== {log.name}\n{log.read_text()[-3000:]}")
        if mesh is not None and logs.exists():
            shutil.copytree(logs, mesh.kept / "logs")
            print(f"== all of it: {mesh.kept}")
        raise
    finally:
        host.clean()
        shutil.rmtree(host.base)


def recomputed_tokens(before: Incarnations, after: Incarnations) -> dict[str, float]:
    """What each scheduler computed again between the two. One that died in between counts from 0 again."""
    return {
        actor_id: value - (before.recomputed[actor_id] if before.epochs[actor_id] == after.epochs[actor_id] else 0.0)
        for actor_id, value in after.recomputed.items()
    }


def endure(
    mesh: ChaosMesh,
    undisturbed: list[Answer],
    roles: list[str],
    share: float,
    salt: str,
    number: signal.Signals = signal.SIGKILL,
) -> dict[str, float]:
    """One wave in which `roles` are struck together, after a share of its events. Returns what was computed again."""
    before = mesh.settled()

    def blow() -> None:
        for role in roles:
            mesh.strike(ROLES[role], number)

    at = int(share * sum(answer.num_events for answer in undisturbed))
    wave = Wave(mesh.port, asking(salt), at=at, blow=blow)
    answers = asyncio.run(wave.run())
    after = mesh.settled()
    for role in roles:
        assert after.epochs[ROLES[role]] == before.epochs[ROLES[role]] + 1, f"{role} did not die once"
    assert wave.num_hit >= NUM_CLIENTS // 2, "too few streams ran when the blow fell"
    assert not differences(answers, undisturbed), roles
    return recomputed_tokens(before, after)
