"""Actors in one process over a simulated network, for testing an actor together with its peers.

    actors = Actors(SimulatedNetwork(seed=0))
    await actors.start("registry", RegistryActor())
    a = await actors.start("a", MyActor())          # has joined when this returns; a.actor.ctx.ask("b", ...)
    await actors.kill("a")
    await actors.stop()

On virtual time (`mesh/simulation/virtual_time.py`) this takes no time, and every run is the same.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork
from mesh.system import ActorSystem

_REGISTRY = "registry"
_JOIN_S = 5.0
"""Virtual time, so it costs nothing: two joins (`join_timeout_s`, 2 s), since the first one's frames may be lost."""


class Actors:
    """The actors started and not killed, by actor id. The one called `registry` is found here by all others."""

    def __init__(self, network: SimulatedNetwork, options: SystemOptions | None = None) -> None:
        self.network = network
        self.systems: dict[str, ActorSystem] = {}
        self._options = options or SystemOptions(host="sim", pid=1)
        self._epochs: Counter[str] = Counter()

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """Where the registry is; makes this a bootstrap."""
        registry = self.systems.get(_REGISTRY)
        return None if registry is None else (registry.address, registry.describe().endpoint)

    async def start(
        self, actor_id: str, actor: Actor, *, epoch: int = 0, waits: bool = True, **attributes: Any
    ) -> ActorSystem:
        """Start an actor, as its next incarnation if no epoch is given; `waits`: return only when it has joined."""
        self._epochs[actor_id] = epoch or self._epochs[actor_id] + 1
        address = Address(actor_id, self._epochs[actor_id])
        options = replace(self._options, random=Random(f"{self.network.seed}/{address}"))
        system = ActorSystem(actor, address, self.network.transport(address), self, options)
        self.systems[actor_id] = system
        await system.start()
        if attributes:
            system.announce(**attributes)
        if actor.joins and waits:
            async with asyncio.timeout(_JOIN_S):
                await system.joined()
        return system

    async def kill(self, actor_id: str) -> None:
        system = self.systems.pop(actor_id)
        self.network.crash(system.address)
        await system.stop()

    async def stop(self) -> None:
        for system in reversed(list(self.systems.values())):
            await system.stop()
