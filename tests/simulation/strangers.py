"""A mesh whose actors prove who they are, and strangers among them that say what they please: one seeded run of it.

Nothing else happens to it except that the registry dies once, so any other death or wrong answer is due to a stranger.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec
from typing_extensions import override

from mesh.actor import Actor
from mesh.address import Address
from mesh.errors import PROOF_CODES, CallError
from mesh.membership.proof import HostSecret
from mesh.membership.view import Member
from mesh.options import SystemOptions
from mesh.simulation.faults import Faults
from mesh.system import ActorSystem
from mesh.transport.base import Channel
from mesh.wire.frames import Join, Leave, PeerDown
from mesh.wire.message import Message
from nodes import roles
from tests.simulation.scenario import Client, ask_all, draw_clients, judge_outcome, play
from tests.simulation.whole_mesh import SimulatedMesh

ROLES = [roles.GATEWAY, roles.TOKENIZER, roles.SCHEDULER, roles.WORKER, roles.DETOKENIZER, roles.KV_AGENT]
LATER = 1 << 40
ASK_S = 0.5


class Stranger(Actor):
    """Says hello, and what a test has it say."""

    codec = roles.NODE_CODEC
    joins: ClassVar[bool] = False

    def __init__(self, role: str) -> None:
        self.role = role  # type: ignore[misc]


@dataclass
class ProvedMesh(SimulatedMesh):
    """A mesh whose actors, except the strangers, have its supervisor's secret."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.strangers: list[ActorSystem] = []
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        key = random.Random(f"secret/{self.seed}").randbytes(32)
        self.secret = HostSecret(mesh="sim", host="", key=key, supervised=[], roles=["registry", "supervisor", *ROLES])

    @override
    def _options(self, actor_id: str, dice: random.Random) -> SystemOptions:
        secret = msgspec.structs.replace(self.secret, supervised=[*self.makers, "supervisor"])
        return SystemOptions(host="sim", pid=1, random=dice, secret=secret)

    async def stranger(self, actor_id: str, role: str = "custom", proof: bytes = b"") -> ActorSystem:
        """Start a stranger that knows everybody, and shows everybody `proof`."""
        address = Address(actor_id, LATER + len(self.strangers))
        options = SystemOptions(host="sim", pid=1, random=random.Random(f"{address}/{self.seed}"), proof=proof)
        system = ActorSystem(Stranger(role), address, self.network.transport(address), self.bootstrap, options)
        self.strangers.append(system)
        await system.start()
        known = [one.describe() for name, one in self.systems.items() if name != actor_id]
        system.registration.view.reset(1, 1, [msgspec.structs.replace(one, proof=b"seen") for one in known])
        return system


async def _ask(system: ActorSystem, actor_id: str, message: Message) -> None:
    try:
        await system.actor.ctx.ask(actor_id, message, timeout_s=ASK_S)
    except CallError:
        return


async def take_a_name(mesh: ProvedMesh, victim: str) -> None:
    """Say hello to everybody, and join, as an actor that is there, in a later epoch, with its old proof."""
    there = mesh.systems[victim].describe()
    forger = await mesh.stranger(victim, there.role, there.proof)
    targets = [actor_id for actor_id in mesh.makers if actor_id != victim]
    message = Join(member=forger.describe())
    await asyncio.gather(*(_ask(forger, actor_id, message) for actor_id in targets))


async def bury(mesh: ProvedMesh, victim: str) -> None:
    """Tell everybody that a living actor is dead, and the registry that it has left."""
    liar = await mesh.stranger("words-0")
    buried = mesh.systems[victim].address
    for actor_id in mesh.makers:
        liar.actor.ctx.tell(actor_id, PeerDown(actor_id=victim, epoch=buried.epoch), channel=Channel.CONTROL)
    await _ask(liar, "registry", Leave(actor_id=victim, epoch=buried.epoch))
    # The next registry repairs both, and requests need not notice.
    if victim in mesh.actors["registry"].core.departed:
        mesh.found.append(f"{victim} was seen off")
    forgetful = [name for name, one in mesh.systems.items() if one.registration.view.get(victim) is None]
    mesh.found += [f"{name} has buried {victim}" for name in forgetful if mesh.actors[name].joins and name != victim]


async def gossip(mesh: ProvedMesh, victim: str) -> None:
    """Name an actor in a later epoch to a registry that has just started and knows nobody."""
    mesh.processes["registry"].kill()
    old = mesh.systems["registry"]
    gossiper = await mesh.stranger("words-1")
    while mesh.bootstrap.found is None or mesh.bootstrap.found[0] == old.address:
        await asyncio.sleep(0.01)
    named = mesh.systems[victim].describe()
    forged: Member = msgspec.structs.replace(named, epoch=LATER, endpoint=gossiper.describe().endpoint, proof=b"")
    await _ask(gossiper, "registry", Join(member=gossiper.describe(), known_members=[forged]))


ATTACKS = [take_a_name, bury, gossip]


async def _scenario(mesh: ProvedMesh, clients: list[Client], attacks: list[tuple[float, str, int]]) -> list[str]:
    async def attack(at_s: float, victim: str, kind: int) -> None:
        await asyncio.sleep(at_s)
        mesh.counts[ATTACKS[kind].__name__] += 1
        await partial(ATTACKS[kind], mesh)(victim)

    await mesh.start()
    try:
        attacking = [asyncio.ensure_future(attack(*one)) for one in attacks]
        problems = await ask_all(mesh, clients, judge_outcome)
        await asyncio.gather(*attacking)
        problems += [f"{num} of {role} died of it" for role, num in mesh.deaths.items() if role != "registry"]
        refused = sum(
            system.metrics.value(f"mesh_{what}_refused_total", code=code)
            for system in mesh.systems.values()
            for code in PROOF_CODES
            for what in ("frames", "members")
        )
        mesh.counts["refused"] += int(refused)
        return problems + mesh.found
    finally:
        for system in mesh.strangers:
            await system.stop()


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; returns how often each attack came. Raises AssertionError with the messages and the replay."""
    draw = random.Random(f"strangers/{seed}")
    clients = draw_clients(draw, "")
    mesh = ProvedMesh(seed, Faults())
    mesh.devices.end()
    victims = ["gateway-0", "scheduler-decode-0", "scheduler-prefill-0", "worker-decode-0", "kv-agent-0", "tokenizer-0"]
    attacks = [
        (draw.choice(clients).arrives_s + draw.random(), draw.choice(victims), kind) for kind in range(len(ATTACKS))
    ]
    play(mesh, _scenario(mesh, clients, attacks), attacks, f"replay: python -m tests.simulation strangers {seed}")
    return mesh.counts
