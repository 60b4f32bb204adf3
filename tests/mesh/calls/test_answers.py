"""Answers that do not fit: each call still ends once, and whoever sent them loses nothing else by it."""

import asyncio

import pytest

from mesh.address import Address
from mesh.errors import Cancelled, PeerLost, RemoteError, Unreachable
from mesh.transport.base import Channel, Link
from mesh.wire.frames import Cancel, ErrorBody
from mesh.wire.header import Verb
from tests.mesh.mesh_under_test import Say
from tests.mesh.rig import FROM_PEER, PEER, TO_PEER

HI = Say(text="hi")


async def asked(met, coroutine):
    """Start a call to the peer; its task and its message id."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task, met.wire.sent[-1][2].message_id


async def test_only_the_asked_peer_answers_and_only_once(met):
    other = Link(Address("other", 1), dialed=False)
    met.hello(other)
    task, number = await asked(met, met.actor.ctx.ask("peer", HI, timeout_s=5))
    met.say(Verb.REPLY, HI, link=other, correlation_id=number)
    met.say(Verb.ERROR, ErrorBody(code="x", message=""), link=other, correlation_id=number)
    assert not task.done()
    met.say(Verb.REPLY, Say(text="first"), correlation_id=number)
    met.say(Verb.REPLY, Say(text="second"), correlation_id=number)
    assert (await task).message == Say(text="first")
    assert met.system.metrics.value("mesh_late_answers_total") == 2
    assert met.system.metrics.value("mesh_errors_told_total") == 1


async def test_an_answer_that_cannot_be_read_is_an_error(met):
    task, number = await asked(met, met.actor.ctx.ask("peer", HI, timeout_s=5))
    met.say(Verb.REPLY, b"\xff", correlation_id=number)
    with pytest.raises(RemoteError, match="bad_answer: "):
        await task
    assert met.refused("bad_body") == 1


async def test_answers_that_come_with_the_cancel_are_dropped(met):
    for verb, body in ((Verb.REPLY, HI), (Verb.ERROR, ErrorBody(code="x", message=""))):
        task, number = await asked(met, met.actor.ctx.ask("peer", HI, timeout_s=5))
        task.cancel()
        met.say(verb, body, correlation_id=number)
        await asyncio.wait([task])
        assert task.cancelled()
    assert len(met.system.asking) == 0


async def test_a_full_way_is_unreachable(met):
    met.wire.full = True
    with pytest.raises(Unreachable, match="full"):
        await met.actor.ctx.ask("peer", HI, timeout_s=5)
    assert len(met.system.asking) == 0


async def test_calls_are_answered_as_they_were_asked(met):
    calls = []
    met.actor.on_ask = calls.append
    met.say(Verb.ASK, HI, channel=Channel.DATA, message_id=11, timeout_us=0)
    met.say(Verb.ASK, HI, message_id=12, timeout_us=5_000_000)
    met.say(Verb.ASK, HI, message_id=12, timeout_us=5_000_000)
    unlimited, limited = calls
    assert unlimited.remaining_s() > 500
    assert 4 < limited.remaining_s() <= 5
    met.wire.sent.clear()
    unlimited.reply(HI)
    limited.reply(HI)
    limited.reply(HI)
    answers = [(channel, header.correlation_id, header.verb) for _, channel, header, _ in met.wire.sent]
    assert answers == [(Channel.DATA, 11, Verb.REPLY), (Channel.CONTROL, 12, Verb.REPLY)]
    assert met.system.metrics.value("mesh_answers_ignored_total") == 1


async def test_a_cancel_overtakes_a_call(met):
    met.say(Verb.CANCEL, Cancel(), correlation_id=31)
    met.say(Verb.ASK, HI, channel=Channel.DATA, message_id=31)
    assert met.actor.calls == []


async def test_calls_of_a_lost_asker_are_dropped(met):
    calls, seen = [], []
    met.actor.on_ask = calls.append

    def broken():
        seen.append("broken")
        raise ValueError("in a callback")

    met.say(Verb.ASK, HI, message_id=41)
    calls[0].on_cancel(broken)
    calls[0].on_cancel(lambda: seen.append("called"))
    met.wire.listener.on_link_down(FROM_PEER, "gone")
    assert seen == ["broken", "called"]
    assert met.system.metrics.value("mesh_handler_errors_total", handler="on_cancel") == 1
    met.wire.listener.on_link_down(FROM_PEER, "again")
    met.wire.listener.on_link_down(TO_PEER, "never was")
    assert len(met.actor.lost) == 1
    assert met.actor.lost[0][0] == PEER


async def test_an_asker_that_is_gone_is_told_nothing(met):
    calls = []
    met.actor.on_ask = calls.append
    met.say(Verb.ASK, HI, message_id=51)
    peer = met.system.links.get("peer")
    met.wire.listener.on_link_down(FROM_PEER, "gone")
    assert not met.system.links.send(peer, Channel.DATA, Verb.TELL, b"")
    met.wire.sent.clear()
    calls[0].reply(HI)
    assert met.wire.sent == []


async def test_an_outcome_comes_back_once_without_a_task(met):
    outcomes = []
    ask = met.actor.ctx.ask_then
    ask("peer", HI, outcomes.append, timeout_s=5)
    number = met.wire.sent[-1][2].message_id
    met.say(Verb.REPLY, Say(text="first"), correlation_id=number)
    assert outcomes.pop().message == Say(text="first"), "before whatever comes behind it"
    met.say(Verb.REPLY, Say(text="second"), correlation_id=number)
    ask("peer", HI, outcomes.append, timeout_s=5)
    met.say(Verb.ERROR, ErrorBody(code="no_way", message=""), correlation_id=met.wire.sent[-1][2].message_id)
    assert not outcomes
    await asyncio.sleep(0)
    assert outcomes.pop().code == "no_way"
    assert len(met.system.asking) == 0
    ask("peer", HI, outcomes.append, timeout_s=0.01)
    await asyncio.sleep(0.02)
    assert outcomes.pop().code == "deadline_exceeded"
    assert not outcomes


async def test_who_asks_is_not_called_back_while_it_asks(met):
    outcomes = []
    met.wire.full = True
    met.actor.ctx.ask_then("peer", HI, outcomes.append, timeout_s=5)
    assert not outcomes
    await asyncio.sleep(0)
    assert isinstance(outcomes.pop(), Unreachable)


async def test_who_asks_a_peer_that_is_lost_on_the_way_is_told_once(met):
    outcomes = []
    others = [Link(Address(name, 1), dialed=False) for name in ("one", "two")]
    for other in others:
        met.hello(other)

    def on_peer_lost(peer, reason):
        # Its frame goes behind what the links have still to do, which is to tell of the second one.
        if peer.actor_id == "one":
            met.actor.ctx.ask_then("peer", HI, outcomes.append, timeout_s=5)
        if peer.actor_id == "two":
            met.system.links.lose(PEER, "two says so")

    met.actor.on_peer_lost = on_peer_lost
    # Both in one step of the core: what the links carry out goes one after the other.
    for other in others:
        met.system.links._core.lose(other.peer, "gone")
    met.system.links.beat()
    await asyncio.sleep(0)
    assert [type(outcome) for outcome in outcomes] == [PeerLost]
    assert len(met.system.asking) == 0


async def test_what_is_called_back_is_supervised_and_not_after_the_end(met):
    outcomes = []

    def broken(outcome):
        outcomes.append(outcome)
        raise ValueError("in a callback")

    met.actor.ctx.ask_then("peer", HI, broken, timeout_s=5)
    met.say(Verb.REPLY, HI, correlation_id=met.wire.sent[-1][2].message_id)
    assert len(outcomes) == 1
    assert met.system.metrics.value("mesh_handler_errors_total", handler="then") == 1
    for _ in range(2):
        met.actor.ctx.ask_then("peer", HI, outcomes.append, timeout_s=5)
    met.say(Verb.ERROR, ErrorBody(code="x", message=""), correlation_id=met.wire.sent[-1][2].message_id)
    await met.system.stop()
    await asyncio.sleep(0)
    assert len(outcomes) == 1


async def test_who_asks_after_the_end_is_refused_and_leaves_no_timer(met):
    outcomes = []
    met.system.asking.close()
    met.wire.sent.clear()
    with pytest.raises(Cancelled):
        await met.actor.ctx.ask("peer", HI, timeout_s=0.05)
    met.actor.ctx.ask_then("peer", HI, outcomes.append, timeout_s=0.05)
    assert met.wire.sent == []
    assert len(met.system.asking) == 0
    # By a private name: a timer that rings for nothing does nothing.
    assert met.system.asking._timer.at == float("inf")
    await asyncio.sleep(0)
    assert outcomes == []
