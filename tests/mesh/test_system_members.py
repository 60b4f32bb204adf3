"""Membership, topics, heartbeats and drain between whole systems."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from mesh.address import Address, Endpoint
from mesh.errors import CallError, DrainFailed, PeerLost, RemoteError
from mesh.membership.view import SUPERVISOR, Member
from mesh.pubsub.publishing import MAX_TOPICS
from mesh.transport.base import Channel
from mesh.wire.frames import Join, Leave, ListMembers, MembersChanged, PeerDown, StatsRequest
from mesh.wire.header import Verb
from tests.mesh.mesh_under_test import QUICK, Number, Recorder, Say, until

HI = Say(text="hi")


def states(system):
    return {str(m.address): m.state for m in system.registration.view.all()}


async def test_members_see_each_other_come_change_and_leave(a, b):
    await until(lambda: states(a) == states(b) == {"a#1": "ready", "b#1": "ready", "registry#1": "ready"})
    assert [m.actor_id for m in a.actor.ctx.members.by_role("recorder")] == ["a", "b"]
    b.actor.ctx.announce(group="g1")
    await until(lambda: a.registration.view.get("b").attributes == {"group": "g1"})
    b.actor.ctx.announce("starting", phase="decode")
    await until(lambda: a.registration.view.get("b").state == "starting")
    assert a.registration.view.get("b").attributes == {"group": "g1", "phase": "decode"}
    assert a.actor.members[-1][2][0].actor_id == "b"
    await b.stop()
    await until(lambda: "b#1" not in states(a))
    assert a.actor.members[-1][1] == ["b#1"]


class ReadyLater(Recorder):
    ready_after_start = False


async def test_an_actor_says_itself_when_it_is_ready(mesh):
    await mesh.start_registry()
    a = await mesh.start("a", actor=ReadyLater())
    assert states(a)["a#1"] == "starting"
    a.actor.ctx.announce("ready")
    await until(lambda: states(a)["a#1"] == "ready")


async def test_a_new_epoch_ends_the_old_one_at_once(a, b, mesh):
    ask = asyncio.create_task(a.actor.ctx.ask("b", Say(text="silence"), timeout_s=60))
    await until(lambda: b.actor.calls)
    await mesh.start("b", epoch=2)
    with pytest.raises(PeerLost):
        await ask
    await until(lambda: states(a).get("b#2") == "ready")
    assert "b#1" not in states(a)
    answer = await a.actor.ctx.ask("b", HI, timeout_s=5)
    assert answer.sender == Address("b", 2)
    # The old one is refused from now on.
    assert not await answered(b, "a")
    await mesh.kill(b)


async def answered(system, actor_id):
    try:
        await system.actor.ctx.ask(actor_id, HI, timeout_s=0.3)
    except CallError:
        return False
    return True


async def test_a_lease_ends_without_renewal(a, b, mesh):
    await mesh.kill(b)
    await until(lambda: "b#1" not in states(a), 10)
    assert mesh.registry.actor.stats() == {
        'mesh_registry_members{member_role="recorder"}': 1.0,
        'mesh_registry_members{member_role="registry"}': 1.0,
    }


async def test_the_supervisors_word_ends_a_member_at_once(a, b, mesh):
    await mesh.kill(b)
    ask = a.actor.ctx.ask
    await ask("registry", Leave(actor_id="b", epoch=1, reason="reaped"), timeout_s=5)
    await until(lambda: "b#1" not in states(a))
    listed = (await ask("registry", ListMembers(), timeout_s=5)).message
    assert [m.actor_id for m in listed.members] == ["a", "registry"]


async def test_only_registry_and_supervisor_are_believed(a, b, mesh):
    b.actor.ctx.tell("a", PeerDown(actor_id="registry", epoch=1))
    b.actor.ctx.tell("a", MembersChanged(registry_epoch=1, version=99))
    await until(lambda: a.metrics.value("mesh_frames_refused_total", code="unexpected") == 2)
    assert "registry#1" in states(a)
    mesh.registry.actor.ctx.tell("a", PeerDown(actor_id="b", epoch=1, reason="reaped"))
    await until(lambda: "b#1" not in states(a))
    assert (Address("b", 1), "reaped") in a.actor.lost


async def test_a_replaced_incarnation_that_comes_back_is_told_so_and_ends(mesh):
    await mesh.start_registry()
    old = await mesh.start("a")
    await mesh.start("a", epoch=2)
    # Nobody answers its heartbeats any more; it dials the registry anew.
    assert await asyncio.wait_for(old.shutdown_asked(), 10) == "superseded"
    await old.stop()
    assert [m.epoch for m in mesh.registry.actor.core.members() if m.actor_id == "a"] == [2]


async def test_who_shares_the_host_is_dialed_there(rig):
    here = rig.system.describe().host
    both = Endpoint("tcp://c", "tcp://d", "ipc://c", "ipc://d")
    members = [Member(name, "r", 1, both, host=host) for name, host in (("near", here), ("far", here + "x"))]
    rig.system.registration.view.reset(1, 1, members)
    assert rig.system.incarnation.locate("near") == (Address("near", 1), Endpoint("ipc://c", "ipc://d"))
    assert rig.system.incarnation.locate("far") == (Address("far", 1), both)


class AnySupervisor(Recorder):
    role = SUPERVISOR


async def test_who_has_no_supervisor_believes_those_of_the_mesh(a, b, mesh):
    supervisor = await mesh.start("of-a-host", actor=AnySupervisor())
    await until(lambda: "of-a-host#1" in states(a) and "a#1" in states(supervisor))
    assert supervisor.actor.ctx.tell("a", PeerDown(actor_id="b", epoch=1, reason="reaped"))
    # It lives, so the registry's next snapshot has it again.
    await until(lambda: any("b#1" in left for _, left, _ in a.actor.members))
    assert a.metrics.value("mesh_frames_refused_total", code="unexpected") == 0


async def test_a_supervisors_last_words_are_believed_after_the_registrys_notice_that_it_left(a, b, mesh):
    supervisor = await mesh.start("of-a-host", actor=AnySupervisor())
    await until(lambda: "of-a-host#1" in states(a) and "a#1" in states(supervisor))
    # A hello of its own: the notice below must not be what ends the link.
    await supervisor.actor.ctx.ask("a", HI, timeout_s=5)
    await supervisor.registration.leave(5.0)
    await until(lambda: "of-a-host#1" not in states(a))
    assert supervisor.actor.ctx.tell("a", PeerDown(actor_id="b", epoch=1, reason="reaped"))
    await until(lambda: any("b#1" in left for _, left, _ in a.actor.members))
    assert a.metrics.value("mesh_frames_refused_total", code="unexpected") == 0


async def test_a_supervisor_is_not_believed_of_other_hosts(a, b, mesh):
    supervisor = await mesh.start("supervisor.x", actor=AnySupervisor())
    await until(lambda: "supervisor.x#1" in states(a) and "a#1" in states(supervisor))
    assert supervisor.actor.ctx.tell("a", PeerDown(actor_id="b", epoch=1, reason="a lie"))
    await until(lambda: a.metrics.value("mesh_frames_refused_total", code="unexpected") == 1)
    with pytest.raises(RemoteError, match="may not report that b#1 leaves"):
        await supervisor.actor.ctx.ask("registry", Leave(actor_id="b", epoch=1, reason="a lie"), timeout_s=5)
    assert not a.actor.lost
    assert "b#1" in states(a)


async def test_serving_goes_on_without_a_registry_and_it_returns_with_nothing_lost(a, b, mesh):
    await mesh.kill(mesh.registry)
    await until(lambda: a.registration.registry is None and b.registration.registry is None)
    assert states(a) == {"a#1": "ready", "b#1": "ready", "registry#1": "ready"}
    assert (await a.actor.ctx.ask("b", HI, timeout_s=5)).message == HI
    a.actor.ctx.announce(late="news")
    a.actor.members.clear()
    registry = await mesh.start_registry(epoch=2)
    await until(lambda: "registry#2" in states(a) and "registry#2" in states(b), 10)
    await until(lambda: b.registration.view.get("a").attributes == {"late": "news"}, 10)
    assert [m.actor_id for m in registry.actor.core.members()] == ["a", "b", "registry"]
    left = [gone for _, lefts, _ in a.actor.members for gone in lefts]
    assert left == ["registry#1"]
    c = await mesh.start("c")
    await until(lambda: "c#1" in states(a))
    assert states(c) == states(a)


async def test_a_member_that_misses_a_change_gets_a_snapshot(a):
    a.registration.view.version -= 1
    assert a.registration.view.forget(Address("b", 1))
    await until(lambda: "b#1" in states(a))


async def test_a_member_that_the_registry_lost_joins_again(a, b, mesh):
    # Its next heartbeat, which brings it back, may come before the others are told that it has left.
    take = mesh.registry.links.handlers[Verb.HEARTBEAT]
    mesh.registry.links.handlers[Verb.HEARTBEAT] = lambda *_: None
    await a.actor.ctx.ask("registry", Leave(actor_id="b", epoch=1, reason="a mistake"), timeout_s=5)
    await until(lambda: "b#1" not in states(a))
    mesh.registry.links.handlers[Verb.HEARTBEAT] = take
    await until(lambda: "b#1" in states(a))
    assert (await a.actor.ctx.ask("b", HI, timeout_s=5)).message == HI


async def test_nobody_joins_for_others_or_with_an_old_epoch(a):
    forged = Member(actor_id="x", role="r", epoch=1, endpoint=Endpoint("", ""))
    with pytest.raises(RemoteError) as caught:
        await a.actor.ctx.ask("registry", Join(member=forged), timeout_s=5)
    assert (caught.value.code, caught.value.param) == ("bad_request", "member")


async def test_a_hanging_hub_is_suspected_and_found_again(a, b, mesh):
    silent = mesh.registry.links.handlers[Verb.HEARTBEAT]
    mesh.registry.links.handlers[Verb.HEARTBEAT] = lambda *_: None
    await until(lambda: any("heartbeats" in reason for _, reason in a.actor.lost), 10)
    assert a.metrics.value("mesh_heartbeats_lost_total") >= 1
    mesh.registry.links.handlers[Verb.HEARTBEAT] = silent
    await until(lambda: a.registration.registry is not None)


async def test_draining_is_known_to_peers_at_once(a, b):
    await a.actor.ctx.ask("b", HI, timeout_s=5)
    await b.drain()
    await until(lambda: states(a)["b#1"] == "draining")
    assert a.actor.ctx.members.by_role("recorder")[0].actor_id == "a"
    assert len(a.actor.ctx.members.by_role("recorder")) == 1
    b.actor.ctx.announce("ready")
    assert b.describe().state == "draining"
    assert (await a.actor.ctx.ask("b", HI, timeout_s=5)).message == HI


class FailsToDrain(Recorder):
    async def drain(self):
        raise ZeroDivisionError("a bug")


async def test_a_drain_that_raises_is_a_typed_error_and_leaves_nobody_waiting(mesh):
    await mesh.start_registry()
    a, b = await mesh.start("a"), await mesh.start("b", actor=FailsToDrain())
    await until(lambda: a.registration.view.get("b"))
    ask = asyncio.create_task(a.actor.ctx.ask("b", Say(text="silence"), timeout_s=60))
    await until(lambda: b.actor.calls)
    with pytest.raises(DrainFailed, match=r"the drain of b#1 failed \(ZeroDivisionError\)"):
        await b.drain()
    async with asyncio.timeout(5):
        with pytest.raises(RemoteError) as caught:
            await ask
    assert (caught.value.code, caught.value.retryable) == ("stopping", True)
    assert b.metrics.value("mesh_handler_errors_total", handler="drain") == 1


class Hub(Recorder):
    role = "supervisor"
    joins = False

    def __init__(self):
        super().__init__()
        self.beats = []

    def on_heartbeat(self, peer, state, progress):
        self.beats.append((peer, state))
        self.heard = progress


async def test_supervisors_hear_heartbeats_and_their_end(mesh):
    await mesh.start_registry()
    supervisor = await mesh.start("supervisor", actor=Hub())
    where = (supervisor.address, supervisor.describe().endpoint)
    a = await mesh.start("a", options=replace(QUICK, supervisor=where), actor=ReadyLater())
    await until(lambda: (Address("a", 1), "starting") in supervisor.actor.beats)
    a.actor.progress = lambda: "half of it"
    await until(lambda: supervisor.actor.heard == "half of it")
    a.actor.progress = lambda: 1 / 0
    await until(lambda: supervisor.actor.heard == "")
    a.actor.ctx.announce("ready")
    await until(lambda: (Address("a", 1), "ready") in supervisor.actor.beats)
    stats = await supervisor.actor.ctx.ask("a", StatsRequest(), timeout_s=5)
    assert "mesh_uptime_seconds" in stats.message.gauges
    assert (await a.actor.ctx.ask("supervisor", HI, timeout_s=5)).message == HI
    a.heartbeats.close()
    await until(lambda: supervisor.actor.lost, 10)
    assert supervisor.actor.lost[0] == (Address("a", 1), "its heartbeats stopped")


# Topics


async def test_subscribers_get_everything_from_the_start_and_in_order(a, b):
    for value in range(3):
        assert b.actor.ctx.publish("t", Number(value=value)) == value + 1
    a.actor.ctx.subscribe("b", "t")
    a.actor.ctx.subscribe("b", "t")
    await until(lambda: len(a.actor.publications) == 3)
    for value in range(3, 300):
        b.actor.ctx.publish("t", Number(value=value))
    await until(lambda: len(a.actor.publications) == 300)
    assert [m.value for _, _, _, m in a.actor.publications] == list(range(300))
    assert [s for _, _, s, _ in a.actor.publications] == list(range(1, 301))
    assert a.actor.resets == [(Address("b", 1), "t")]
    a.actor.ctx.unsubscribe("b", "t")
    a.actor.ctx.unsubscribe("b", "t")
    await a.actor.ctx.ask("b", HI, timeout_s=5, channel=Channel.DATA)
    b.actor.ctx.publish("t", HI)
    await asyncio.sleep(0.02)
    assert len(a.actor.publications) == 300


def lose(system, *numbers):
    """Of the publications that come to it from now on, those of these numbers."""
    take, came = system.links.handlers[Verb.PUBLISH], itertools.count(1)
    system.links.handlers[Verb.PUBLISH] = lambda *frame: None if next(came) in numbers else take(*frame)


async def test_a_gap_is_filled_by_replay(a, b):
    a.actor.ctx.subscribe("b", "t")
    await until(lambda: a.actor.resets)
    lose(a, 5, 6, 10)
    for value in range(10):
        b.actor.ctx.publish("t", Number(value=value))
    # 4 and 5 are missed and seen by 6; 9 is the last, and found out by asking after some quiet.
    await until(lambda: len(a.actor.publications) == 10)
    assert [m.value for _, _, _, m in a.actor.publications] == list(range(10))
    assert len(a.actor.resets) == 1
    assert a.metrics.value("mesh_publication_gaps_total") == 1


async def test_what_the_ring_no_longer_holds_is_a_reset(mesh):
    await mesh.start_registry()
    a, b = await mesh.start("a"), await mesh.start("b", options=replace(QUICK, replay_capacity=4))
    await until(lambda: a.registration.view.get("b"))
    for value in range(10):
        b.actor.ctx.publish("t", Number(value=value))
    a.actor.ctx.subscribe("b", "t")
    await until(lambda: a.actor.resets)
    b.actor.ctx.publish("t", Number(value=10))
    await until(lambda: a.actor.publications)
    assert [s for _, _, s, _ in a.actor.publications] == [11]
    lose(a, *range(1, 10))
    for value in range(11, 20):
        b.actor.ctx.publish("t", Number(value=value))
    await until(lambda: len(a.actor.resets) == 2)
    assert b.actor.follower_resets == [(Address("a", 1), "t")] * 2, "who alone can say it all again is told"
    assert b.metrics.value("mesh_subscriber_resets_total") == 2
    b.actor.ctx.publish("t", Number(value=20))
    await until(lambda: a.actor.publications[-1][2] == 21)


async def test_subscriptions_survive_restarts_of_the_publisher(a, b, mesh):
    a.actor.ctx.subscribe("b", "t")
    a.actor.ctx.subscribe("later", "t")
    b.actor.ctx.publish("t", Number(value=1))
    await until(lambda: a.actor.publications)
    await mesh.kill(b)
    again = await mesh.start("b", epoch=2)
    again.actor.ctx.publish("t", Number(value=2))
    await until(lambda: len(a.actor.publications) == 2, 10)
    assert a.actor.publications[-1] == (Address("b", 2), "t", 1, Number(value=2))
    assert a.actor.resets[-1] == (Address("b", 2), "t")
    late = await mesh.start("later")
    late.actor.ctx.publish("t", Number(value=3))
    await until(lambda: len(a.actor.publications) == 3)


async def test_the_number_of_topics_is_bounded(a, b):
    for number in range(MAX_TOPICS):
        b.actor.ctx.publish(f"t{number}", HI)
    with pytest.raises(ValueError, match="256 topics"):
        b.actor.ctx.publish("one more", HI)
    for number in range(MAX_TOPICS + 1):
        a.actor.ctx.subscribe("b", f"another-{number}")
    await until(lambda: b.metrics.value("mesh_frames_refused_total", code="too_many_topics"))
    assert a.actor.ctx.tell("b", HI, channel=Channel.CONTROL)
