"""A whole session, frame by frame: an actor joins at the registry, asks another one something, and leaves.

Recorded from the real system on virtual time, so it is the same each time. A peer in another language has to send and
understand exactly these frames.
"""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from mesh.actor import Actor, Call
from mesh.address import Address, Endpoint
from mesh.options import SystemOptions
from mesh.simulation import virtual_time
from mesh.simulation.network import SimulatedNetwork, SimulatedTransport
from mesh.system import ActorSystem
from mesh.transport.base import Buffer, Channel, Link, Listener
from mesh.wire.frames import SYSTEM_CODEC
from mesh.wire.header import SYSTEM_FLAG, Header, Verb
from nodes.protocol import Detokenize, Detokenized
from nodes.registry.actor import RegistryActor
from nodes.roles import NODE_CODEC
from tools.protocol_reference.samples import plain

NEWCOMER = "custom-0"


class _Tokenizer(Actor):
    role = "tokenizer"
    codec = NODE_CODEC

    def on_ask(self, call: Call) -> None:
        if isinstance(call.message, Detokenize):
            call.reply(Detokenized(text="hi"))
        else:
            super().on_ask(call)


class _Newcomer(Actor):
    role = "custom"
    codec = NODE_CODEC


class _Recorder:
    """A transport that writes down what the newcomer and its peers send each other."""

    def __init__(self, inner: SimulatedTransport, name: str, frames: list[dict[str, Any]]) -> None:
        self._inner = inner
        self._name = name
        self._frames = frames

    async def start(self, address: Address, listener: Listener) -> Endpoint:
        return await self._inner.start(address, listener)

    def dial(self, peer: Address, endpoint: Endpoint) -> Link:
        return self._inner.dial(peer, endpoint)

    def send(self, link: Link, channel: Channel, parts: Sequence[Buffer]) -> bool:
        if NEWCOMER in (self._name, link.peer.actor_id):
            self._frames.append(_describe(self._name, link, channel, [bytes(part) for part in parts]))
        return self._inner.send(link, channel, parts)

    def close_link(self, link: Link) -> None:
        self._inner.close_link(link)

    async def stop(self) -> None:
        await self._inner.stop()


def _describe(sender: str, link: Link, channel: Channel, parts: list[bytes]) -> dict[str, Any]:
    header = msgspec.msgpack.decode(parts[0], type=Header)
    codec = SYSTEM_CODEC if header.flags & SYSTEM_FLAG else NODE_CODEC
    body = codec.decode(parts[1])
    return {
        "from": sender, "to": link.peer.actor_id,
        "channel": channel.name.lower(), "verb": Verb(header.verb).name.lower(),
        "header": plain(header), "type": type(body).__name__, "body": plain(body),
        "parts": [part.hex() for part in parts],
    }  # fmt: skip


class _Session:
    """Three actors on one switchboard."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self._network = SimulatedNetwork(seed=0)
        self._registry: ActorSystem | None = None

    def lookup(self) -> tuple[Address, Endpoint] | None:
        """The registry, as `registry.json` in a run directory would say."""
        return None if self._registry is None else (self._registry.address, self._registry.describe().endpoint)

    async def start(self, actor_id: str, epoch: int, actor: Actor) -> ActorSystem:
        options = SystemOptions(host="host-a", pid=4000 + epoch, random=Random(epoch))
        address = Address(actor_id, epoch)
        transport = _Recorder(self._network.transport(address), actor_id, self.frames)
        system = ActorSystem(actor, address, transport, self, options)
        await system.start()
        if actor.joins:
            await system.joined()
        else:
            self._registry = system
        return system

    async def run(self) -> None:
        registry = await self.start("registry", 1, RegistryActor())
        tokenizer = await self.start("tokenizer-0", 3, _Tokenizer())
        await asyncio.sleep(1)
        newcomer = await self.start(NEWCOMER, 2, _Newcomer())
        await asyncio.sleep(0.1)
        answer = await newcomer.actor.ctx.ask("tokenizer-0", Detokenize(token_ids=[104, 105]), timeout_s=1.5)
        assert answer.message == Detokenized(text="hi")
        await asyncio.sleep(0.5)
        for system in (newcomer, tokenizer, registry):
            await system.stop()


def record() -> list[dict[str, Any]]:
    """All frames from and to the newcomer, in the order they were sent."""
    session = _Session()
    virtual_time.run(session.run())
    return session.frames
