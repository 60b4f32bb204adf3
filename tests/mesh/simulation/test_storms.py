"""Membership, topics and asks of whole systems under seeded faults, on virtual time.

While the storm lasts everything may be late; after it everybody agrees again, nothing was delivered twice or out of
order, and every ask has ended.
"""

import asyncio
from random import Random

import pytest

from mesh.errors import CallError
from mesh.simulation.faults import Faults
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import run
from mesh.testing.actors import Actors
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import Number, Recorder, Say

STORM = Faults(drop=0.02, duplicate=0.05, slow=0.1, reset=0.002, silent_down=0.2, partition=0.1)
NAMES = ("a", "b", "c")


class Follower(Recorder):
    """Keeps what it was told of each topic since the last reset, and looks at the order at once."""

    def __init__(self):
        super().__init__()
        self.followed = {}
        self.num_published = 0

    def on_subscription_reset(self, publisher, topic):
        self.followed[publisher.actor_id] = (publisher, [])

    def on_publication(self, publisher, topic, sequence, message):
        since, got = self.followed[publisher.actor_id]
        assert since == publisher
        assert not got or got[-1] == sequence - 1, "out of order, or twice"
        assert message == Number(value=sequence)
        got.append(sequence)


class Storm(Actors):
    def __init__(self, seed, faults):
        super().__init__(SimulatedNetwork(seed, faults))
        self.random = Random(f"storm/{seed}")

    async def start(self, actor_id):
        actor = RegistryActor() if actor_id == "registry" else Follower()
        await super().start(actor_id, actor, waits=False)
        for other in NAMES:
            if actor_id != "registry" and other != actor_id:
                actor.ctx.subscribe(other, "t")

    def members(self):
        return [system for actor_id, system in sorted(self.systems.items()) if actor_id != "registry"]

    def agree(self):
        """Everybody knows exactly who is there, and has all there is to know of every topic."""
        there = sorted(str(system.address) for system in self.systems.values())
        for system in self.members():
            if len(system.asking) or system.registration.registry is None:
                return False
            if [str(m.address) for m in system.registration.view.all()] != there:
                return False
            for other in self.members():
                if other is not system and (last := other.actor.num_published):
                    since, got = system.actor.followed.get(other.address.actor_id, (None, []))
                    if since != other.address or (got and got[-1] != last):
                        return False
        return True


async def storm(seed, *, crashes):
    mesh = Storm(seed, STORM)
    for actor_id in ("registry", *NAMES):
        await mesh.start(actor_id)
    ended = []

    async def ask(system, other):
        try:
            ended.append((await system.actor.ctx.ask(other, Say(text="hi"), timeout_s=3.0)).sender)
        except CallError as error:
            ended.append(error.code)

    tasks = []
    for step in range(150):
        await asyncio.sleep(mesh.random.uniform(0.0, 0.2))
        for system in mesh.members():
            if mesh.random.random() < 0.5:
                following = Number(value=system.actor.num_published + 1)
                system.actor.num_published = system.actor.ctx.publish("t", following)
        if step % 10 == 0:
            system, other = mesh.random.sample(mesh.members(), 2)
            tasks.append(asyncio.create_task(ask(system, other.address.actor_id)))
        if crashes and mesh.random.random() < 0.05:
            victim = mesh.random.choice(("registry", *NAMES))
            await mesh.kill(victim)
            await asyncio.sleep(mesh.random.uniform(0.0, 1.0))
            await mesh.start(victim)
    mesh.network.calm()
    async with asyncio.timeout(120):
        await asyncio.gather(*tasks)
        while not mesh.agree():
            await asyncio.sleep(0.1)
    assert len(ended) == len(tasks)
    for system in (*mesh.members(), mesh.systems["registry"]):
        await system.stop()
    return ended, mesh.network.trace.fingerprint


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_after_the_storm_everybody_agrees(seed, crashes):
    run(storm(seed, crashes=crashes))


def test_storms_repeat():
    assert run(storm(99, crashes=True)) == run(storm(99, crashes=True))
