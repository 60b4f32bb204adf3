"""The detokenizer among others, in one process: fed by a scheduler, heard by a gateway."""

import asyncio
import contextlib

import pytest

from mesh.actor import Actor
from mesh.address import Address
from mesh.options import SystemOptions
from mesh.simulation.network import SimulatedNetwork
from mesh.testing.actors import Actors
from nodes.detokenizer.actor import DetokenizerActor
from nodes.detokenizer.config import DetokenizerConfig, DetokenizerLimits
from nodes.protocol import Resend, ResendFrom, StopAt, StreamFinish, StreamOpen, TextBatch, TokenBatch
from nodes.registry.actor import RegistryActor
from nodes.request import AttemptRef, StopRules
from nodes.roles import GATEWAY, NODE_CODEC, SCHEDULER
from tests.mesh.mesh_under_test import until

QUICK = SystemOptions(heartbeat_s=0.05, retry_min_s=0.01, retry_max_s=0.05)


class Peer(Actor):
    codec = NODE_CODEC

    def __init__(self, role):
        self.role = role
        self.told = []

    def on_tell(self, sender, message, buffers):
        self.told.append(message)

    @property
    def deltas(self):
        return [d for message in self.told if isinstance(message, TextBatch) for d in message.deltas]

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)


@contextlib.asynccontextmanager
async def mesh_with(**config):
    mesh = Actors(SimulatedNetwork(seed=0), QUICK)
    await mesh.start("registry", RegistryActor(lease_s=1.0))
    mesh.scheduler = (await mesh.start("s0", Peer(SCHEDULER))).actor
    mesh.gateway = (await mesh.start("gw", Peer(GATEWAY))).actor
    mesh.detokenizer = (await mesh.start("detok", DetokenizerActor(DetokenizerConfig(model="echo", **config)))).actor
    members = [mesh.scheduler.ctx.members, mesh.detokenizer.ctx.members]
    await until(lambda: all({"s0", "gw", "detok"} <= {m.actor_id for m in view.all()} for view in members))
    try:
        yield mesh
    finally:
        await mesh.stop()


@pytest.fixture
def mesh(settings):
    return mesh_with(**settings)


def step(text, position=0, opens=(), finish=None, stream=1, **columns):
    ids = list(text.encode())
    finishes = [StreamFinish(stream, position + len(ids), finish)] if finish else []
    columns = {"streams": [stream], "positions": [position], "counts": [len(ids)], "token_ids": ids} | columns
    return TokenBatch(**columns, opens=list(opens), finishes=finishes)


def opening(stream=1, **rules):
    return StreamOpen(stream, f"r{stream}", 0, "gw", StopRules(99, **rules), [], [])


def tell(mesh, message):
    assert mesh.scheduler.ctx.tell("detok", message)


async def test_tokens_in_text_out(mesh):
    tell(mesh, step("hel", opens=[opening()]))
    tell(mesh, step("lo", 3, finish="length"))
    await until(lambda: mesh.gateway.text == "hello")
    assert (mesh.gateway.deltas[-1].finish_reason, mesh.gateway.deltas[-1].scheduler) == ("length", "s0")
    assert mesh.detokenizer.stats() == {
        "mesh_detokenizer_streams": 1.0,
        "mesh_detokenizer_resends_total": 0.0,
        "mesh_detokenizer_dropped_streams_total": 0.0,
    }


@pytest.mark.settings(use_threads=False)
async def test_gaps_and_stops_go_to_the_scheduler(mesh):
    tell(mesh, step("b", 1, opens=[opening(stop=["ab"])]))
    tell(mesh, step("x", stream=2))
    tell(mesh, step("ab"))
    await until(lambda: len(mesh.scheduler.told) == 3)
    assert mesh.scheduler.told == [
        Resend(streams=[ResendFrom("r1", 0, 0)]),
        Resend(streams=[], streams_unknown=[2]),
        StopAt(attempts=[AttemptRef("r1", 0)]),
    ]


async def test_what_is_no_step_is_counted_and_nothing_else(mesh):
    tell(mesh, step("a", streams=[1, 2], opens=[opening()]))
    tell(mesh, StopAt(attempts=[]))
    tell(mesh, step("ok", opens=[opening()]))
    await until(lambda: mesh.gateway.text == "ok")


async def test_a_lost_scheduler_takes_its_streams_along(mesh):
    tell(mesh, step("a", opens=[opening()]))
    await until(lambda: mesh.detokenizer.stats()["mesh_detokenizer_streams"] == 1)
    await mesh.kill("s0")
    await until(lambda: mesh.detokenizer.stats()["mesh_detokenizer_streams"] == 0)


async def test_nothing_is_asked_of_another_incarnation(mesh):
    sent = []
    real = mesh.detokenizer.ctx.tell
    mesh.detokenizer.ctx.tell = lambda actor_id, message, **kw: sent.append(message) or real(actor_id, message, **kw)
    mesh.detokenizer.on_tell(Address("s0", 2), step("b", 1), ())
    mesh.detokenizer.on_tell(Address("gone", 1), step("b", 1), ())
    assert sent == [Resend(streams=[], streams_unknown=[1])]


@pytest.mark.settings(drain_quiet_s=0.1)
async def test_draining_ends_when_tokens_stop_coming(mesh):
    tell(mesh, step("a", opens=[opening()]))
    await until(lambda: mesh.gateway.text == "a")
    loop = asyncio.get_running_loop()
    started, draining = loop.time(), asyncio.ensure_future(mesh.detokenizer.drain())
    for position in range(1, 6):
        await asyncio.sleep(0.05)
        assert not draining.done()
        tell(mesh, step("b", position))
    await draining
    assert loop.time() - started >= 0.3
    tell(mesh, step("c", 6))
    await until(lambda: mesh.gateway.text == "abbbbbc")


@pytest.mark.settings(drain_quiet_s=60.0)
async def test_draining_waits_for_nobody_where_nothing_is_written(mesh):
    await asyncio.wait_for(mesh.detokenizer.drain(), 1.0)


async def test_nothing_is_known_before_the_start():
    actor = DetokenizerActor(DetokenizerConfig(model="echo"))
    assert actor.stats() == {}
    actor.on_peer_lost(Address("s0", 1), "never met")


@pytest.mark.settings(limits=DetokenizerLimits(lease_s=0.2))
async def test_idle_streams_are_looked_at_only_while_there_are_some(mesh):
    tell(mesh, step("a", opens=[opening()]))
    await until(lambda: mesh.detokenizer.stats()["mesh_detokenizer_streams"] == 1)
    await until(lambda: mesh.detokenizer.stats()["mesh_detokenizer_streams"] == 0)
    assert not mesh.detokenizer._is_ticking
