"""A stranger among the actors of a supervisor: whatever it says it is, nobody else is the worse for it."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from cli.plan.settings import Settings
from cli.supervisor.mesh_process import draw_secret
from mesh.address import Address
from mesh.errors import CallError, Unreachable
from mesh.membership.proof import HostSecret
from mesh.wire.frames import Join, Leave, ListMembers, PeerDown
from nodes.registry.actor import RegistryActor
from tests.mesh.mesh_under_test import QUICK, Recorder, until
from tests.mesh.test_system_members import HI, AnySupervisor, states

SECRET = HostSecret.draw("m", "", ["a", "b", "registry", "supervisor"], ["scheduler"])


class Stranger(Recorder):
    """Says hello, and what the test has it say."""

    joins = False


class StrangeScheduler(Stranger):
    role = "scheduler"


class StrangeSupervisor(Stranger):
    role = "supervisor"


async def supervised(mesh, secret=SECRET):
    mesh.options = replace(QUICK, secret=secret)
    registry = await mesh.start_registry()
    a, b = await mesh.start("a"), await mesh.start("b")
    await until(lambda: a.registration.view.get("b") and b.registration.view.get("a"))
    assert (await a.actor.ctx.ask("b", HI, timeout_s=5)).message == HI
    return registry, a, b


async def stranger(mesh, actor_id="words-0", epoch=1, actor=None, **options):
    """One that knows where everybody is, and shows everybody the proof that it has."""
    named = mesh.systems.get(actor_id)
    system = mesh.systems[f"stranger {epoch}"] = await mesh.start(
        actor_id, epoch, actor or Stranger(), replace(QUICK, **options)
    )
    del mesh.systems[actor_id]
    mesh.systems |= {actor_id: named} if named is not None else {}
    listed = [mesh.systems[name].describe() for name in ("a", "b")]
    system.registration.view.reset(1, 1, [msgspec.structs.replace(one, proof=b"seen") for one in listed])
    return system


async def refused(system, actor_id, message, code="no_proof"):
    async with asyncio.timeout(5):
        while True:
            with pytest.raises(CallError) as caught:
                await system.actor.ctx.ask(actor_id, message, timeout_s=5)
            if not isinstance(caught.value, Unreachable):
                break
            # Who was refused a link pauses before it dials again.
            await asyncio.sleep(0.02)
    assert code in str(caught.value)


async def nothing_happened(a, b):
    assert a.actor.lost == b.actor.lost == []
    assert states(a) == {"a#1": "ready", "b#1": "ready", "registry#1": "ready"}
    assert (await a.actor.ctx.ask("b", HI, timeout_s=5)).sender == Address("b", 1)
    assert a.over is b.over is None


@pytest.mark.parametrize(
    ("actor_id", "actor"),
    [("b", Stranger), ("scheduler-decode-9", StrangeScheduler), ("of-a-host", StrangeSupervisor)],
)
async def test_who_takes_a_name_or_a_role_is_refused_everywhere(mesh, actor_id, actor):
    """With a greater epoch, which drops a peer that is known: at its hello, before anybody is lost for it."""
    registry, a, b = await supervised(mesh)
    with capture_logs() as log:
        forger = await stranger(mesh, actor_id, 1 << 40, actor())
        for target in ("registry", "registry", "a"):
            await refused(forger, target, Join(member=forger.describe()))
    assert registry.metrics.value("mesh_frames_refused_total", code="no_proof") >= 2
    logged = [line["actor"] for line in log if line.get("code") == "no_proof"]
    assert sorted(logged) == sorted(["registry", "a", actor_id, actor_id]), "once at each, and what to do at the forger"
    await nothing_happened(a, b)


async def test_where_external_is_said_roles_are_for_everybody_and_names_are_not(mesh):
    secret = draw_secret(Settings(name="m", external=True), ["a", "b", "registry", "supervisor"])
    registry, a, b = await supervised(mesh, secret)
    one = await stranger(mesh, "scheduler-decode-9", actor=StrangeScheduler())
    joined = await one.actor.ctx.ask("registry", Join(member=one.describe()), timeout_s=5)
    assert "scheduler-decode-9" in [member.actor_id for member in joined.message.members]
    assert not any(member.proof for member in joined.message.members)
    await until(lambda: "scheduler-decode-9#1" in states(a))
    assert (await a.actor.ctx.ask("scheduler-decode-9", HI, timeout_s=5)).message == HI
    for name, epoch, actor in (("b", 1 << 40, Stranger()), ("of-a-host", 3, StrangeSupervisor())):
        forger = await stranger(mesh, name, epoch, actor)
        await refused(forger, "registry", Join(member=forger.describe()))
    assert states(b)["b#1"] == "ready"
    assert registry.metrics.value("mesh_frames_refused_total", code="no_proof") >= 2


async def test_a_wrong_proof_and_one_of_an_older_epoch_are_refused(mesh):
    _, a, b = await supervised(mesh)
    replayed = SECRET.prove("b", 1, "recorder")
    wrong = await stranger(mesh, "b", 7, proof=replayed)
    for target in ("registry", "a"):
        await refused(wrong, target, HI, "bad_proof")
    await b.stop()
    await until(lambda: "b#1" not in states(a))
    await mesh.start("b", 3)
    await until(lambda: "b#3" in states(a))
    older = await stranger(mesh, "b", 2, proof=SECRET.prove("b", 2, "recorder"))
    a.actor.lost.clear()
    for target in ("registry", "a"):
        await refused(older, target, HI, "superseded")
    assert not a.actor.lost
    await older.stop()


async def test_nobody_is_ended_by_a_strangers_word(mesh):
    registry, a, b = await supervised(mesh)
    one = await stranger(mesh)
    await refused(one, "registry", Leave(actor_id="b", epoch=1, reason="a lie"))
    one.actor.ctx.tell("a", PeerDown(actor_id="b", epoch=1))
    await until(lambda: a.metrics.value("mesh_frames_refused_total", code="unexpected") == 1)
    await nothing_happened(a, b)
    assert registry.metrics.value("mesh_members_refused_total", code="no_proof") == 1


async def test_a_registry_is_told_of_a_later_one_by_who_is_proved_alone(mesh):
    registry, a, b = await supervised(mesh)

    async def dials_later_one(system):
        assert system.incarnation.bootstrap.learn(Address("registry", 9))
        system.links.lose(registry.address, "a later one is known")
        await refused(system, "registry", HI, "listens at its address")

    await dials_later_one(await stranger(mesh))
    await nothing_happened(a, b)
    assert registry.over is None
    await dials_later_one(b)
    assert (await asyncio.wait_for(registry.shutdown_asked(), 5), registry.over.known_epoch) == ("superseded", 9)


async def test_a_supervisor_that_is_proved_is_believed(mesh):
    _, a, _ = await supervised(mesh)
    supervisor = await mesh.start("supervisor", actor=AnySupervisor())
    await until(lambda: "supervisor#1" in states(a) and "a#1" in states(supervisor))
    supervisor.actor.ctx.tell("a", PeerDown(actor_id="b", epoch=1, reason="reaped"))
    await until(lambda: (Address("b", 1), "reaped") in a.actor.lost)
    await supervisor.actor.ctx.ask("registry", Leave(actor_id="b", epoch=1, reason="reaped"), timeout_s=5)


async def test_hearsay_is_believed_of_who_is_proved_alone(mesh):
    registry, _, b = await supervised(mesh)
    await mesh.kill(registry)
    await mesh.kill(b)
    registry = await mesh.start("registry", 2, RegistryActor(lease_s=5.0))
    mesh.registry = registry
    forged = msgspec.structs.replace(b.describe(), epoch=1 << 40, proof=b"")
    copied = msgspec.structs.replace(b.describe(), epoch=1 << 40)
    words = msgspec.structs.replace(b.describe(), actor_id="words-1", proof=b"")
    one = await stranger(mesh)
    await one.actor.ctx.ask("registry", Join(member=one.describe(), known_members=[forged, copied, words]), timeout_s=5)
    known = {str(member.address) for member in registry.actor.core.members()}
    assert known & {"words-0#1", "words-1#1", f"b#{1 << 40}"} == {"words-0#1", "words-1#1"}
    assert registry.metrics.value("mesh_members_refused_total", code="bad_proof") == 1
    # What a member of the host remembers has the proofs in it.
    await until(lambda: "b#1" in {str(member.address) for member in registry.actor.core.members()}, 10)


async def test_a_stranger_that_is_nobody_special_is_a_member_and_sees_no_proof(mesh):
    _, a, b = await supervised(mesh)
    words = await mesh.start("words-0", options=QUICK)
    await until(lambda: "words-0#1" in states(a) and "b#1" in states(words))
    assert (await words.actor.ctx.ask("b", HI, timeout_s=5)).message == HI
    assert (await a.actor.ctx.ask("words-0", HI, timeout_s=5)).message == HI
    b.actor.ctx.announce(group="g")
    await until(lambda: words.registration.view.get("b").attributes)
    listed = (await words.actor.ctx.ask("registry", ListMembers(), timeout_s=5)).message.members
    seen = [*listed, *words.registration.view.all(), *(peer.member for peer in words.links.peers())]
    assert len(seen) >= 10
    assert not any(member.proof for member in seen)
    assert all(a.registration.view.get(name).proof for name in ("a", "b"))
    assert [a.links.get(name).is_proved for name in ("b", "words-0")] == [True, False]


async def test_who_is_started_by_hand_with_a_proof_is_one_of_them(mesh):
    _, a, _ = await supervised(mesh)
    proof = SECRET.prove("scheduler-9", 4, "scheduler")

    class Scheduler(Recorder):
        role = "scheduler"

    extra = await mesh.start("scheduler-9", 4, Scheduler(), replace(QUICK, proof=proof))
    await until(lambda: "scheduler-9#4" in states(a) and "b#1" in states(extra))
    assert extra.registration.view.get("a").proof == a.describe().proof
    assert a.actor.ctx.members.by_role("scheduler")[0].actor_id == "scheduler-9"
