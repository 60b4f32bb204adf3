"""Asks and tells between two processes over ipc, against ZeroMQ by hand. `python -m benchmarks.mesh_calls`.

Round trip: one ask after the other, against a blocking pyzmq echo of as many bytes. Throughput: one step's tokens for
32 requests (`TokenBatch`), encoded, sent, received and decoded, against a hand-written drained loop that carries no
envelope (one part, no header), and against `zmq.asyncio` with a pickled dataclass. They all take turns; the median of
the rounds is shown. With `--xoscar`, an interpreter that has xoscar, its actors come after them.
"""

import argparse
import asyncio
import pickle  # the baseline that this project does not use
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

from benchmarks.mesh_peer import FAR, HIGH_WATER_MARK, NEAR, NUM_FRAMES, FarActor, PickledFrame
from mesh.membership.view import Member, StaticBootstrap
from mesh.runtime.run_directory import RunDirectory
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions
from nodes.protocol import Detokenized, TokenBatch

SLICE = 500
NUM_SLICES = 40
ROUNDS = 5
ASK = Detokenized(text="x" * 64)
FRAME = TokenBatch(
    streams=list(range(32)),
    positions=list(range(1000, 1032)),
    counts=[1] * 32,
    token_ids=list(range(5000, 5032)),
)


@contextmanager
def peer(way: str, path: Path) -> Iterator["subprocess.Popen[str]"]:
    arguments = [sys.executable, "-m", "benchmarks.mesh_peer", way, str(path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def seconds(process: "subprocess.Popen[str]") -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def dealer(path: Path) -> "zmq.Socket[bytes]":
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.connect(f"ipc://{path}")
    return socket


async def connected(path: Path) -> ActorSystem:
    """This process as an actor that knows the other."""
    bootstrap = RunDirectory(path).bootstrap()
    while (found := bootstrap.lookup()) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    transport = ZeroMQTransport(ZeroMQOptions(run_directory=RunDirectory(path)))
    system = ActorSystem(FarActor(), NEAR, transport, StaticBootstrap(*found))
    member = Member(actor_id=FAR.actor_id, role="bench", epoch=FAR.epoch, endpoint=found[1])
    system.registration.view.reset(1, 1, [member])
    await system.start()
    for _ in range(200):
        await system.actor.ctx.ask(FAR.actor_id, ASK, timeout_s=5)
    return system


async def round_trips(path: Path) -> dict[str, list[float]]:
    """Seconds per round trip: slices of blocking echoes and slices of asks in turn, both far sides warm."""
    figures: dict[str, list[float]] = {"blocking": [], "ask": []}
    with peer("echo_blocking", path), peer("actor", path), dealer(path / "echo") as socket:
        system = await connected(path)
        ask = system.actor.ctx.ask
        parts = [b"h" * 40, msgspec.msgpack.encode(ASK)]
        for _ in range(NUM_SLICES + 1):
            start = time.perf_counter()
            for _ in range(SLICE):
                socket.send_multipart(parts)
                socket.recv_multipart()
            middle = time.perf_counter()
            for _ in range(SLICE):
                await ask(FAR.actor_id, ASK, timeout_s=5)
            figures["blocking"].append((middle - start) / SLICE)
            figures["ask"].append((time.perf_counter() - middle) / SLICE)
        await system.stop()
    return {name: slices[1:] for name, slices in figures.items()}


async def tells(path: Path) -> float:
    with peer("actor", path) as process:
        system = await connected(path)
        tell = system.actor.ctx.tell
        for sent in range(NUM_FRAMES):
            while not tell(FAR.actor_id, FRAME):  # noqa: ASYNC110  the outbox is full: let it empty for a while
                await asyncio.sleep(0.002)
            if sent % 64 == 0:
                await asyncio.sleep(0)
        elapsed = await asyncio.to_thread(seconds, process)
        await system.stop()
        return NUM_FRAMES / elapsed


def drained(path: Path) -> float:
    with peer("sink_drained", path) as process, dealer(path / "drained") as socket:
        encoder = msgspec.msgpack.Encoder()
        for _ in range(NUM_FRAMES):
            socket.send(encoder.encode(FRAME))
        return NUM_FRAMES / seconds(process)


async def pickled(path: Path) -> float:
    with peer("sink_pickled", path) as process, zmq.asyncio.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.connect(f"ipc://{path / 'pickled'}")
        frame = PickledFrame(*msgspec.structs.astuple(FRAME))
        for _ in range(NUM_FRAMES):
            await socket.send(pickle.dumps(frame))
        elapsed = await asyncio.to_thread(seconds, process)
        socket.close(0)
        return NUM_FRAMES / elapsed


def throughputs() -> dict[str, list[float]]:
    """Frames per second of each way to send, by rounds."""
    figures: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, way in (
            ("drained", drained),
            ("tell", lambda path: uvloop.run(tells(path))),
            ("pickled", lambda path: uvloop.run(pickled(path))),
        ):
            with tempfile.TemporaryDirectory(prefix="kvb") as path:
                figures.setdefault(name, []).append(way(Path(path)))
    return figures


def of_xoscar(interpreter: str) -> tuple[float, float]:
    """Seconds of a round trip and messages a second, medians of as many runs as there are rounds."""
    command = [interpreter, str(Path(__file__).with_name("xoscar_peer.py"))]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(ROUNDS)]
    trips, rates = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    return statistics.median(trips) / 1e6, statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--xoscar", metavar="PY", help="interpreter of an environment with xoscar (and uvloop)")
    interpreter = parser.parse_args().xoscar
    with tempfile.TemporaryDirectory(prefix="kvb") as path:
        trips = {name: statistics.median(values) for name, values in uvloop.run(round_trips(Path(path))).items()}
    rates = {name: statistics.median(values) for name, values in throughputs().items()}
    blocking, ask = trips["blocking"], trips["ask"]
    drained_rate, tell, pickled_rate = rates["drained"], rates["tell"], rates["pickled"]
    print(f"Round trip over ipc, median of {NUM_SLICES} slices of {SLICE} in turn")
    print(f"  blocking pyzmq echo       {blocking * 1e6:8.0f} us")
    print(f"  ask and reply             {ask * 1e6:8.0f} us     {ask / blocking:.2f} of the echo (goal: at most 1.5)")
    print(f"Step frames of 32 requests, {NUM_FRAMES} a round, median of {ROUNDS} rounds in turn")
    print(f"  drained loop by hand      {drained_rate:8.0f} msg/s")
    print(f"  zmq.asyncio and pickle    {pickled_rate:8.0f} msg/s")
    print(
        f"  tell                      {tell:8.0f} msg/s  {tell / drained_rate:.2f} of the loop (goal: at least 0.7), "
        f"{tell / pickled_rate:.2f} of pickle (goal: at least 3)"
    )
    if interpreter is None:
        print("xoscar's actors: not measured, no --xoscar")
        return
    trip, rate = of_xoscar(interpreter)
    print(f"  xoscar's actors           {trip * 1e6:8.0f} us     {ask / trip:.2f} of it is an ask and reply here")
    print(f"                            {rate:8.0f} msg/s  {tell / rate:.1f} times as many are told here")


if __name__ == "__main__":
    main()
