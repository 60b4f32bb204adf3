"""A mesh over hosts with keys: its list changes, hosts are added and revoked, and one lies. One seeded run of it.

What else happens to hosts is as in `hosts.py`.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from cli.protocol import TakeAllowList
from mesh.errors import CallError
from mesh.simulation.faults import Faults
from mesh.testing.processes import ProcessState
from nodes.roles import WORKER
from tests.simulation.hosted_mesh import DECODE, HEAD, JOINER, PREFILL
from tests.simulation.hosts import HEARTBEAT_S, REFUSED_S, Blow, befall, draw_blow
from tests.simulation.keyed_mesh import KeyedMesh, first_list, new_key
from tests.simulation.returns import DAY_S
from tests.simulation.scenario import Client, ask_all, draw_clients, judge_outcome, play
from tests.simulation.strangers import LATER

ASK_S = 1.0
GOSSIP = "g"
"""A host that is allowed to run workers only."""
SPARE = "spare"
"""A host that is put on the list and never comes."""


async def change_list(mesh: KeyedMesh) -> None:
    """One more host is allowed."""
    mesh.add(f"{SPARE}-{mesh.counts['list']}")
    mesh.counts["list"] += 1


async def restore_list(mesh: KeyedMesh) -> None:
    """An old copy of the list is put back at the registry's host, whose supervisor dies; later the right one."""
    newest, hosts = mesh.files[HEAD].allowed, [*mesh.hosts]
    mesh.files[HEAD].put(first_list(hosts))
    mesh.counts["restored"] += 1
    mesh.processes[f"supervisor.{HEAD}"].kill()
    await asyncio.sleep(5.0)
    mesh.files[HEAD].put(newest)


async def lie(mesh: KeyedMesh) -> None:
    """A supervisor that is not the registry's tells another a list of its own."""
    liar, name = mesh.actors[f"supervisor.{DECODE}"], f"supervisor.{DECODE}"
    if mesh.processes[name].state is not ProcessState.RUNNING or mesh.systems[name].actor is not liar:
        return
    mesh.counts["lied"] += 1
    forged = first_list(mesh.hosts).without(HEAD).with_host(DECODE, new_key(DECODE).public_key, ("*", "registry"))
    try:
        await liar.ctx.ask(f"supervisor.{PREFILL}", TakeAllowList(allowed=forged), timeout_s=ASK_S)
    except CallError:
        return


async def gossip(mesh: KeyedMesh) -> None:
    """A registry starts again, and is told of later incarnations of others' actors by a host that runs workers only."""
    mesh.add(GOSSIP, (WORKER,))
    old = mesh.bootstrap.found
    mesh.processes["registry"].kill()
    while mesh.bootstrap.found in (None, old):
        await asyncio.sleep(0.01)
    there = [mesh.systems[one].describe() for one in mesh.ids_of(PREFILL) if one in mesh.systems]
    named = [msgspec.structs.replace(one, epoch=LATER) for one in there]
    mesh.counts["gossip"] += await mesh.gossip(f"worker-x.{GOSSIP}", named)


async def join(mesh: KeyedMesh, draw: random.Random) -> None:
    """A host is allowed, and joins up to a second before or after that; most often it is revoked while it runs."""
    wrong = mesh.wrong_spec == JOINER
    stays = draw.random() < 0.3
    joins_s, allowed_s = draw.choice([0.0, 1.0]) * draw.random(), draw.choice([0.0, 1.0]) * draw.random()
    mesh.counts["wrong spec" if wrong else "joined"] += 1
    coming = asyncio.ensure_future(_at(joins_s, mesh.intrude(JOINER) if wrong else mesh.join(JOINER)))
    await asyncio.sleep(allowed_s)
    mesh.add(JOINER)
    await coming
    if not (wrong or stays):
        await asyncio.sleep(1.0 + 4.0 * draw.random())
        mesh.counts["revoked"] += 1
        mesh.revoke(JOINER)


async def _at(at_s: float, what: Coroutine[Any, Any, None]) -> None:
    await asyncio.sleep(at_s)
    await what


async def _scenario(mesh: KeyedMesh, clients: list[Client], blows: list[Blow], draw: random.Random) -> list[str]:
    faults, mesh.network.faults = mesh.network.faults, Faults()
    # Not all of them have makers before the start.
    mesh.gone |= {f"supervisor.{JOINER}", f"kv-agent-0.{JOINER}"}
    mesh.gone |= {f"{role}-decode-0.{JOINER}" for role in ("scheduler", "worker")}
    await mesh.start()
    mesh.network.faults = faults
    events = [*(change_list(mesh) for _ in range(draw.choice([1, 2, 4]))), join(mesh, draw)]
    events += [lie(mesh)] if draw.random() < 0.4 else []
    events += [gossip(mesh)] if random.Random(f"gossip/{mesh.seed}").random() < 0.3 else []
    # When nobody else changes the list, as an operator without another copy would do it.
    late = [restore_list(mesh)] if draw.random() < 0.2 else []
    befalling = [asyncio.ensure_future(befall(mesh, blow)) for blow in blows]
    befalling += [asyncio.ensure_future(_at(4.0 * draw.random(), event)) for event in events]
    problems = await ask_all(mesh, clients, judge_outcome)
    await asyncio.gather(*befalling)
    for event in late:
        await event
    mesh.network.calm()
    if mesh.counts["remade"]:
        await asyncio.sleep(REFUSED_S)
    return [*problems, *mesh.reused()]


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each thing came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"keys/{seed}")
    clients = draw_clients(draw, "")
    faults = Faults(silent_down=draw.choice([0.0, 0.3]), silent_s=HEARTBEAT_S)
    mesh = KeyedMesh(seed, faults, False, "", has_joiner=True, wrong_spec=JOINER if draw.random() < 0.3 else "")
    mesh.behind_s = DAY_S
    for held in mesh.files.values():
        held.put(first_list([HEAD, PREFILL, DECODE]))
    victims = ["registry", f"tokenizer-0.{HEAD}", f"kv-agent-0.{PREFILL}", f"worker-decode-0.{DECODE}"]
    drawn = [draw_blow(draw, mesh, clients, victims) for _ in range(draw.choice([0, 1, 2]))]
    blows = [blow for blow in drawn if blow.kind in ("cut", "pause", "death", "kill")]
    replay = f"replay: python -m tests.simulation keys {seed}"
    play(mesh, _scenario(mesh, clients, blows, draw), blows, replay)
    assert not mesh.problems(), "\n".join([*mesh.problems(), mesh.network.report(60), str(blows), replay])
    return mesh.counts
