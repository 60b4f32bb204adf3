"""Strangers of the same user beside a mesh that is up: refused, and nobody is the worse for them."""

import asyncio
import json
import re
import signal
import subprocess

import pytest

from mesh.actor import Actor
from mesh.address import Address
from mesh.errors import CallError
from mesh.membership.view import StaticBootstrap
from mesh.runtime.run_directory import RunDirectory
from mesh.system import ActorSystem
from mesh.transport.base import Channel
from mesh.transport.zeromq import ZeroMQOptions, ZeroMQTransport
from mesh.wire.frames import Join, Leave, ListMembers, PeerDown
from nodes.roles import NODE_CODEC

pytestmark = pytest.mark.process


class Stranger(Actor):
    role = "scheduler"
    codec = NODE_CODEC
    joins = False


class Custom(Stranger):
    role = "custom"


async def attacks(directory, actor_id, actor, everybody):
    """Tell everybody that the registry lists, all of `everybody`, who has died; what it said to each message."""
    found = directory.bootstrap().lookup()
    transport = ZeroMQTransport(ZeroMQOptions(run_directory=directory))
    system = ActorSystem(actor, Address(actor_id, 1 << 42), transport, StaticBootstrap(*found))
    await system.start()
    said = []

    async def ask(target, message):
        try:
            answer = (await actor.ctx.ask(target, message, timeout_s=2)).message
        except CallError as error:
            answer = str(error)
        said.append((target, type(message).__name__, answer))
        return answer

    try:
        listed = await ask("registry", ListMembers())
        if not isinstance(listed, str):
            # A mesh serves as soon as a request finds its way; the supervisor itself, for one, may join after that.
            async with asyncio.timeout(10):
                while not everybody <= {member.actor_id for member in listed.members}:
                    listed = (await actor.ctx.ask("registry", ListMembers(), timeout_s=2)).message
            system.registration.view.reset(1, 1, listed.members)
            assert not any(member.proof for member in listed.members)
        await ask("registry", Join(member=system.describe()))
        for member in system.registration.view.all():
            actor.ctx.tell(member.actor_id, PeerDown(actor_id="gateway-0", epoch=1 << 42), channel=Channel.CONTROL)
            await ask("registry", Leave(actor_id=member.actor_id, epoch=member.epoch))
    finally:
        await system.stop()
    return said


def test_who_is_not_the_supervisors_ends_nobody_and_gets_no_work(host):
    host.up("--model", "echo")
    before = host.pids()
    directory = RunDirectory(host.run_directory)

    for actor_id in ("scheduler-decode-0", "scheduler-decode-9", "gateway-0"):
        said = asyncio.run(attacks(directory, actor_id, Stranger(), set(before)))
        # Within the pause after the first refusal the second ask is not sent; on a busy machine it may be over.
        assert {"no_proof" in answer for _, _, answer in said if "next attempt" not in answer} == {True}
    said = asyncio.run(attacks(directory, "words-0", Custom(), set(before)))
    told = [answer for _, kind, answer in said if kind == "Leave"]
    assert len(told) == len(before)
    assert all("no_proof" in str(answer) for answer in told)
    assert host.say("still here") == "still here"
    after = host.ps()
    assert {actor_id: after[actor_id]["pid"] for actor_id in before} == before
    counted = re.findall(r'mesh_frames_refused_total\{.*code="no_proof".*\} (\S+)', host.metrics())
    assert sum(map(float, counted)) >= 3

    refused = host.meshctl("run", "registry")
    assert refused.returncode != 0
    assert "only the supervisor" in refused.stderr
    by_hand = subprocess.Popen(
        host.command("run", "detokenizer", "--actor-id", "detokenizer-7", "--config", json.dumps({"model": "echo"})),
        env=host.environment,
        stderr=subprocess.DEVNULL,
    )
    host.started.append(by_hand)
    host.wait_until(lambda: host.ps().get("detokenizer-7", {}).get("state") == "ready", "it is proved, and joins")
    by_hand.send_signal(signal.SIGTERM)
    assert by_hand.wait(20) == 0
    assert host.meshctl("down").returncode == 0
    host.assert_nothing_left()
