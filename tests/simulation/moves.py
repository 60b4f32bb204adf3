"""Two decode groups whose workers die under streams: one seeded run of what moves to the other group, and what may not.

Workers are back long after the other group could have gone on, and announce any start time, also ones that are none:
the worker of either group dies, of both at once, or of the second while requests move to it. In half of the quiet
meshes one request kills every worker that computes it beyond some position: three workers in all, and it is poisoned.
In some meshes the second group computes other bits: then nothing moves.

Attempts fail for no other reason in a quiet mesh, and the gateway takes one failure only: a move must not count as one.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec
from typing_extensions import override

from mesh.simulation.faults import Faults
from nodes.gateway.config import GatewayConfig
from nodes.gateway.local import LocalGateway
from nodes.worker.config import WorkerConfig
from nodes.worker.steps.step import POISONED
from tests.simulation.hardware import SlowWorker
from tests.simulation.hosted_mesh import DECODE, JOINER, PREFILL, HostedMesh
from tests.simulation.scenario import WORDS, Client, Outcome, ask_all, draw_faults, judge_outcome, play
from tests.simulation.whole_mesh import CONTEXT_LENGTH

AWAY_S = (1.0, 5.0)
START_S = [0.3, 2.0, 2.0, 5.0, 1e300, float("inf"), float("nan"), -1.0, 0.0]
"""What a worker says that its start took."""
OTHER = "other bits"
MOST_KILLED = 3
STEP_MS = 30
"""A prompt of 32 tokens a step: what is not cached of a moved request takes a tenth of a second to half of one."""
WORKERS = [f"worker-decode-0.{DECODE}", f"worker-decode-0.{JOINER}"]


@dataclass
class MovingMesh(HostedMesh):
    """See the module. `killer` is the call whose request kills workers that compute it from position `kills_at` on."""

    killer: str = ""
    kills_at: int = 0
    is_unequal: bool = False
    max_attempts: int = 8
    killed: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.devices.end()
        self.moments.end()
        step_ms = dict.fromkeys(self.groups, STEP_MS)
        self.speeds = self.speeds._replace(
            num_pages=256, num_prefill_pages=256, copy_s=0.0005, step_ms=step_ms,
            restart_s=AWAY_S, prefill_restart_s=AWAY_S,
        )  # fmt: skip
        gateway = GatewayConfig(
            model_name="echo", model="echo", context_length=CONTEXT_LENGTH, prepare_timeout_s=2.0, role_wait_s=60.0,
            max_attempts=self.max_attempts,
        )  # fmt: skip
        self.makers[self.gateway_id] = lambda: LocalGateway(gateway)
        self.starts = random.Random(f"starts/{self.seed}")

    @override
    def _worker(self, config: WorkerConfig) -> SlowWorker:
        worker = super()._worker(config)
        start_s = self.starts.choice(START_S)
        worker._age = lambda: start_s
        begin, start = worker._begin, worker.start

        def deadly(step: Any, errors: Any) -> None:
            rows = [row for row in step.rows if row.sequence.request_id.startswith(f"{self.killer}-")]
            if self.killer and any(row.end > self.kills_at for row in rows):
                self.killed.append(config.group)
                worker._kill()
                return
            begin(step, errors)

        async def other() -> None:
            await start()
            core = worker._core
            core.adopted = msgspec.structs.replace(core.adopted, numerics=OTHER)

        worker._begin = deadly  # type: ignore[method-assign]
        if self.is_unequal and config.group.endswith(JOINER):
            worker.start = other  # type: ignore[method-assign]
        return worker


def draw_clients(draw: random.Random) -> list[Client]:
    """Some that come at once, and some later, which find a group without a worker."""
    clients: list[Client] = []
    for number in range(draw.choice([6, 8, 12])):
        prompt = f"{number} " + " ".join(draw.choices(WORDS, k=draw.choice([4, 12, 24, 40])))
        clients.append(
            Client(
                arrives_s=draw.random() * draw.choice([0.1, 0.1, 2.0]), prompt=prompt,
                max_tokens=min(draw.choice([8, 40, 120]), CONTEXT_LENGTH - len(prompt)), n=draw.choice([1, 1, 2]),
                stop=draw.choice(["", "", draw.choice(WORDS)[1:]]), seed=number,
                leaves_after_s=2.0 * draw.random() if draw.random() < 0.1 else None,
                min_tokens=draw.choice([0, 0, len(prompt) + 4]) if len(prompt) < 100 else 0,
            )
        )  # fmt: skip
    clients = [replace(one, min_tokens=min(one.min_tokens, one.max_tokens)) for one in clients]
    return [replace(one, min_tokens=0) if one.stop else one for one in clients]


def draw_deaths(draw: random.Random) -> list[tuple[float, str]]:
    """When whose worker dies: one, both at once, or the second one while requests move to it."""
    at_s, first = draw.uniform(0.05, 1.5), draw.randrange(2)
    deaths = [(at_s, WORKERS[first])]
    second_s = draw.choice([None, None, 0.0, draw.uniform(0.001, 0.1), draw.uniform(0.1, 4.0)])
    if second_s is not None:
        deaths.append((at_s + second_s, WORKERS[1 - first]))
    if draw.random() < 0.2:
        deaths.append((draw.uniform(0.0, 2.0), f"worker-prefill-0.{PREFILL}"))
    return deaths


async def _scenario(mesh: MovingMesh, clients: list[Client], deaths: list[tuple[float, str]]) -> list[str]:
    async def kill(at_s: float, actor_id: str) -> None:
        await asyncio.sleep(at_s)
        mesh.processes[actor_id].kill()

    def judge(mesh_: Any, client: Client, outcome: Outcome, elapsed_s: float) -> str:
        if mesh.killer == f"cmpl-{client.seed}":
            code = None if outcome.failure is None else outcome.failure.code
            return "" if code == POISONED else f"it kills, and ended with {outcome}"
        return judge_outcome(mesh_, client, outcome, elapsed_s)

    faults, mesh.network.faults = mesh.network.faults, Faults()
    await mesh.start()
    mesh.network.faults = faults
    dying = [asyncio.ensure_future(kill(*death)) for death in deaths]
    problems = await ask_all(mesh, clients, judge)
    await asyncio.gather(*dying)
    # If others die as well, it may be moved from a prefill: what it killed there is forgotten with the order.
    if len(mesh.killed) > MOST_KILLED + (2 if deaths else 0):
        problems.append(f"one request killed {mesh.killed}")
    left = [group for group, _ in groupby(one for one in mesh.killed if one.startswith("decode"))]
    if not deaths and len(left) > len(set(left)):
        problems.append(f"one request went from group to group: {mesh.killed}")
    stats = mesh.actors[mesh.gateway_id].stats()
    mesh.counts["moved"] += int(stats["mesh_gateway_moves_total"])
    # No move takes a request to other bits. Where links break, an attempt that has failed may be begun again anywhere:
    # in seed 600 one that had moved lost its new holder by a reset, and only the other group was left.
    if (changes := stats["mesh_numerics_changes_total"]) and faults == Faults():
        problems.append(f"{changes:g} requests went on with other bits")
    return [*problems, *mesh.reused()]


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"moves/{seed}")
    clients, deaths, is_quiet = draw_clients(draw), draw_deaths(draw), draw.random() < 0.7
    faults = Faults() if is_quiet else draw_faults(draw, "")
    mesh = MovingMesh(seed, faults, has_joiner=True, is_unequal=draw.random() < 0.15, max_attempts=1 if is_quiet else 8)
    if is_quiet and draw.random() < 0.5:
        number = draw.randrange(len(clients))
        killer = clients[number] = replace(clients[number], n=1, stop="", leaves_after_s=None)
        mesh.killer = f"cmpl-{number}"
        # In the middle of its output, or of its prompt: the first step that reaches it kills.
        mesh.kills_at = draw.choice([1, len(killer.prompt) // 2, len(killer.prompt) + 2])
        clients[number] = replace(killer, max_tokens=40, min_tokens=8)
        deaths = deaths if draw.random() < 0.3 else []
    replay = f"replay: python -m tests.simulation moves {seed}"
    play(mesh, _scenario(mesh, clients, deaths), mesh.faults, deaths, (mesh.killer, mesh.kills_at), mesh.killed, replay)
    counts = Counter({"killed": len(mesh.killed), "unequal": mesh.is_unequal, "both": len(deaths) > 1})
    return counts + Counter({f"died: {role}": n for role, n in mesh.deaths.items()}) + mesh.counts
