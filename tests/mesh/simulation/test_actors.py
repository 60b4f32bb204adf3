"""Real actor systems on the simulated network: asks under faults, crashes, hangs, and the speed of it all."""

import asyncio
import time

import pytest

from mesh.actor import Actor
from mesh.errors import CallError
from mesh.simulation.faults import Faults
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import run
from mesh.testing.actors import Actors
from mesh.wire.codec import Codec
from mesh.wire.message import Message
from nodes.registry.actor import RegistryActor

pytestmark = pytest.mark.virtual_time


class Ping(Message, frozen=True):
    number: int


class Pong(Message, frozen=True):
    number: int


class Echo(Actor):
    role = "echo"
    codec = Codec(Ping | Pong)

    def on_ask(self, call):
        call.reply(Pong(number=call.message.number))


class Simulation(Actors):
    def __init__(self, seed, faults=None):
        super().__init__(SimulatedNetwork(seed, faults))

    async def start(self, actor, actor_id, epoch=0):
        await super().start(actor_id, actor, epoch=epoch, waits=False)
        return actor

    async def joined(self):
        for actor_id, system in self.systems.items():
            if actor_id != "registry":
                await system.joined()

    async def knows(self, actor, *actor_ids):
        async with asyncio.timeout(60):
            while any(actor.ctx.members.get(actor_id) is None for actor_id in actor_ids):
                await asyncio.sleep(0.05)


async def mesh(seed, faults=None):
    simulation = Simulation(seed, faults)
    await simulation.start(RegistryActor(), "registry")
    left = await simulation.start(Echo(), "left")
    right = await simulation.start(Echo(), "right")
    await simulation.joined()
    await simulation.knows(left, "right")
    await simulation.knows(right, "left")
    return simulation, left, right


STORM = Faults(drop=0.02, duplicate=0.05, slow=0.1, partition=0.2, silent_down=0.2, reset=0.002)


async def asks_under_faults(seed):
    simulation, left, _ = await mesh(seed, STORM)
    loop = asyncio.get_running_loop()
    outcomes = []

    async def one(number):
        began = loop.time()
        try:
            answer = await left.ctx.ask("right", Ping(number=number), timeout_s=2.0)
        except CallError as error:
            outcomes.append((number, error.code))
        else:
            assert answer.message == Pong(number=number)
            outcomes.append((number, "ok"))
        assert loop.time() - began <= 2.0 + 1e-6, "an ask outlived its deadline"

    for number in range(100):
        await asyncio.gather(one(2 * number), one(2 * number + 1))
        await asyncio.sleep(0.1)
    simulation.network.calm()
    await simulation.stop()
    assert len(outcomes) == 200
    return outcomes, simulation.network.trace.fingerprint


@pytest.mark.parametrize("seed", range(5))
def test_asks_end_once_by_their_deadline_and_runs_repeat(seed):
    first = run(asks_under_faults(seed))
    assert first == run(asks_under_faults(seed))
    assert sum(outcome == "ok" for _, outcome in first[0]) > 50


def test_an_hour_of_heartbeats_takes_seconds():
    async def main():
        simulation, _, right = await mesh(2)
        await asyncio.sleep(3600)
        assert right.ctx.members.get("left") is not None
        await simulation.stop()
        return simulation.network.counts["sent"]

    began = time.process_time()
    sent = run(main())
    assert sent > 7200 * 2
    assert time.process_time() - began < 30
