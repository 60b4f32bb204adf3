"""The simulated network alone: order, faults, repeatability. Whole actors on it: test_actors.py."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.address import Address
from mesh.errors import BindError
from mesh.simulation.faults import Faults
from mesh.simulation.network import SimulatedNetwork
from mesh.simulation.virtual_time import run
from mesh.transport.base import Channel, Link

pytestmark = pytest.mark.virtual_time


class Ear:
    """A listener that writes down what it hears, and may answer."""

    def __init__(self, on_message=None):
        self.heard = []
        self.downs = []
        self._on_message = on_message

    def on_frames(self, link, channel, parts):
        self.heard.append((link, channel, tuple(parts)))
        if self._on_message is not None:
            self._on_message(link, channel, parts)

    def on_link_down(self, link, reason):
        self.downs.append((link, reason))

    def numbers(self, sender=None, channel=None):
        return [
            int.from_bytes(parts[0])
            for link, on, parts in self.heard
            if (sender is None or link.peer == sender) and (channel is None or on == channel)
        ]


A, B, C = (Address(name, 1) for name in ("a", "b", "c"))


class Net:
    """A network and its ends, started."""

    def __init__(self, seed=0, faults=None, **options):
        self.network = SimulatedNetwork(seed, faults, **options)
        self.ears, self.ends, self.endpoints = {}, {}, {}

    async def start(self, *addresses):
        for address in addresses:
            self.ears[address] = Ear()
            self.ends[address] = self.network.transport(address)
            self.endpoints[address] = await self.ends[address].start(address, self.ears[address])
        return self

    def dial(self, source, target):
        return self.ends[source].dial(target, self.endpoints[target])

    def send(self, source, link, number, channel=Channel.DATA):
        return self.ends[source].send(link, channel, [number.to_bytes(4), b"body"])


WILD = Faults(
    drop=0.1,
    duplicate=0.1,
    slow=0.2,
    reset=0.005,
    partition=0.5,
    window_s=0.5,
    partition_s=(0.01, 0.4),
    silent_down=0.3,
)


async def storm(seed, faults=WILD, rounds=300):
    """Three ends that dial each other again whenever a link goes down, and number what they send."""
    net = await Net(seed, faults).start(A, B, C)
    everyone = [A, B, C]
    for number in range(rounds):
        for source in everyone:
            for target in everyone:
                if source != target:
                    net.send(source, net.dial(source, target), number, Channel(number % 2))
        await asyncio.sleep(0.01)
    await asyncio.sleep(10)
    return net


def firsts(numbers):
    seen = set()
    return [n for n in numbers if not (n in seen or seen.add(n))]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_fifo_per_link_and_channel_whatever_the_faults(seed):
    net = run(storm(seed, replace(WILD, reset=0.0), rounds=60))
    for ear in net.ears.values():
        for sender in (A, B, C):
            for channel in Channel:
                numbers = firsts(ear.numbers(sender, channel))
                assert numbers == sorted(numbers)


def test_equal_seeds_give_equal_runs_and_others_differ():
    first, second, other = run(storm(7)), run(storm(7)), run(storm(8))
    assert first.network.trace.fingerprint == second.network.trace.fingerprint != other.network.trace.fingerprint
    assert list(first.network.trace.entries) == list(second.network.trace.entries)
    assert {a: e.heard for a, e in first.ears.items()} == {a: e.heard for a, e in second.ears.items()}
    assert first.network.counts == second.network.counts


def test_no_dependence_on_the_hash_seed():
    program = (
        "import runpy, sys; from mesh.simulation.virtual_time import run;"
        "module = runpy.run_path(sys.argv[1]);"
        "print(run(module['storm'](11)).network.trace.fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1
    assert prints.pop().strip().isdigit()


def test_every_message_is_accounted_for_and_every_fault_happens():
    totals = dict.fromkeys(SimulatedNetwork(0).counts, 0)
    for seed in range(5):
        counts = run(storm(seed)).network.counts
        ended = counts["delivered"] + counts["dropped"] + counts["cut"] + counts["reset"] + counts["lost"]
        unnoticed = counts["sent"] + counts["duplicated"] - ended
        # What is sent to a silently dead peer stays in an outbox for ever.
        assert 0 <= unnoticed <= 300 * counts["silent_down"]
        for name, count in counts.items():
            totals[name] += count
    happening = {name for name, count in totals.items() if count}
    assert happening >= {"sent", "delivered", "dropped", "slowed", "duplicated", "reordered", "cut", "held", "reset"}
    assert happening >= {"lost", "link_down"}


async def test_without_faults_everything_arrives_in_order_at_latency():
    net = await Net().start(A, B)
    link = net.dial(A, B)
    assert net.dial(A, B) == link == Link(B, dialed=True)
    for number in range(100):
        assert net.send(A, link, number)
    assert net.ears[B].heard == []
    await asyncio.sleep(0.001)
    assert net.ears[B].numbers() == list(range(100))
    back = net.ears[B].heard[0][0]
    assert back == Link(A, dialed=False)
    assert net.send(B, back, 7, Channel.CONTROL)
    await asyncio.sleep(0.001)
    assert net.ears[A].heard == [(link, Channel.CONTROL, ((7).to_bytes(4), b"body"))]


async def test_parts_are_copied_at_send():
    net = await Net().start(A, B)
    memory = bytearray(b"before")
    net.ends[A].send(net.dial(A, B), Channel.DATA, [b"h", memoryview(memory)])
    memory[:] = b"after!"
    await asyncio.sleep(1)
    assert net.ears[B].heard[0][2] == (b"h", b"before")


async def test_outbox_is_bounded_while_the_receiver_hangs():
    net = await Net(outbox_limit=10).start(A, B)
    link = net.dial(A, B)
    net.network.hang(B)
    net.network.hang(B)
    assert [net.send(A, link, number) for number in range(12)] == [True] * 10 + [False] * 2
    assert net.send(A, link, 0, Channel.CONTROL), "channels do not share a queue"
    await asyncio.sleep(60)
    assert net.ears[B].heard == []
    net.network.resume(B)
    net.network.resume(B)
    await asyncio.sleep(0.001)
    assert net.ears[B].numbers(channel=Channel.DATA) == list(range(10))
    assert net.send(A, link, 11)
    assert net.network.counts["refused"] == 2
    assert net.network.counts["hang"] == 1


async def test_what_a_hung_actor_sends_waits_too():
    net = await Net().start(A, B)
    link = net.dial(A, B)
    net.network.hang(A)
    for number in range(5):
        assert net.send(A, link, number)
    await asyncio.sleep(5)
    assert net.ears[B].heard == []
    net.network.resume(A)
    await asyncio.sleep(0.001)
    assert net.ears[B].numbers() == list(range(5))


async def test_crash_is_noticed_by_peers_and_silences_the_actor():
    net = await Net().start(A, B, C)
    link, other = net.dial(A, B), net.dial(C, A)
    net.send(A, link, 1)
    await asyncio.sleep(0.001)
    net.network.crash(A)
    net.network.crash(A)
    assert not net.send(A, link, 2)
    await asyncio.sleep(0.001)
    assert net.ears[B].downs == []
    await asyncio.sleep(0.1)
    assert net.ears[B].downs == [(Link(A, dialed=False), "peer crashed")]
    assert net.ears[C].downs == [(Link(A, dialed=True), "peer crashed")]
    assert not net.send(C, other, 3)
    assert not net.send(B, Link(A, dialed=False), 3)
    assert net.ears[B].numbers() == [1]
    # Dialing it again is refused, and heard of.
    net.dial(B, A)
    await asyncio.sleep(0.1)
    assert net.ears[B].downs[-1] == (Link(A, dialed=True), "refused")
    assert net.ears[A].heard == []


async def test_a_silent_end_fills_the_outbox_until_the_link_is_replaced():
    net = await Net(faults=Faults(silent_down=1.0), outbox_limit=5).start(A, B)
    link = net.dial(A, B)
    net.send(A, link, 0)
    await asyncio.sleep(0.01)
    net.ends[B].close_link(Link(A, dialed=False))
    await asyncio.sleep(1)
    assert net.ears[A].downs == []
    assert [net.send(A, link, n) for n in range(7)] == [True] * 5 + [False] * 2
    net.ends[A].close_link(link)
    net.ends[A].close_link(link)
    assert net.send(A, net.dial(A, B), 9)
    await asyncio.sleep(1)
    assert net.ears[B].numbers() == [0, 9]


async def test_redialing_replaces_a_connection_that_the_acceptor_still_believes_in():
    net = await Net(faults=Faults(silent_down=1.0)).start(A, B)
    net.send(A, net.dial(A, B), 0)
    await asyncio.sleep(0.01)
    net.ends[A].close_link(Link(B, dialed=True))
    net.send(A, net.dial(A, B), 1)
    await asyncio.sleep(0.01)
    assert net.ears[B].downs == [(Link(A, dialed=False), "replaced by a new connection")]
    assert net.ears[B].numbers() == [0, 1]


async def test_stop_delivers_what_was_sent_then_closes():
    net = await Net(faults=Faults(slow=1.0)).start(A, B)
    link = net.dial(A, B)
    for number in range(20):
        net.send(A, link, number)
    await net.ends[A].stop()
    await net.ends[A].stop()
    await asyncio.sleep(2)
    assert net.ears[B].numbers() == list(range(20))
    assert net.ears[B].downs == [(Link(A, dialed=False), "closed by peer")]
    with pytest.raises(BindError):
        await net.ends[A].start(A, Ear())


async def test_dialing_an_actor_that_stops_meanwhile():
    net = await Net().start(A, B)
    net.dial(A, B)
    await net.ends[B].stop()
    await asyncio.sleep(1)
    assert net.ears[A].downs == [(Link(B, dialed=True), "refused")]


async def test_cuts_part_the_two_sides_only():
    net = await Net().start(A, B, C)
    links = {(s, t): net.dial(s, t) for s, t in [(A, B), (A, C), (B, C)]}
    net.network.cut(["a"], ["b"], duration_s=1.0)
    for (source, _), link in links.items():
        net.send(source, link, 1)
    await asyncio.sleep(0.5)
    assert net.ears[B].heard == []
    assert net.ears[C].numbers() == [1, 1]
    await asyncio.sleep(1)
    net.send(A, links[A, B], 2)
    await asyncio.sleep(0.1)
    assert net.ears[B].numbers() == [2]
    net.network.cut(["a"], ["b"], duration_s=5.0, hold=True)
    net.send(A, links[A, B], 3)
    await asyncio.sleep(1)
    assert net.ears[B].numbers() == [2]
    await asyncio.sleep(5)
    assert net.ears[B].numbers() == [2, 3]
    net.network.cut(["a"], ["b"])
    net.send(A, links[A, B], 4)
    net.network.calm()
    net.send(A, links[A, B], 5)
    await asyncio.sleep(1)
    assert net.ears[B].numbers() == [2, 3, 5]
    with pytest.raises(ValueError, match="finite"):
        net.network.cut(["a"], ["b"], hold=True)


async def test_an_address_has_one_transport_and_one_endpoint():
    network = SimulatedNetwork(0)
    transport = network.transport(A)
    with pytest.raises(ValueError, match="new epoch"):
        network.transport(A)
    with pytest.raises(BindError):
        await transport.start(B, Ear())
    await transport.start(A, Ear())


def test_report_shows_the_last_messages():
    network = run(storm(3)).network
    report = network.report(5)
    assert "seed 3" in report
    assert len(report.splitlines()) == 7
    assert "delivered=" in report


async def test_an_actor_may_dial_itself():
    net = await Net().start(A)
    link = net.dial(A, A)
    net.send(A, link, 1)
    await asyncio.sleep(1)
    assert net.ears[A].heard[0][0] == Link(A, dialed=False)
    net.send(A, Link(A, dialed=False), 2)
    await asyncio.sleep(1)
    assert net.ears[A].heard[1][0] == link
