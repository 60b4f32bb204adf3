"""Runs coroutines that may leave nothing behind, on meshes and beside a single system."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
import uvloop
import zmq

from mesh.simulation.virtual_time import VirtualTimeLoop


@pytest.fixture
def run():
    """Run a coroutine function on a fresh loop; tasks left over fail the test."""

    def runner(main, loop_factory=None):
        async def wrapped():
            await main()
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            assert not left, f"tasks left over: {left}"

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(wrapped())

    return runner


@pytest.fixture
def short_path():
    """A directory whose path leaves room for the name of a socket."""
    path = Path(tempfile.mkdtemp(prefix="kvt"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def once_per_process():
    """What uvloop and pyzmq open once and keep: signal pipe, collector of lent memory."""
    uvloop.new_event_loop().close()
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://warm-up")
        other.connect("inproc://warm-up")
        one.send(bytes(1 << 20), copy=False, track=True)
        other.recv()


LOOPS = {
    # Without sockets there is nothing to wait for but timers.
    "simulated": VirtualTimeLoop,
    "zeromq": uvloop.new_event_loop,
    "zeromq on asyncio": asyncio.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def on_mesh(request, run, short_path, once_per_process):
    """Run `async def test(mesh)` on a mesh; nothing may be left of it. `on_mesh.kind` says over what."""
    from mesh.testing.leaks import assert_no_leaks
    from tests.mesh.mesh_under_test import simulated_mesh, zeromq_mesh

    def runner(test):
        async def main():
            async with simulated_mesh() if request.param == "simulated" else zeromq_mesh(short_path) as mesh:
                await test(mesh)

        with assert_no_leaks(shm_prefix="none of this test", within_s=1.0):
            run(main, LOOPS[request.param])

    runner.kind = request.param
    return runner


@pytest.fixture
def mesh(on_mesh):
    """For tests that are coroutine functions."""
    return on_mesh


@pytest.fixture
def a(on_mesh):
    """For tests that are coroutine functions: the actors `a` and `b` that know each other, and their mesh."""

    def runner(test):
        async def main(mesh):
            await test(*await mesh.pair(), mesh)

        on_mesh(main)

    return runner


@pytest.fixture
def b():
    """What `a` opens besides."""


@pytest.fixture
def rig(run):
    """A started system with a wiretap for its transport; for tests that are coroutine functions."""
    return _rigged(run, is_met=False)


@pytest.fixture
def met(run):
    """As `rig`, after its peer's hello."""
    return _rigged(run, is_met=True)


def _rigged(run, *, is_met):
    from tests.mesh.rig import Rig

    def runner(test):
        async def main():
            rig = Rig()
            rig.actor.joins = False
            await rig.system.start()
            if is_met:
                rig.hello()
            await test(rig)
            await rig.system.stop()

        # Time passes only while everybody waits: what has to come before a pause is over cannot come too late.
        run(main, VirtualTimeLoop)

    return runner
