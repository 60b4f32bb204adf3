"""Groups whose memory is released and resumed while clients are served and actors die: one seeded run of it."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, ClassVar

from kvstore.pool.header import HEADER_BYTES
from mesh.actor import Actor
from mesh.address import Address
from mesh.errors import CallError
from mesh.options import SystemOptions
from mesh.simulation.faults import Faults
from mesh.system import ActorSystem
from mesh.testing.processes import ProcessState
from mesh.wire.codec import Codec
from nodes.protocol import MemoryList, ReleaseMemory, ResumeMemory
from nodes.roles import NODE_CODEC
from tests.simulation.scenario import Alter, Kind, ask_all, draw_clients, draw_faults, judge_outcome, play
from tests.simulation.whole_mesh import SimulatedMesh

CHANGE_LIMIT_S = 40.0
"""For a release or a resumption, whatever dies in the middle: leases, restarts and hung steps included."""


class Operator(Actor):
    """Asks an agent, as `meshctl` does through the supervisor."""

    role: ClassVar[str] = "operator"
    codec: ClassVar[Codec] = NODE_CODEC

    async def until(self, question: ReleaseMemory | ResumeMemory, state: str) -> None:
        """Ask until all groups concerned are in `state`. Raises AssertionError if that takes too long."""
        deadline = asyncio.get_running_loop().time() + CHANGE_LIMIT_S
        found: Any = None
        while True:
            try:
                found = (await self.ctx.ask("kv-agent-0", question, timeout_s=2.0)).message
            except CallError as error:
                found = error
            if isinstance(found, MemoryList) and all(one.state == state for one in found.groups):
                return
            assert asyncio.get_running_loop().time() < deadline, f"not {state} within {CHANGE_LIMIT_S} s: {found}"
            await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Sleep:
    """Memory of `groups` is released after `at_s`, and resumed `lasts_s` after that is done, or (`is_hasty`) before."""

    at_s: float
    groups: list[str]
    lasts_s: float
    keep_kv: bool
    keep_weights: bool
    is_hasty: bool


@dataclass(frozen=True)
class Death:
    """An actor dies `after_s` after a release or (`of_end`) a resumption begins, or at the `points`-th point then."""

    sleep: int
    of_end: bool
    actor_id: str
    after_s: float
    points: int


def draw_sleeps(draw: random.Random, groups: list[str]) -> list[Sleep]:
    """One to three sleeps, one after the other."""
    sleeps: list[Sleep] = []
    at_s = draw.random() * draw.choice([0.5, 3.0])
    for _ in range(draw.choice([1, 2, 3])):
        kept = draw.choice(["", "", "", "kv", "weights"])
        meant = draw.choice([groups, [draw.choice(groups)]])
        lasts_s = draw.choice([0.0, 0.3, 3.0])
        sleeps.append(Sleep(at_s, meant, lasts_s, kept == "kv", kept == "weights", draw.random() < 0.2))
        at_s = draw.random()
    return sleeps


def draw_deaths(draw: random.Random, groups: list[str], num_sleeps: int) -> list[Death]:
    """Deaths of actors of the groups, and of those that release or use them."""
    actor_ids = ["kv-agent-0", "kv-agent-0", "registry", "gateway-0" if draw.random() < 0.2 else "detokenizer-0"]
    actor_ids += [f"{role}-{group}" for group in groups for role in ("scheduler", "worker")] * 2
    return [
        Death(
            sleep=draw.randrange(num_sleeps),
            of_end=draw.random() < 0.5,
            actor_id=draw.choice(actor_ids),
            after_s=draw.random() * draw.choice([0.02, 0.3, 2.0]),
            points=draw.choice([0, draw.randrange(1, 40)]),
        )
        for _ in range(draw.choice([0, 1, 2, 4]))
    ]


async def _die(mesh: SimulatedMesh, death: Death) -> None:
    process = mesh.processes[death.actor_id]
    if death.points:
        process.arm(death.points)
        return
    await asyncio.sleep(death.after_s)
    mesh.processes[death.actor_id].kill()


async def _sleep(mesh: SimulatedMesh, operator: Operator, sleep: Sleep, deaths: list[Death]) -> None:
    await mesh.until_due(sleep.at_s)
    dying: list[Awaitable[None]] = [asyncio.ensure_future(_die(mesh, one)) for one in deaths if not one.of_end]
    # The weights of ranks are lost with their processes, so keeping them is refused.
    keep_weights = sleep.keep_weights and all(mesh.tp_size(group) == 1 for group in sleep.groups)
    question = ReleaseMemory(groups=sleep.groups, keep_kv=sleep.keep_kv, keep_weights=keep_weights)
    if sleep.is_hasty:
        asking = asyncio.ensure_future(operator.until(question, "released"))
        await asyncio.sleep(mesh.random.random() * 0.2)
        asking.cancel()
    else:
        await operator.until(question, "released")
        for group in sleep.groups:
            _assert_released(mesh, group, is_kept=sleep.keep_kv)
        await asyncio.sleep(sleep.lasts_s)
    dying += [asyncio.ensure_future(_die(mesh, one)) for one in deaths if one.of_end]
    await operator.until(ResumeMemory(groups=sleep.groups), "held")
    await asyncio.gather(*dying)


def _assert_released(mesh: SimulatedMesh, group: str, *, is_kept: bool) -> None:
    for rank in range(mesh.tp_size(group)):
        name = f"kvmesh-{group}.{rank}" if rank else f"kvmesh-{group}"
        size = len(mesh.host._pools[mesh.host.path(name)])
        assert is_kept or size == HEADER_BYTES, f"{name} still takes {size} bytes"
    for actor_id in (*mesh.worker_ids(group), f"scheduler-{group}"):
        if mesh.processes[actor_id].state is ProcessState.RUNNING:
            assert mesh.actors[actor_id]._pool is None, f"{actor_id} still maps its pool"


async def _operator(mesh: SimulatedMesh) -> tuple[Operator, ActorSystem]:
    address, operator = Address("operator-0", 1), Operator()
    options = SystemOptions(host="sim", pid=1, random=random.Random(f"operator/{mesh.seed}"))
    system = ActorSystem(operator, address, mesh.network.transport(address), mesh.bootstrap, options)
    await system.start()
    return operator, system


async def _scenario(mesh: SimulatedMesh, clients: list[Any], sleeps: list[Sleep], deaths: list[Death]) -> list[str]:
    faults, mesh.network.faults = mesh.network.faults, Faults()
    await mesh.start()
    operator, system = await _operator(mesh)
    mesh.network.faults = faults
    serving = asyncio.ensure_future(ask_all(mesh, clients, judge_outcome))
    for number, sleep in enumerate(sleeps):
        await _sleep(mesh, operator, sleep, [death for death in deaths if death.sleep == number])
    problems = await serving
    await system.stop()
    return problems


def run_seed(
    seed: int, alter: Alter | None = None, suite: str = "releases", kind: Kind = SimulatedMesh
) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"releases/{seed}")
    mixed = draw.random() < 0.3
    clients, drawn = draw_clients(draw, ""), draw_faults(draw, "")
    clients = clients if alter is None else alter(seed, clients)
    faults = Faults(silent_down=draw.choice([0.0, 0.3])) if draw.random() < 0.6 else drawn
    mesh = kind(seed, faults, mixed, "")
    if draw.random() < 0.3:
        mesh.tp_sizes[draw.choice(mesh.groups)] = 2
    sleeps = draw_sleeps(draw, mesh.groups)
    deaths = draw_deaths(draw, mesh.groups, len(sleeps))
    replay = f"replay: python -m tests.simulation {suite} {seed}"
    play(mesh, _scenario(mesh, clients, sleeps, deaths), mesh.faults, sleeps, deaths, replay)
    counts = Counter(dict(mesh.network.counts)) + Counter({f"died: {role}": n for role, n in mesh.deaths.items()})
    return counts + mesh.moments.counts + Counter(sleeps=len(sleeps))
