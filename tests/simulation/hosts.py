"""A mesh over hosts, and what happens to them: partitions, pauses, deaths, returns, joins, drains. One seeded run."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from mesh.simulation.faults import Faults
from tests.simulation.asking import counted
from tests.simulation.hosted_mesh import DECODE, HEAD, JOINER, PREFILL, HostedMesh, host_of
from tests.simulation.returns import DAY_S
from tests.simulation.scenario import (
    Client,
    ask_all,
    draw_asking,
    draw_clients,
    draw_faults,
    draw_min_tokens,
    draw_old_workers,
    draw_penalties,
    judge_outcome,
    play,
)

THEMES = ["", "", "", "copies", "sources", "stalls", "leavers"]
HEARTBEAT_S = 3.0
"""The time within which a transport notices that the other end has dropped a connection."""
REFUSED_S = 20.0
"""Long enough for an actor that was refused to come again."""


class Blow(NamedTuple):
    """What happens to a host, `at_s` after the start, for `lasts_s`.

    `cut`: it is cut off from `others`, messages lost or held, in both directions or one; `pause`; `death`: it returns,
    with its files or without; `end`: it never returns; `kill`: only its actor `victim` dies; `join`; `drain`;
    `slander`: its supervisor claims that `victim` of another host is dead.
    """

    at_s: float
    kind: str
    host: str
    lasts_s: float
    others: tuple[str, ...] = ()
    hold: bool = False
    one_way: bool = False
    is_remade: bool = False
    is_behind: bool = False
    victim: str = ""


def draw_blow(draw: random.Random, mesh: HostedMesh, clients: list[Client], victims: list[str]) -> Blow:
    """One blow, soon after a client has come."""
    at_s = draw.choice(clients).arrives_s + draw.random() * draw.choice([0.1, 0.5, 3.0])
    kind = draw.choice(["cut", "cut", "cut", "pause", "death", "death", "kill", "slander"])
    host = draw.choice([HEAD, PREFILL, DECODE, DECODE])
    others = [other for other in mesh.hosts if other != host]
    if draw.random() < 0.5:
        others = [draw.choice(others)]
    lasts_s = draw.choice([0.3, 2.0, 10.0]) * (0.5 + 0.5 * draw.random())
    hold, one_way, is_remade = draw.random() < 0.4, draw.random() < 0.3, draw.random() < 0.7
    victim = draw.choice([one for one in victims if (host_of(one) == host) == (kind == "kill")])
    is_behind = is_remade and draw.random() < 0.4
    return Blow(at_s, kind, host, lasts_s, tuple(others), hold, one_way, is_remade, is_behind, victim)


def draw_blows(draw: random.Random, mesh: HostedMesh, clients: list[Client]) -> list[Blow]:
    """Up to five blows. In half of all meshes a host joins, and then most often one of its kind leaves, or is lost."""
    victims = ["registry", *(f"{role}-0.{HEAD}" for role in ("gateway", "tokenizer", "detokenizer"))]
    for group in mesh.groups:
        victims += [f"scheduler-{group}", f"worker-{group}", mesh.agent_of(group)]
    victims = [one for one in victims if host_of(one) != JOINER]
    drawn = [draw_blow(draw, mesh, clients, victims) for _ in range(draw.choice([1, 2, 3, 5]))]
    if mesh.has_joiner:
        at_s = 3.0 * draw.random()
        drawn.append(Blow(at_s, "join", JOINER, 0.0))
        # Not before the other one has joined, so that there always is one.
        leaves_s = at_s + 2.0 + 4.0 * draw.random()
        if (chance := draw.random()) < 0.5:
            drawn.append(Blow(leaves_s, "drain", draw.choice([DECODE, JOINER]), 0.0))
        elif chance < 0.8:
            drawn.append(Blow(leaves_s, "end", JOINER, 0.0))
    return drawn


async def befall(mesh: HostedMesh, blow: Blow) -> None:
    """Wait until the blow is due, and strike."""
    await asyncio.sleep(blow.at_s)
    host = blow.host
    if host in mesh.down or (blow.kind != "join" and f"supervisor.{host}" in mesh.gone):
        return
    mesh.counts[f"host {blow.kind}"] += 1
    if blow.kind == "cut":
        others = [other for other in blow.others if other != host]
        mesh.cut_off(host, others, blow.lasts_s, hold=blow.hold, one_way=blow.one_way)
    elif blow.kind == "pause":
        await mesh.pause(host, blow.lasts_s)
    elif blow.kind == "death":
        await mesh.lose(host, blow.lasts_s, is_remade=blow.is_remade, is_behind=blow.is_behind)
    elif blow.kind == "end":
        mesh.end(host)
    elif blow.kind == "kill":
        mesh.processes[blow.victim].kill()
    elif blow.kind == "join":
        await mesh.join(host)
    elif blow.kind == "drain":
        await mesh.drain_away(host)
    else:
        mesh.slander(host, blow.victim)


async def _scenario(mesh: HostedMesh, clients: list[Client], blows: list[Blow]) -> list[str]:
    faults, mesh.network.faults = mesh.network.faults, Faults()
    if mesh.has_joiner:
        mesh.gone |= {one for one in mesh.makers if host_of(one) == JOINER}
        mesh.gone |= {f"{role}-decode-0.{JOINER}" for role in ("scheduler", "worker")} | {f"kv-agent-0.{JOINER}"}
    await mesh.start()
    mesh.network.faults = faults
    befalling = [asyncio.ensure_future(befall(mesh, blow)) for blow in blows]
    problems = await ask_all(mesh, clients, judge_outcome)
    await asyncio.gather(*befalling)
    mesh.network.calm()
    if mesh.counts["remade"]:
        await asyncio.sleep(REFUSED_S)
    return [*problems, *mesh.reused(), *mesh.believed]


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each fault came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"hosts/{seed}")
    theme = draw.choice(THEMES)
    clients = draw_asking(seed, theme, draw_penalties(seed, draw_min_tokens(seed, draw_clients(draw, theme))))
    faults = draw_faults(draw, theme)
    quiet = Faults(silent_down=draw.choice([0.0, 0.3]))
    chosen = replace(quiet if draw.random() < 0.7 else faults, silent_s=HEARTBEAT_S)
    mesh = HostedMesh(seed, chosen, False, theme, has_joiner=draw.random() < 0.5)
    mesh.behind_s = DAY_S
    blows = draw_blows(draw, mesh, clients)
    # Not where all of decode's requests may have to go.
    is_alone = any(blow.kind == "drain" and blow.host == DECODE for blow in blows)
    groups = [
        group for group in mesh.groups if host_of(group) != DECODE and not (host_of(group) == JOINER and is_alone)
    ]
    mesh.unknown = draw_old_workers(seed, [worker for group in groups for worker in mesh.worker_ids(group)])
    play(mesh, _scenario(mesh, clients, blows), mesh.faults, blows, f"replay: python -m tests.simulation hosts {seed}")
    counts = Counter(dict(mesh.network.counts)) + Counter({f"died: {role}": n for role, n in mesh.deaths.items()})
    by_wire = Counter({"pages by tcp": mesh.wire.num_moved, "written late": mesh.wire.num_late})
    asked = counted([client.asks for client in clients], mesh.unknown.values())
    return counts + mesh.counts + mesh.moments.counts + by_wire + asked
