"""Links of two actors over a network that loses, repeats, delays and resets: any order of events keeps the invariants.

The network is ZeroMQ at its worst: a ROUTER knows who dialed by its identity alone, so what an older connection has
sent still comes, and neither side need be told that the other has closed.
"""

from collections import defaultdict, deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.address import Address, Endpoint
from mesh.errors import Unreachable
from mesh.link.core import LinkCore
from mesh.link.outputs import Close, Dial, Found, Lost, Refused, Send, Superseded
from mesh.link.peer import PLAIN, answer_to
from mesh.membership.view import Member
from mesh.options import SystemOptions
from mesh.runtime.telemetry import Metrics
from mesh.transport.base import Channel, Link
from mesh.wire.frames import SYSTEM_CODEC, Pong
from mesh.wire.header import Header, Verb
from tests.mesh.rig import PEER

NAMES = ("a", "b")
OPTIONS = SystemOptions(host="h", pid=1)
NOWHERE = Endpoint("", "")


def header_of(parts):
    return msgspec.msgpack.decode(parts[0], type=Header)


class Pipe:
    """One connection, and what is under way to either side, by channel. `listener`: who accepted it."""

    def __init__(self, dialer, acceptor, listener):
        self.dialer, self.acceptor, self.listener = dialer, acceptor, listener
        self.to_dialer, self.to_acceptor = ([deque(), deque()] for _ in range(2))


class Node:
    """One incarnation: its core, and a check of everything that it hands out."""

    def __init__(self, world, address):
        self.world, self.address = world, address
        self.view = {}
        self.pipes = {}
        self.is_full = False
        self.num_said = 0
        self.sent = {}
        self.lost, self.found, self.superseded, self.refused = [], [], [], []
        self.seen = set()
        self.routes = {}
        self.last_payload = defaultdict(int)
        member = Member(actor_id=address.actor_id, role="r", epoch=address.epoch, endpoint=NOWHERE, host=OPTIONS.host)
        self.describe = lambda: member
        self.introduce = lambda *_, **__: member
        self.vet = lambda _: False
        self.core = LinkCore(address, OPTIONS, Metrics(), self)

    def locate(self, actor_id):
        return (self.view[actor_id], NOWHERE) if actor_id in self.view else None

    def say(self, actor_id, channel):
        """Send the next payload; whether it was taken."""
        try:
            peer = self.core.peers.get(actor_id) or self.core.dial(actor_id, self.world.now, "")
        except Unreachable:
            return False
        self.num_said += 1
        body = msgspec.msgpack.encode([self.address, peer.address, self.num_said])
        return self.send(peer, channel, Verb.TELL, body, PLAIN)

    def send(self, peer, channel, verb, body, meta):
        """As `Links.send` does it."""
        self.carry_out()
        if peer.route is None:
            return False
        route = peer.route
        parts = self.core.write(route, channel, verb, body, (), meta, "")
        if parts:
            self.number(route.link, channel, parts)
            if not self.put(route.link, channel, parts):
                self.core.take_back(route, channel)
                self.sent[route.link, channel] -= 1
                return False
        return parts is not None

    def number(self, link, channel, parts):
        """Numbers grow by one on a connection, and the next connection's are higher."""
        number, last = header_of(parts).sequence, self.sent.get((link, channel), 0)
        if number:
            assert number == last + 1 or (number >> 32 > last >> 32 and number & 0xFFFFFFFF == 1)
            self.sent[link, channel] = number

    def put(self, link, channel, parts):
        pipe = self.pipes.get(link)
        if pipe is None:
            return False
        queue = (pipe.to_acceptor if link.dialed else pipe.to_dialer)[channel]
        if self.is_full and queue:
            return False
        queue.append(parts)
        return True

    def carry_out(self):
        while self.core.outputs:
            output = self.core.outputs.popleft()
            match output:
                case Send(link, channel, parts):
                    self.number(link, channel, parts)
                    if not self.put(link, channel, parts):
                        self.core.not_taken(output)
                case Dial(address, _):
                    self.world.dial(self, address)
                case Close(link):
                    self.pipes.pop(link, None)
                case Lost(peer, reason):
                    assert peer not in [lost for lost, _ in self.lost]
                    assert self.core.peers.get(peer.address.actor_id) is not peer
                    self.lost.append((peer, reason))
                case Found(address):
                    lost = next(o.peer.address for o in self.core.outputs if isinstance(o, Lost))
                    assert lost.actor_id == address.actor_id
                    assert lost.epoch < address.epoch
                    self.found.append(address)
                    self.view[address.actor_id] = max(address, self.view[address.actor_id])
                case Superseded(by, _, _):
                    self.superseded.append(by)
                case Refused(_, refusal):
                    self.refused.append(refusal.code)

    def receive(self, link, channel, parts):
        assert not self.core.outputs
        delivered = self.core.receive(link, channel, parts)
        if delivered is None:
            self.carry_out()
            return
        assert not self.core.outputs
        peer, header = delivered
        assert self.core.peers[link.peer.actor_id] is peer
        assert peer.address == link.peer
        if header.verb == Verb.ASK:
            self.send(peer, channel, Verb.REPLY, SYSTEM_CODEC.encode(Pong()), answer_to(header))
        elif header.verb == Verb.TELL:
            sender, receiver, number = msgspec.msgpack.decode(parts[1], type=tuple[Address, Address, int])
            assert (sender, receiver) == (peer.address, self.address)
            # On one connection, while the peer is not lost: what comes late of another cannot be told from what is new.
            assert self.last_payload[id(peer), link, channel] < number, "out of order, or twice"
            self.last_payload[id(peer), link, channel] = number
            self.seen.add((sender, number))
        else:
            assert header.verb in (Verb.REPLY, Verb.ERROR), "a pong that came too late, or a refusal"

    def tick(self):
        self.core.due(self.world.now)
        self.core.beat(self.world.now)
        self.carry_out()


