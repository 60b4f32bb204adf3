"""The far side of `benchmarks/mesh_calls.py`: `python -m benchmarks.mesh_peer WAY DIR`, one process per way.

A sink prints nothing until it has counted all frames, then one line: seconds from the first frame to the last.
"""

import asyncio
import pickle  # the baseline that this project does not use
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

from mesh.actor import Actor, Call
from mesh.address import Address, Endpoint
from mesh.membership.view import StaticBootstrap
from mesh.runtime.run_directory import RunDirectory
from mesh.system import ActorSystem
from mesh.transport.base import Buffer
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes.protocol import TokenBatch
from nodes.roles import NODE_CODEC

NUM_FRAMES = 40_000
NEAR, FAR = Address("near", 1), Address("far", 1)
HIGH_WATER_MARK = 1000


@dataclass
class PickledFrame:
    """The same columns as a plain dataclass, as sent by servers that pickle."""

    streams: list[int]
    positions: list[int]
    counts: list[int]
    token_ids: list[int]
    opens: list[object]
    finishes: list[object]
    closes: list[int]
    extras: list[bytes]


class Clock:
    """Counts frames and takes the time from the first to the last."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0.0
        self.done = False

    def tick(self) -> None:
        """Count a frame."""
        if not self.count:
            self.first = time.perf_counter()
        self.count += 1
        if self.count == NUM_FRAMES:
            print(time.perf_counter() - self.first, flush=True)
            self.done = True


class FarActor(Actor):
    """Echoes asks, counts tells."""

    role = "bench"
    codec = NODE_CODEC
    joins = False

    def __init__(self) -> None:
        self.clock = Clock()

    def on_tell(self, sender: Address, message: TokenBatch, buffers: Sequence[Buffer]) -> None:
        """Count it."""
        self.clock.tick()

    def on_ask(self, call: Call) -> None:
        """Answer with the same message."""
        call.reply(call.message)


def bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, path: Path) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.bind(f"ipc://{path}")
    return socket


def echo_blocking(path: Path) -> None:
    socket = bind(zmq.Context(), zmq.ROUTER, path / "echo")
    while True:
        socket.send_multipart(socket.recv_multipart())


async def actor(path: Path) -> None:
    directory = RunDirectory(path)
    directory.create()
    nowhere = StaticBootstrap(Address("registry", 1), Endpoint("", ""))
    transport = ZeroMQTransport(ZeroMQOptions(run_directory=directory))
    system = ActorSystem(FarActor(), FAR, transport, nowhere)
    await system.start()
    directory.write_registry(FAR, system.describe().endpoint)
    await system.shutdown_asked()


async def sink_drained(path: Path) -> None:
    """By hand: a ROUTER drained in batches when its descriptor says so, bodies decoded, nothing else."""
    socket = bind(zmq.Context(), zmq.ROUTER, path / "drained")
    decoder, clock, done = msgspec.msgpack.Decoder(TokenBatch), Clock(), asyncio.Event()

    def drain() -> None:
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            decoder.decode(parts[1])
            clock.tick()
        if clock.done:
            done.set()

    asyncio.get_running_loop().add_reader(socket.getsockopt(zmq.FD), drain)
    drain()
    await done.wait()


async def sink_pickled(path: Path) -> None:
    """As other servers do it: `zmq.asyncio`, a pickle per message."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.bind(f"ipc://{path / 'pickled'}")
    clock = Clock()
    while not clock.done:
        parts = await socket.recv_multipart()
        pickle.loads(parts[1])  # noqa: S301
        clock.tick()


def main() -> None:
    way, path = sys.argv[1], Path(sys.argv[2])
    match way:
        case "echo_blocking":
            echo_blocking(path)
        case "actor":
            uvloop.run(actor(path))
        case "sink_drained":
            uvloop.run(sink_drained(path))
        case _:
            uvloop.run(sink_pickled(path))


if __name__ == "__main__":
    main()
