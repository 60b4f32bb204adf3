"""Sequences that differ only in their text, and take each other's places in the worker's table: one seeded run.

All prompts have one length, so all first draws are for the same position; clients leave early, which gives slots to
others while steps run; the scheduler dies, and its successor counts sequences and slots from the beginning again. The
worker takes a step while another runs: only then does it matter whose token a slot holds. A token of another sequence
shows in the page that it is written to.
"""

import asyncio
import random
import string
from collections import Counter

from mesh.simulation.faults import Faults
from tests.simulation.scenario import Client, ask_all, judge_outcome, play
from tests.simulation.whole_mesh import SimulatedMesh

PROMPT_CHARS = 13
"""The first tokens drawn fill the page that the prompt begins."""
STEP_MS = 40


def draw_clients(draw: random.Random) -> list[Client]:
    """Waves of clients; half leave within a few steps."""
    return [
        Client(
            arrives_s=0.4 * wave + 0.05 * draw.random(),
            prompt="".join(draw.choices(string.ascii_letters, k=PROMPT_CHARS)), max_tokens=draw.choice([1, 2, 8, 20]),
            n=1, stop="", seed=number, leaves_after_s=0.2 * draw.random() if draw.random() < 0.5 else None,
        )
        for wave in range(3)
        for number in range(draw.choice([2, 4, 6]))
    ]  # fmt: skip


async def _scenario(mesh: SimulatedMesh, clients: list[Client], deaths_s: list[float]) -> list[str]:
    await mesh.start()
    for at_s in deaths_s:
        asyncio.get_running_loop().call_later(at_s, lambda: mesh.processes["scheduler-mixed-0"].kill())
    return await ask_all(mesh, clients, judge_outcome)


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"tables/{seed}")
    clients = draw_clients(draw)
    mesh = SimulatedMesh(seed, Faults(), mixed=True)
    mesh.devices.end()
    mesh.depths = {"mixed-0": 2}
    mesh.speeds = mesh.speeds._replace(num_pages=96, step_ms={"mixed-0": STEP_MS}, restart_s=(0.001, 0.02))
    deaths_s = [1.5 * draw.random() for _ in range(draw.choice([0, 1, 3]))]
    play(mesh, _scenario(mesh, clients, deaths_s), deaths_s, f"replay: python -m tests.simulation tables {seed}")
    return mesh.deaths + Counter({"clients": len(clients)})
