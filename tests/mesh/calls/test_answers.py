"""Answers that do not fit: each call still ends once, and whoever sent them loses nothing else by it."""

import asyncio

import pytest

from mesh.address import Address
from mesh.errors import Cancelled, PeerLost, RemoteError, Unreachable
from mesh.transport.base import Channel, Link
from mesh.wire.frames import Cancel, End, ErrorBody
from mesh.wire.header import Verb
from tests.mesh.mesh_under_test import Number, Say
from tests.mesh.rig import FROM_PEER, PEER, TO_PEER

HI = Say(text="hi")


async def asked(rig, coroutine):
    """Start a call to the peer; its task and its message id."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task, rig.wire.sent[-1][2].message_id


async def test_only_the_asked_peer_answers_and_only_once(rig):
    rig.hello()
    other = Link(Address("other", 1), dialed=False)
    rig.hello(other)
    task, number = await asked(rig, rig.actor.ctx.ask("peer", HI, timeout_s=5))
    rig.say(Verb.REPLY, HI, link=other, correlation_id=number)
    rig.say(Verb.ERROR, ErrorBody(code="x", message=""), link=other, correlation_id=number)
    rig.say(Verb.END, End(), link=other, correlation_id=number)
    assert not task.done()
    rig.say(Verb.REPLY, Say(text="first"), correlation_id=number)
    rig.say(Verb.REPLY, Say(text="second"), correlation_id=number)
    assert (await task).message == Say(text="first")
    assert rig.system.metrics.value("mesh_late_answers_total") == 3
    assert rig.system.metrics.value("mesh_errors_told_total", code="x") == 1


async def test_answers_of_the_wrong_kind_are_errors(rig):
    rig.hello()
    for verb, body in ((Verb.ITEM, HI), (Verb.END, End()), (Verb.REPLY, b"\xff")):
        task, number = await asked(rig, rig.actor.ctx.ask("peer", HI, timeout_s=5))
        rig.say(verb, body, correlation_id=number)
        with pytest.raises(RemoteError, match="bad_answer: "):
            await task
    assert rig.refused("bad_body") == 1


async def test_answers_that_come_with_the_cancel_are_dropped(rig):
    rig.hello()
    for verb, body in ((Verb.REPLY, HI), (Verb.ITEM, HI), (Verb.ERROR, ErrorBody(code="x", message=""))):
        task, number = await asked(rig, rig.actor.ctx.ask("peer", HI, timeout_s=5))
        task.cancel()
        rig.say(verb, body, correlation_id=number)
        await asyncio.wait([task])
        assert task.cancelled()
    assert len(rig.system.asking) == 0


async def test_streams_with_holes_end(rig):
    rig.hello()
    for positions, fault in (((0, 2), "items were lost"), ((0, 4), "without credit")):
        stream = rig.actor.ctx.stream("peer", HI, timeout_s=5, window=4)
        task, number = await asked(rig, anext(stream))
        for position in positions:
            rig.say(Verb.ITEM, Number(value=position), correlation_id=number, position=position)
        rig.say(Verb.ITEM, Number(value=0), correlation_id=number, position=0)
        assert (await task).message == Number(value=0)
        with pytest.raises(PeerLost, match=fault):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert any(fault in body.reason for *_, body in rig.wire.sent if isinstance(body, Cancel))


async def test_streams_drop_repeats_and_miss_a_lost_tail(rig):
    rig.hello()
    stream = rig.actor.ctx.stream("peer", HI, timeout_s=5)
    task, number = await asked(rig, anext(stream))
    for _ in range(2):
        rig.say(Verb.ITEM, Number(value=0), correlation_id=number, position=0)
    assert (await task).message == Number(value=0)
    rig.say(Verb.END, End(), correlation_id=number, position=2)
    with pytest.raises(PeerLost, match="last items"):
        await anext(stream)


async def test_a_stream_nobody_reads_any_more_ends_at_the_peer(rig):
    rig.hello()
    stream = rig.actor.ctx.stream("peer", HI, timeout_s=5)
    task, number = await asked(rig, anext(stream))
    task.cancel()
    await asyncio.wait([task])
    del stream, task
    ((_, channel, header, body),) = [sent for sent in rig.wire.sent if isinstance(sent[3], Cancel)]
    assert (channel, header.correlation_id) == (Channel.CONTROL, number)
    assert body.reason == "the stream is no longer read"
    unread = rig.actor.ctx.stream("peer", HI, timeout_s=5)
    await unread.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(unread)


async def test_a_full_way_is_unreachable(rig):
    rig.hello()
    rig.wire.full = True
    with pytest.raises(Unreachable, match="full"):
        await rig.actor.ctx.ask("peer", HI, timeout_s=5)
    assert len(rig.system.asking) == 0
    rig.wire.full = False
    calls = []
    rig.actor.on_ask = calls.append
    rig.say(Verb.STREAM, HI, position=5)
    rig.wire.full = True
    with pytest.raises(PeerLost, match="full"):
        await calls[0].item(HI)
    assert calls[0].done
    with pytest.raises(Cancelled):
        await calls[0].item(HI)


async def test_calls_are_answered_as_they_were_asked(rig):
    rig.hello()
    calls = []
    rig.actor.on_ask = calls.append
    rig.say(Verb.STREAM, HI, channel=Channel.DATA, position=2, message_id=11, timeout_us=0)
    rig.say(Verb.ASK, HI, message_id=12, timeout_us=5_000_000)
    rig.say(Verb.ASK, HI, message_id=12, timeout_us=5_000_000)
    stream, ask = calls
    assert (stream.is_stream, ask.is_stream) == (True, False)
    assert stream.remaining_s() > 500
    assert 4 < ask.remaining_s() <= 5
    rig.wire.sent.clear()
    stream.reply(HI)
    ask.end()
    ask.reply(HI)
    answers = [(channel, header.correlation_id, body.code) for _, channel, header, body in rig.wire.sent]
    assert answers == [(Channel.DATA, 11, "bad_answer"), (Channel.CONTROL, 12, "bad_answer")]
    assert rig.system.metrics.value("mesh_answers_ignored_total") == 1


async def test_a_cancel_overtakes_a_call(rig):
    rig.hello()
    rig.say(Verb.CANCEL, Cancel(), correlation_id=31)
    rig.say(Verb.ASK, HI, channel=Channel.DATA, message_id=31)
    assert rig.actor.calls == []


async def test_calls_of_a_lost_asker_are_dropped(rig):
    rig.hello()
    calls, seen = [], []
    rig.actor.on_ask = calls.append

    def broken():
        seen.append("broken")
        raise ValueError("in a callback")

    rig.say(Verb.STREAM, HI, message_id=41, position=0)
    calls[0].on_cancel(broken)
    calls[0].on_cancel(lambda: seen.append("called"))
    item = asyncio.ensure_future(calls[0].item(HI))
    await asyncio.sleep(0)
    rig.wire.listener.on_link_down(FROM_PEER, "gone")
    with pytest.raises(PeerLost, match="gone"):
        await item
    assert seen == ["broken", "called"]
    assert rig.system.metrics.value("mesh_handler_errors_total", handler="on_cancel") == 1
    rig.wire.listener.on_link_down(FROM_PEER, "again")
    rig.wire.listener.on_link_down(TO_PEER, "never was")
    assert len(rig.actor.lost) == 1
    assert rig.actor.lost[0][0] == PEER


async def test_an_asker_that_is_gone_is_told_nothing(rig):
    rig.hello()
    calls = []
    rig.actor.on_ask = calls.append
    rig.say(Verb.ASK, HI, message_id=51)
    peer = rig.system.links.get("peer")
    rig.wire.listener.on_link_down(FROM_PEER, "gone")
    assert not rig.system.links.send(peer, Channel.DATA, Verb.TELL, b"")
    rig.wire.sent.clear()
    calls[0].reply(HI)
    assert rig.wire.sent == []


async def test_an_outcome_comes_back_once_without_a_task(rig):
    rig.hello()
    outcomes = []
    ask = rig.actor.ctx.ask_then
    ask("peer", HI, outcomes.append, timeout_s=5)
    number = rig.wire.sent[-1][2].message_id
    rig.say(Verb.REPLY, Say(text="first"), correlation_id=number)
    assert outcomes.pop().message == Say(text="first"), "before whatever comes behind it"
    rig.say(Verb.REPLY, Say(text="second"), correlation_id=number)
    for verb, body in ((Verb.ITEM, HI), (Verb.END, End()), (Verb.ERROR, ErrorBody(code="bad_answer", message=""))):
        ask("peer", HI, outcomes.append, timeout_s=5)
        rig.say(verb, body, correlation_id=rig.wire.sent[-1][2].message_id)
        assert not outcomes
        await asyncio.sleep(0)
        assert outcomes.pop().code == "bad_answer"
    assert len(rig.system.asking) == 0
    ask("peer", HI, outcomes.append, timeout_s=0.01)
    await asyncio.sleep(0.02)
    assert outcomes.pop().code == "deadline_exceeded"
    assert not outcomes


async def test_who_asks_is_not_called_back_while_it_asks(rig):
    rig.hello()
    outcomes = []
    rig.wire.full = True
    rig.actor.ctx.ask_then("peer", HI, outcomes.append, timeout_s=5)
    assert not outcomes
    await asyncio.sleep(0)
    assert isinstance(outcomes.pop(), Unreachable)


async def test_what_is_called_back_is_supervised_and_not_after_the_end(rig):
    rig.hello()
    outcomes = []

    def broken(outcome):
        outcomes.append(outcome)
        raise ValueError("in a callback")

    rig.actor.ctx.ask_then("peer", HI, broken, timeout_s=5)
    rig.say(Verb.REPLY, HI, correlation_id=rig.wire.sent[-1][2].message_id)
    assert len(outcomes) == 1
    assert rig.system.metrics.value("mesh_handler_errors_total", handler="then") == 1
    for _ in range(2):
        rig.actor.ctx.ask_then("peer", HI, outcomes.append, timeout_s=5)
    rig.say(Verb.ERROR, ErrorBody(code="x", message=""), correlation_id=rig.wire.sent[-1][2].message_id)
    await rig.system.stop()
    await asyncio.sleep(0)
    assert len(outcomes) == 1
