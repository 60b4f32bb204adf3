"""One seeded run in which a worker is drained, and renewed in time or not, while clients are served.

Beside the tokenizer there is one that serves no question, as an older or a user's own tokenizer may. Refusals come in
time: for requests under way after the wait for a renewed worker, or at once if the supervisor says that it stays away;
for new ones after the wait for a missing role.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from mesh.actor import Actor
from mesh.membership.view import SUPERVISOR
from mesh.simulation.faults import Faults
from mesh.wire.codec import Codec
from nodes.roles import NODE_CODEC, TOKENIZER
from tests.simulation.scenario import Client, ask_all, draw_clients, judge_tokens, play
from tests.simulation.whole_mesh import CHUNK_TOKENS, ZOMBIES, Outcome, SimulatedMesh

DRAINED_WAIT_S = 15.0
ROLE_WAIT_S = 60.0
"""As `SimulatedMesh` configures its gateway."""
SLACK_S = 5.0
"""For the routes that are asked for meanwhile, and what was computed before."""


class Stranger(Actor):
    """An actor with a tokenizer's role that answers nothing that ours answers."""

    role: ClassVar[str] = TOKENIZER
    codec: ClassVar[Codec] = NODE_CODEC


class Supervisor(Actor):
    """As much of a supervisor as others hear of when an actor is drained."""

    role: ClassVar[str] = SUPERVISOR
    codec: ClassVar[Codec] = NODE_CODEC


@dataclass(frozen=True)
class Drain:
    """Of the worker of `group`, `at_s` after the start; `away_s` None: it stays away (`is_told`: as is announced)."""

    group: str
    at_s: float
    away_s: float | None
    is_told: bool


def draw_drain(draw: random.Random, groups: list[str]) -> Drain:
    """Half of them are renewals."""
    away_s = draw.choice([None, 0.3 + 5.0 * draw.random()])
    at_s = draw.random() * draw.choice([0.3, 2.0])
    return Drain(draw.choice(groups), at_s, away_s, away_s is None and draw.random() < 0.6)


async def _befall(mesh: SimulatedMesh, drain: Drain) -> list[str]:
    """Drains the worker; what waits there in vain once its supervisor has said that it stays away."""
    await asyncio.sleep(drain.at_s)
    worker = f"worker-{drain.group}"
    mesh.gone.add(worker)
    system, process = mesh.systems[worker], mesh.processes[worker]
    if drain.is_told:
        mesh.actors["supervisor"].ctx.announce(drained={worker: system.address.epoch})
    await process.spawn(system.drain())
    await process.spawn(system.stop())
    process.kill()
    if drain.is_told:
        await asyncio.sleep(SLACK_S)
        return [one for one in mesh.held(ZOMBIES) if one.startswith(f"scheduler-{drain.group} ")]
    if drain.away_s is not None:
        await asyncio.sleep(drain.away_s)
        mesh.gone.discard(worker)
        await mesh.start_actor(worker, system.address.epoch + 1)
    return []


def _computed_by_s(drain: Drain, mesh: SimulatedMesh, clients: list[Client]) -> float:
    """When the groups that are left have computed all, one sample after the other: each token and chunk is a step."""
    step_s = max((ms / 1000 for group, ms in mesh.speeds.step_ms.items() if group != drain.group), default=0.0)
    # What can never fit is not computed.
    computed = [one for one in clients if one.num_pages() < mesh.speeds.num_pages]
    return drain.at_s + sum(
        one.n * step_s * (len(one.expected()[2]) + len(one.prompt) // CHUNK_TOKENS + 1) for one in computed
    )


def _problem(
    drain: Drain, most_s: float, mesh: SimulatedMesh, client: Client, outcome: Outcome, elapsed_s: float
) -> str:
    """`most_s`: within this all is computed, if nobody waits for the worker."""
    text, reason, token_ids = client.expected()
    failure = outcome.failure
    if problem := judge_tokens(mesh, client, outcome, token_ids):
        return problem
    if client.num_pages() > mesh.speeds.num_pages - 1:
        return "" if failure is not None and failure.code == "never_fits" else f"it can never fit: {outcome}"
    if failure is None and outcome.num_ends == 0 and any_failed(mesh, drain):
        # Another sample of its call was refused, which ended the call.
        return "" if text.startswith(outcome.text) else f"{outcome.text!r} does not begin {text!r}"
    if failure is not None:
        if not any_failed(mesh, drain):
            return f"another group was there, or the worker came back, and it failed: {failure}"
        if failure.code != "draining":
            return f"it failed with {failure}"
        return "" if elapsed_s < ROLE_WAIT_S + SLACK_S else f"it was refused only after {elapsed_s:.1f} s"
    if (outcome.text, outcome.finish_reason) != (text, reason):
        return f"{outcome.text!r} ({outcome.finish_reason}) is not {text!r} ({reason})"
    if drain.is_told and elapsed_s > most_s:
        return f"nobody was to wait, and it took {elapsed_s:.1f} s"
    return ""


def any_failed(mesh: SimulatedMesh, drain: Drain) -> bool:
    """Whether requests may be refused: the only worker went, and did not come back."""
    return mesh.mixed and drain.away_s is None


async def _scenario(mesh: SimulatedMesh, clients: list[Client], drain: Drain) -> list[str]:
    mesh.makers |= {"tokenizer-1": Stranger, "supervisor": Supervisor}
    await mesh.start()
    befalling = asyncio.ensure_future(_befall(mesh, drain))
    async with asyncio.timeout(ROLE_WAIT_S + 2 * DRAINED_WAIT_S):
        # With few pages for all of them, to compute may itself take longer than the wait.
        most_s = max(DRAINED_WAIT_S, _computed_by_s(drain, mesh, clients))
        problems = await ask_all(mesh, clients, partial(_problem, drain, most_s))
    problems += [f"its worker stays away, and it waits: {one}" for one in await befalling]
    if drain.away_s is None:
        mesh.actors["supervisor"].ctx.announce(drained={})
        mesh.gone.discard(f"worker-{drain.group}")
        await mesh.start_actor(f"worker-{drain.group}", 2)
    return problems


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"drains/{seed}")
    clients = [client for client in draw_clients(draw, "") if client.leaves_after_s is None]
    mesh = SimulatedMesh(seed, Faults(), draw.random() < 0.5, "")
    # A worker that ends because of its device while it drains has died, which other suites look at.
    mesh.devices.end()
    drain = draw_drain(draw, mesh.groups)
    play(mesh, _scenario(mesh, clients, drain), drain, f"replay: python -m tests.simulation drains {seed}")
    kind = "told" if drain.is_told else "drained" if drain.away_s is None else "renewed"
    return Counter({kind: 1, "clients": len(clients)})
