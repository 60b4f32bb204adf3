"""Containers that are made anew without their files, with a right clock or one a day behind: one seeded run of it.

An actor that dies comes back by the supervisor's own rule: in an epoch above the file, the clock, and the epoch that a
refusal named. The registry keeps its file, since nobody could refuse it.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mesh.errors import Superseded
from mesh.simulation.faults import Faults
from mesh.supervision.core import Supervisor
from mesh.supervision.events import Begin, Policy, Spawn, Supervised
from tests.simulation.scenario import Client, ask_all, draw_clients, judge_outcome, play
from tests.simulation.whole_mesh import SimulatedMesh

BEGAN_S = 1_700_000_000
DAY_S = 86_400
REMADE_S = 2
"""A container takes longer than that from its death to its first actor; epochs are seconds."""


@dataclass
class ReturningMesh(SimulatedMesh):
    """A mesh whose hosts lose their files with each death; their clocks are behind by `behind_s` when they return."""

    behind_s: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.used: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.granting: list[Any] = []

    def next_epoch(self, actor_id: str, last: int) -> int:
        self._look_at_grants(actor_id)
        system = self.systems.get(actor_id)
        replaced = system.over if system is not None and isinstance(system.over, Superseded) else None
        is_remade = last > 0 and replaced is None and self.has_lost_files(actor_id)
        self.counts["remade"] += is_remade
        clock = BEGAN_S + int(self.network.now()) + REMADE_S * self.counts["remade"]
        clock -= self.behind_s if last > 0 and self.is_clock_wrong(actor_id) else 0
        core = Supervisor([Supervised(actor_id)], Policy(), {actor_id: max(0 if is_remade else last, clock)})
        if replaced is not None:
            self.counts["refused"] += 1
            core.watches[actor_id].known_epoch = replaced.known_epoch
        (epoch,) = (command.epoch for command in core.handle(Begin(), 0.0) if isinstance(command, Spawn))
        self.used.setdefault(actor_id, []).append(epoch)
        return epoch

    def has_lost_files(self, actor_id: str) -> bool:
        """Whether an actor that died is started again by a host that does not know of it."""
        return actor_id != "registry"

    def is_clock_wrong(self, actor_id: str) -> bool:
        """Whether the clock is behind where an actor is started again."""
        return True

    def _look_at_grants(self, actor_id: str) -> None:
        is_granting = actor_id.startswith("scheduler-decode")
        core = getattr(self.actors.get(actor_id), "core", None) if is_granting else None
        if core is not None and not any(core is one for one in self.granting):
            self.granting.append(core)

    def reused(self) -> list[str]:
        """Actors that joined in an epoch that was not above the one before, and cores that name their grants alike."""
        # An actor that was refused has done nothing in its epoch.
        for actor_id in self.actors:
            self._look_at_grants(actor_id)
        nonces = Counter(core.own_grants.grant_nonce for core in self.granting)
        twice = [f"two cores name grants by {one}" for one, num in nonces.items() if num > 1]
        return twice + [
            f"{actor_id} had the epochs {epochs}"
            for actor_id, epochs in self.used.items()
            if epochs and epochs[-1] <= max(epochs[:-1], default=0)
        ]


async def _scenario(mesh: ReturningMesh, clients: list[Client], deaths: list[tuple[float, str]]) -> list[str]:
    async def kill(at_s: float, actor_id: str) -> None:
        await asyncio.sleep(at_s)
        mesh.processes[actor_id].kill()

    await mesh.start()
    dying = [asyncio.ensure_future(kill(*death)) for death in deaths]
    problems = await ask_all(mesh, clients, judge_outcome)
    await asyncio.gather(*dying)
    # Long enough for an actor that was refused to come again: what counts is who is a member in the end.
    await asyncio.sleep(20.0)
    return [*problems, *mesh.reused()]


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"returns/{seed}")
    clients = draw_clients(draw, "")
    mesh = ReturningMesh(seed, Faults(), behind_s=draw.choice([0, DAY_S]))
    mesh.devices.end()
    dies = ["scheduler-decode-0", "scheduler-decode-0", "scheduler-prefill-0", "worker-decode-0", "gateway-0"]
    deaths = [(draw.choice([0.5, 2.0, 8.0]) * draw.random(), draw.choice(dies)) for _ in range(draw.choice([1, 2, 3]))]
    replay = f"replay: python -m tests.simulation returns {seed}"
    play(mesh, _scenario(mesh, clients, deaths), mesh.behind_s, deaths, replay)
    return mesh.counts + Counter({"behind": mesh.behind_s > 0})