class World:
    """Two actors, whatever incarnations they have had, and what is between them."""

    def __init__(self, has_fixed_ports=False):
        self.now = 0.0
        self.has_fixed_ports = has_fixed_ports
        self.pipes = []
        self.history = []
        self.nodes = {}
        for name in NAMES:
            self.start(name, 1)
        self.learn()

    def start(self, name, epoch):
        self.nodes[name] = Node(self, Address(name, epoch))

    def learn(self):
        for node in self.nodes.values():
            node.view = {name: other.address for name, other in self.nodes.items()}

    def alive(self, address):
        node = self.nodes[address.actor_id]
        return node if node.address == address else None

    def dial(self, node, address):
        """Where ports are fixed whoever lives listens, whichever incarnation was meant."""
        acceptor = self.nodes[address.actor_id] if self.has_fixed_ports else self.alive(address)
        pipe = Pipe(node.address, address, acceptor.address if acceptor is not None else address)
        node.pipes[Link(address, dialed=True)] = pipe
        if acceptor is not None:
            acceptor.pipes[Link(node.address, dialed=False)] = pipe
        self.pipes.append(pipe)

    def queues(self):
        """Everything under way: pipe, whether to its acceptor, channel."""
        found = []
        for pipe in self.pipes:
            for to_acceptor in (True, False):
                queues = pipe.to_acceptor if to_acceptor else pipe.to_dialer
                found += [(pipe, to_acceptor, channel) for channel in Channel if queues[channel]]
        return found

    def head(self, queue):
        pipe, to_acceptor, channel = queue
        return header_of((pipe.to_acceptor if to_acceptor else pipe.to_dialer)[channel][0])

    def take(self, queue, fate="deliver"):
        pipe, to_acceptor, channel = queue
        waiting = (pipe.to_acceptor if to_acceptor else pipe.to_dialer)[channel]
        parts = waiting[0] if fate == "repeat" else waiting.popleft()
        if fate == "drop":
            return
        if to_acceptor:
            self.history.append((pipe.acceptor.actor_id, Link(pipe.dialer, dialed=False), channel, parts, pipe))
            self.arrive(*self.history[-1])
        else:
            node = self.alive(pipe.dialer)
            link = Link(pipe.acceptor, dialed=True)
            if node is not None and node.pipes.get(link) is pipe:
                node.receive(link, channel, parts)

    def arrive(self, actor_id, link, channel, parts, pipe):
        """At a ROUTER, which knows the newest connection of an identity, and makes a record of one it has forgotten."""
        node = self.nodes[actor_id]
        node.pipes.setdefault(link, pipe)
        node.receive(link, channel, parts)

    def down(self, node, link):
        if node.pipes.pop(link, None) is not None:
            node.core.down(link, "reset", self.now)
            node.carry_out()

    def advance(self, seconds):
        self.now += seconds
        for node in self.nodes.values():
            node.tick()

    def settle(self):
        """The network is calm: what was sent arrives, and who dials nobody is told so.

        Everybody learns who lives, but where ports are fixed only by asking there.
        """
        if not self.has_fixed_ports:
            self.learn()
        for node in self.nodes.values():
            node.is_full = False
            for link in list(node.pipes):
                if link.dialed and self.alive(node.pipes[link].listener) is None:
                    self.down(node, link)
        while queues := self.queues():
            self.take(queues[0])

    # Events; `pick` chooses among what there is

    def say(self, pick):
        self.nodes[NAMES[pick % 2]].say(NAMES[1 - pick % 2], Channel(pick // 2 % 2))

    def move(self, pick, fate="deliver"):
        queues = self.queues()
        if queues:
            self.take(queues[pick % len(queues)], fate)

    def flush(self, pick):
        """Everything arrives, and the answers to it."""
        for _ in range(200):
            self.move(pick)

    def drop(self, pick):
        """A frame is lost; but a hello only with its connection, as TCP has it."""
        queues = self.queues()
        if queues and self.head(queues[pick % len(queues)]).verb != Verb.HELLO:
            self.move(pick, "drop")

    def repeat(self, pick):
        self.move(pick, "repeat")

    def late(self, pick):
        """What has come already comes again, perhaps of a connection before, or for an incarnation before.

        No hello does, with which a whole connection would have come again.
        """
        if self.history:
            arrived = self.history[-1 - pick % len(self.history)]
            if header_of(arrived[3]).verb != Verb.HELLO:
                self.arrive(*arrived)

    def reset(self, pick):
        """A connection ends, for one side or for both."""
        node = self.nodes[NAMES[pick % 2]]
        links = list(node.pipes)
        if links:
            link = links[pick // 4 % len(links)]
            pipe, far = node.pipes[link], self.alive(link.peer)
            self.down(node, link)
            back = Link(node.address, dialed=not link.dialed)
            if pick & 2 and far is not None and far.pipes.get(back) is pipe:
                self.down(far, back)

    def restart(self, pick):
        """An incarnation ends, with a word or without, and others may learn of the next before it speaks."""
        node = self.nodes[NAMES[pick % 2]]
        if pick & 2:
            node.core.close()
            node.carry_out()
            assert not node.core.peers
            assert node.core.next_deadline() is None
        self.start(node.address.actor_id, node.address.epoch + 1)
        self.nodes[node.address.actor_id].view = dict(node.view)
        if pick & 4:
            self.learn()

    def wait(self, pick):
        self.advance((0.06, 0.5, 2.0, 7.0)[pick % 4])

    def suspect(self, pick):
        self.with_peers(pick, lambda core, peer: core.liveness.suspect(peer.address.actor_id, self.now))

    def watch(self, pick):
        self.with_peers(pick, lambda core, peer: setattr(peer, "is_watched", True))

    def leave(self, pick):
        """The registry says that a peer has left."""
        self.with_peers(pick, lambda core, peer: core.lose(peer.address, "it left the mesh"))

    def fill(self, pick):
        """Outboxes are full from now on, or no longer."""
        self.nodes[NAMES[pick % 2]].is_full ^= True

    def with_peers(self, pick, do):
        node = self.nodes[NAMES[pick % 2]]
        for peer in list(node.core.peers.values()):
            do(node.core, peer)
        node.carry_out()

    def check(self):
        for node in self.nodes.values():
            core, wanted = node.core, set()
            connections = [c for peer in core.peers.values() for c in peer.connections]
            # By private names: what is left behind of a lost peer does nothing that others could see.
            assert {c.link: c for c in connections} == core._connections
            for actor_id, peer in core.peers.items():
                assert peer.address.actor_id == actor_id
                assert peer.route in peer.connections
                assert node.routes.setdefault(id(peer), peer.route) is peer.route
                assert all(c.peer is peer and c.link.peer == peer.address for c in peer.connections)
                if any(c.link.dialed and not c.is_up for c in peer.connections):
                    wanted.add(("welcome", actor_id))
                wanted |= {(channel.name, actor_id) for channel in peer.pings}
            assert wanted == set(core._deadlines._at)

    def check_reach(self, who, to):
        """In a calm network each can reach the other again, however broken what is between them is."""
        for _ in range(8):
            self.settle()
            sender, receiver = self.nodes[who], self.nodes[to]
            sender.say(to, Channel.DATA)
            self.settle()
            if (sender.address, sender.num_said) in receiver.seen:
                return
            self.suspect(NAMES.index(who))
            self.settle()
            self.advance(7.0)
        raise AssertionError(f"{who} cannot reach {to} any more: {sender.lost}")


OFTEN = [World.say] * 4 + [World.move] * 8 + [World.flush] * 2
SELDOM = [World.drop, World.repeat, World.late, World.reset, World.restart, World.wait, World.suspect]
RARELY = [World.watch, World.leave, World.fill]
EVENTS = st.tuples(st.sampled_from(OFTEN * 2 + SELDOM * 2 + RARELY), st.integers(0, 63))


@pytest.fixture
def world():
    return linked()


@settings(max_examples=400)
@given(st.lists(EVENTS, max_size=80), st.booleans())
def test_any_order_of_events_keeps_the_invariants(events, has_fixed_ports):
    world = World(has_fixed_ports)
    for event, pick in events:
        event(world, pick)
        world.check()
    for who, to in (NAMES, NAMES[::-1]):
        world.check_reach(who, to)


def linked():
    """A world in which a has dialed b and both are up."""
    world = World()
    world.nodes["a"].say("b", Channel.DATA)
    world.flush(0)
    return world


def test_each_side_keeps_what_the_other_says_of_itself():
    a, b = linked().nodes.values()
    assert (a.core.peers["b"].member, b.core.peers["a"].member) == (b.describe(), a.describe())


def test_what_waits_for_a_hello_goes_after_the_welcome():
    world = World()
    a, b = world.nodes["a"], world.nodes["b"]
    a.say("b", Channel.CONTROL)
    world.take(world.queues()[0])
    assert all(b.say("a", Channel.DATA) for _ in range(1000))
    assert not b.say("a", Channel.DATA), "no room"
    world.flush(0)
    while world.queues():
        world.flush(0)
    assert len(a.seen) == 1000, "none of them is taken for a repeat"


def test_who_is_watched_is_lost_after_the_allowed_misses(world):
    a, b = world.nodes.values()
    a.core.peers["b"].is_watched = b.core.peers["a"].is_watched = True
    for _ in range(6):
        world.advance(0.5)
        if world.now < 2.0:
            a.say("b", Channel.DATA)
            world.flush(0)
    assert [reason for _, reason in a.lost] == ["its heartbeats stopped"]
    assert not b.lost, "a was heard at 1.5, and 3.0 is not more than three beats later"


def test_of_those_that_have_dialed_the_ones_of_other_hosts_are_suspected(world):
    a, b = world.nodes.values()
    for node in (a, b):
        node.core.liveness.suspect_far(world.now)
    assert not a.core.peers["b"].pings
    assert not b.core.peers["a"].pings, "on one host"
    for node in (a, b):
        for peer in node.core.peers.values():
            peer.member = msgspec.structs.replace(peer.member, host="far")
        node.core.liveness.suspect_far(world.now)
        node.carry_out()
    assert not a.core.peers["b"].pings, "of what it has dialed itself it is told"
    assert set(b.core.peers["a"].pings) == set(Channel)
    world.flush(0)
    assert not b.core.peers["a"].pings


def test_who_overslept_forgives(world):
    a = world.nodes["a"]
    a.core.peers["b"].is_watched = True
    for seconds in (0.5, 60.0, 0.5, 0.5, 0.5):
        world.advance(seconds)
    assert not a.lost
    world.advance(0.5)
    assert [reason for _, reason in a.lost] == ["its heartbeats stopped"]


def test_who_takes_nothing_is_not_silent(world):
    a = world.nodes["a"]
    a.say("b", Channel.CONTROL)
    a.say("b", Channel.DATA)
    a.is_full = True
    a.core.liveness.suspect("b", world.now)
    a.carry_out()
    world.advance(7.0)
    assert not a.lost
    a.is_full = False
    a.core.liveness.suspect("b", world.now)
    a.carry_out()
    world.advance(2.0)
    assert [reason for _, reason in a.lost] == ["it does not answer"]


def test_who_says_anything_but_pong_is_not_silent(world):
    a, b = world.nodes.values()
    a.core.liveness.suspect("b", world.now)
    a.carry_out()
    for queue in world.queues():
        world.take(queue, "drop")
    # What answers is not the pong: the pings are lost, and b speaks of itself.
    assert b.say("a", Channel.CONTROL)
    assert b.say("a", Channel.DATA)
    world.flush(0)
    world.advance(7.0)
    assert not a.lost
    assert not a.core.peers["b"].pings
    a.core.liveness.suspect("b", world.now)
    a.carry_out()
    for queue in world.queues():
        world.take(queue, "drop")
    assert b.say("a", Channel.CONTROL)
    world.flush(0)
    world.advance(7.0)
    assert [reason for _, reason in a.lost] == ["it does not answer"], "nothing came on the data channel"


def test_who_cannot_be_reached_is_left_alone_for_a_while():
    world = World()
    a = world.nodes["a"]
    world.start("b", 2)
    for _ in range(2):
        assert a.say("b", Channel.DATA)
        world.down(a, Link(Address("b", 1), dialed=True))
        assert not a.say("b", Channel.DATA)
        world.advance(0.1)
    assert not a.lost[2:]
    world.learn()
    assert a.say("b", Channel.DATA)


def test_a_hello_of_an_older_epoch_than_the_one_known_is_told_so():
    world = World()
    old = world.nodes["b"]
    world.start("b", 2)
    world.learn()
    world.dial(old, Address("a", 1))
    world.nodes["b"].say("a", Channel.DATA)
    old.say("a", Channel.DATA)
    world.flush(0)
    assert "superseded" in world.nodes["a"].refused
    assert world.nodes["a"].core.peers["b"].address.epoch == 2


@pytest.mark.parametrize("known", [0, 1])
def test_a_successor_at_fixed_ports_is_found(known):
    world = World(has_fixed_ports=True)
    a = world.nodes["a"]
    a.view["b"] = Address("b", known)
    world.start("b", 2)
    a.say("b", Channel.DATA)
    world.flush(0)
    assert a.found == [Address("b", 2)], "once, though both channels say it"
    assert [(peer.address.epoch, reason) for peer, reason in a.lost] == [(known, "epoch 2 listens at its address")]
    assert world.nodes["b"].refused == [], "nothing that anybody could mend"
    a.say("b", Channel.DATA)
    world.flush(0)
    assert (a.address, a.num_said) in world.nodes["b"].seen, "and at once: only who is over is left alone for a while"


def test_a_predecessor_at_fixed_ports_is_not_found():
    world = World(has_fixed_ports=True)
    a = world.nodes["a"]
    a.view["b"] = Address("b", 7)
    a.say("b", Channel.DATA)
    world.flush(0)
    assert a.found == []
    assert [reason for _, reason in a.lost] == ["another actor listens at its address"]


async def test_who_counts_its_connections_from_0_begins_again_as_others_do(rig):
    for number in range(3):
        rig.sequences = [number << 32, number << 32]
        rig.hello()
    assert [peer for peer, _ in rig.actor.lost] == [PEER] * 2
    rig.system.links.lose(PEER, "it left the mesh")


def test_who_claims_anothers_name_is_refused_and_told_nothing(world):
    b = world.nodes["b"]
    thief = Link(Address("c", 1), dialed=False)
    parts = world.history[0][3]
    b.receive(thief, Channel.DATA, parts)
    assert b.refused == ["wrong_sender"]
    assert "c" not in b.core.peers
    assert not world.queues()
