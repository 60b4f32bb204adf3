"""Asks and tells between whole systems, over the in-process transport and ZeroMQ."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from mesh.address import Address
from mesh.errors import (
    Cancelled,
    DeadlineExceeded,
    MailboxFull,
    PeerLost,
    RemoteError,
    TooLarge,
    Unreachable,
)
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.process_usage import ProcessUsage
from mesh.transport.base import Channel
from mesh.wire.frames import (
    ListMembers,
    Ping,
    Pong,
    StatsReply,
    StatsRequest,
)
from mesh.wire.header import Limits
from tests.mesh.mesh_under_test import QUICK, Number, Recorder, Say, Step, until

HI = Say(text="hi")


async def test_asks_are_answered_with_their_buffers(a):
    big = bytes(range(256)) * 1000
    answer = await a.actor.ctx.ask("b", HI, timeout_s=5, buffers=[b"small", memoryview(big)])
    assert answer.message == HI
    assert [bytes(part) for part in answer.buffers] == [b"small", big]
    assert answer.sender == Address("b", 1)
    answers = await asyncio.gather(*(a.actor.ctx.ask("b", Number(value=v), timeout_s=5) for v in range(100)))
    assert [answer.message.value for answer in answers] == list(range(100))
    assert len(a.asking) == 0


async def test_an_actor_can_ask_itself(a):
    assert (await a.actor.ctx.ask("a", HI, timeout_s=1)).message == HI
    assert a.actor.ctx.tell("a", Step(step=1))
    await until(lambda: a.actor.told)
    stats = (await a.actor.ctx.ask("a", StatsRequest(), timeout_s=1)).message
    assert stats.gauges["mesh_told"] == 1.0


async def test_tells_arrive_in_order_per_channel(a, b):
    for number in range(500):
        assert a.actor.ctx.tell("b", Step(step=number), [b"x" * (number * 100)])
        assert a.actor.ctx.tell("b", Number(value=number), channel=Channel.CONTROL)
    await until(lambda: len(b.actor.told) == 1000)
    steps = [m.step for _, m, _ in b.actor.told if isinstance(m, Step)]
    numbers = [m.value for _, m, _ in b.actor.told if isinstance(m, Number)]
    assert steps == numbers == list(range(500))
    assert all(len(buffers[0]) == m.step * 100 for _, m, buffers in b.actor.told if isinstance(m, Step))
    assert b.metrics.value("mesh_frames_missing_total") == 0


async def test_errors_cross_as_data(a, b):
    with pytest.raises(RemoteError, match="it cannot be") as caught:
        await a.actor.ctx.ask("b", Say(text="fail"), timeout_s=5)
    assert (caught.value.code, caught.value.retryable, caught.value.param) == ("no_way", True, "text")
    with pytest.raises(RemoteError) as caught:
        await a.actor.ctx.ask("b", Say(text="raise"), timeout_s=5)
    assert caught.value.code == "internal"
    with capture_logs() as lines:
        b.tasks.failed("on_ask", ValueError(), SimpleNamespace(request_id="cmpl-1"))
    assert lines[0]["request_id"] == "cmpl-1", "what a message is about is in the line of its handler's failure"
    a.actor.ctx.tell("b", Say(text="raise"))
    a.actor.ctx.tell("b", HI)
    await until(lambda: len(b.actor.told) == 2)
    assert b.metrics.value("mesh_handler_errors_total", handler="on_tell(Say)") == 1
    assert b.metrics.value("mesh_handler_errors_total", handler="on_ask(Say)") == 1
    with pytest.raises(RemoteError, match="not_served: "):
        await a.actor.ctx.ask("b", ListMembers(), timeout_s=5)


async def test_every_ask_ends_by_its_deadline(a, b):
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(DeadlineExceeded, match="b#1"):
        await a.actor.ctx.ask("b", Say(text="silence"), timeout_s=0.05)
    # uvloop's clock counts whole milliseconds.
    assert 0.049 <= loop.time() - start < 1
    await until(lambda: b.actor.cancelled)
    assert b.actor.calls[0].done
    assert 0.0 <= b.actor.calls[0].remaining_s() < 0.05
    b.actor.calls[0].reply(HI)
    assert b.metrics.value("mesh_answers_ignored_total") == 1
    with pytest.raises(DeadlineExceeded):
        await a.actor.ctx.ask("b", HI, timeout_s=0)


async def test_cancelling_the_task_cancels_at_the_peer(a, b):
    task = asyncio.create_task(a.actor.ctx.ask("b", Say(text="silence"), timeout_s=60))
    await until(lambda: b.actor.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: b.actor.cancelled)
    assert len(b.serving) == 0
    late = []
    b.actor.calls[0].on_cancel(lambda: late.append(1))
    assert late == [1]


async def test_a_dead_peer_answers_at_once(a, b, mesh):
    loop = asyncio.get_running_loop()
    asks = [asyncio.create_task(a.actor.ctx.ask("b", Say(text="silence"), timeout_s=60)) for _ in range(3)]
    await until(lambda: len(b.actor.calls) == 3)
    start = loop.time()
    await mesh.kill(b)
    for ask in asks:
        with pytest.raises(PeerLost, match="b#1"):
            await ask
    assert loop.time() - start < 1
    assert a.actor.lost[0][0] == Address("b", 1)
    with pytest.raises((PeerLost, Unreachable)):
        await a.actor.ctx.ask("b", HI, timeout_s=60)
    assert loop.time() - start < 3
    assert [name for name in a.stats().gauges if "unreached" in name] == ['mesh_unreached_seconds{peer="b"}']


async def test_whom_nobody_knows_cannot_be_reached(a):
    with pytest.raises(Unreachable, match="nobody is not a member"):
        await a.actor.ctx.ask("nobody", HI, timeout_s=5)
    assert not a.actor.ctx.tell("nobody", HI)
    assert a.metrics.value("mesh_tells_dropped_total", code="unreachable") == 1


async def test_what_is_too_large_is_not_sent(mesh):
    small = replace(QUICK, limits=Limits(max_body_bytes=1000, max_message_bytes=5000))
    await mesh.start_registry()
    a, b = await mesh.start("a", options=small), await mesh.start("b")
    await until(lambda: a.registration.view.get("b"))
    with pytest.raises(TooLarge):
        await a.actor.ctx.ask("b", Say(text="x" * 2000), timeout_s=5)
    assert not a.actor.ctx.tell("b", Say(text="x" * 2000))
    await until(lambda: b.registration.view.get("a"))
    # b may send more than a takes; a refuses, and b's ask is answered so.
    with pytest.raises(RemoteError) as caught:
        await b.actor.ctx.ask("a", Say(text="x" * 2000), timeout_s=5)
    assert caught.value.code == "too_large"
    assert a.metrics.value("mesh_frames_refused_total", code="too_large") == 1
    assert (await b.actor.ctx.ask("a", HI, timeout_s=5)).message == HI
    # An answer that is too large becomes an error.
    a.actor.on_ask = lambda call: call.reply(Say(text="x" * 2000))
    with pytest.raises(RemoteError, match="too_large: "):
        await b.actor.ctx.ask("a", HI, timeout_s=5)


async def test_full_mailboxes_and_full_tables_answer_at_once(mesh):
    await mesh.start_registry()
    options = replace(QUICK, mailbox_capacity=4, max_pending_calls=8)
    a, b = await mesh.start("a", options=options), await mesh.start("b", options=options)
    await until(lambda: a.registration.view.get("b"))
    silent = [asyncio.create_task(a.actor.ctx.ask("b", Say(text="silence"), timeout_s=60)) for _ in range(2)]
    await until(lambda: len(b.actor.calls) == 2)
    with pytest.raises(RemoteError) as caught:
        await a.actor.ctx.ask("b", HI, timeout_s=5)
    assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
    assert b.metrics.value("mesh_overloaded_total") == 1
    b.actor.calls[0].reply(HI)
    await silent[0]
    assert (await a.actor.ctx.ask("b", HI, timeout_s=5)).message == HI
    many = [asyncio.create_task(a.actor.ctx.ask("registry", Ping(), timeout_s=5)) for _ in range(10)]
    outcomes = await asyncio.gather(*many, return_exceptions=True)
    assert sum(isinstance(outcome, MailboxFull) for outcome in outcomes) == 3
    silent[1].cancel()
    await asyncio.wait(silent)


async def test_every_actor_answers_the_systems_asks(a, b):
    ask = a.actor.ctx.ask
    assert isinstance((await ask("b", StatsRequest(), timeout_s=5)).message, StatsReply)
    assert (await ask("b", Ping(), timeout_s=5)).message == Pong()


async def test_stopping_answers_whoever_waits(a, b):
    asked = asyncio.create_task(a.actor.ctx.ask("b", Say(text="silence"), timeout_s=60))
    await until(lambda: b.actor.calls)
    asking = asyncio.create_task(b.actor.ctx.ask("a", Say(text="silence"), timeout_s=60))
    await until(lambda: a.actor.calls)
    await b.stop()
    with pytest.raises(RemoteError) as caught:
        await asked
    assert (caught.value.code, caught.value.retryable) == ("stopping", True)
    with pytest.raises(Cancelled):
        await asking
    await until(lambda: a.actor.lost)
    await until(lambda: a.actor.cancelled)


async def test_traces_are_carried_along(a, b):
    trace = a.actor.ctx.traceparent()
    assert a.actor.ctx.traceparent() == trace
    await a.actor.ctx.ask("b", HI, timeout_s=5)
    assert b.actor.calls[-1].traceparent == trace
    a.actor.ctx.continue_trace("00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    await a.actor.ctx.ask("b", HI, timeout_s=5)
    assert b.actor.calls[-1].traceparent.startswith("00-111")


async def test_tasks_and_timers_end_with_the_actor(a):
    fired = []

    def bad():
        fired.append(1)
        raise ValueError("in a timer")

    async def fails():
        raise RuntimeError("in a task")

    async def fails_by_the_mesh():
        await a.actor.ctx.ask("nobody", HI, timeout_s=1)

    a.actor.ctx.later(0.001, bad)
    a.actor.ctx.spawn(fails(), name="mine")
    a.actor.ctx.spawn(fails_by_the_mesh())
    forever = a.actor.ctx.spawn(asyncio.sleep(3600))
    await until(lambda: a.metrics.value("mesh_handler_errors_total", handler="bad"))
    await until(lambda: a.metrics.value("mesh_handler_errors_total", handler="mine"))
    await until(lambda: a.metrics.value("mesh_handler_errors_total", handler="fails_by_the_mesh"))
    await a.stop()
    assert forever.cancelled()


class FailsToStart(Recorder):
    stopped = 0

    async def start(self):
        raise RuntimeError("no")

    async def stop(self):
        self.stopped += 1
        raise ValueError("nor to stop")

    def stats(self):
        raise ValueError("nor this")


async def test_a_start_that_fails_is_cleaned_up(mesh):
    await mesh.start_registry()
    actor = FailsToStart()
    with pytest.raises(RuntimeError, match="no"):
        await mesh.start("a", actor=actor)
    assert actor.stopped == 1
    await mesh.systems["a"].stop()
    assert actor.stopped == 1


async def test_broken_statistics_do_not_hide_the_others(a, b):
    b.actor.stats = b.actor.totals = FailsToStart().stats
    stats = (await a.actor.ctx.ask("b", StatsRequest(), timeout_s=5)).message
    assert "mesh_peers" in stats.gauges
    for handler in ("stats", "totals"):
        assert b.metrics.value("mesh_handler_errors_total", handler=handler) >= 1, handler


@pytest.mark.parametrize("memory_bytes", [4096, None])
async def test_what_the_process_uses_is_among_an_actors_figures(rig, memory_bytes):
    used = [ProcessUsage(cpu_s=1.0, memory_bytes=memory_bytes), ProcessUsage(cpu_s=3.0, memory_bytes=memory_bytes)]
    figures = OwnFigures(rig.actor, rig.system.metrics, rig.system.tasks, lambda: used.pop(0))
    figures.sample(10.0)
    gauges = figures.reply(14.0, {"mesh_peers": 2.0}).gauges
    assert (gauges["mesh_cpu_cores"], gauges["mesh_peers"]) == (0.5, 2.0)
    assert gauges.get("mesh_resident_memory_bytes") == memory_bytes
