"""One system whose only peer is the test: every frame in and out is a test's own."""

from dataclasses import replace

import msgspec

from mesh.address import Address, Endpoint
from mesh.membership.view import Member, StaticBootstrap
from mesh.system import ActorSystem
from mesh.transport.base import Channel, Link
from mesh.wire.frames import SYSTEM_CODEC, ErrorBody, Hello, Welcome
from mesh.wire.header import PROTOCOL_VERSION, SYSTEM_FLAG, Header, Verb, encode_header
from tests.mesh.mesh_under_test import CODEC, QUICK, Recorder

ME, PEER = Address("me", 5), Address("peer", 2)
WHO = Member(actor_id="peer", role="r", epoch=2, endpoint=Endpoint("", ""))
FROM_PEER = Link(PEER, dialed=False)
TO_PEER = Link(PEER, dialed=True)
NOWHERE = StaticBootstrap(Address("registry", 1), Endpoint("", ""))


class Wiretap:
    """A transport that writes down what is sent, and lets everything in."""

    def __init__(self):
        self.sent = []
        self.dialed = []
        self.closed = []
        self.full = False

    async def start(self, address, listener):
        self.listener = listener
        return Endpoint("c", "d")

    def dial(self, peer, endpoint):
        self.dialed.append(peer)
        return Link(peer, dialed=True)

    def send(self, link, channel, parts):
        if self.full:
            return False
        header = msgspec.msgpack.decode(parts[0], type=Header)
        body = (SYSTEM_CODEC if header.flags & SYSTEM_FLAG else CODEC).decode(parts[1])
        self.sent.append((link, channel, header, body))
        return True

    def close_link(self, link):
        self.closed.append(link)

    async def stop(self):
        pass


class Rig:
    """One system and the peer that the test plays."""

    def __init__(self):
        self.wire = Wiretap()
        self.actor = Recorder()
        self.system = ActorSystem(self.actor, ME, self.wire, NOWHERE, replace(QUICK, hello_timeout_s=0.2, max_peers=64))
        self.sequences = [1 << 32, 1 << 32]

    def say(self, verb, body=b"", *, link=FROM_PEER, channel=Channel.CONTROL, buffers=(), **fields):
        self.sequences[channel] += 1
        values = {
            "version": PROTOCOL_VERSION, "verb": int(verb), "message_id": 7,
            "sequence": self.sequences[channel], "correlation_id": 0,
            "sender": link.peer.actor_id, "sender_epoch": link.peer.epoch, "receiver_epoch": ME.epoch,
        } | fields  # fmt: skip
        if not isinstance(body, bytes):
            values.setdefault("flags", SYSTEM_FLAG if type(body) in SYSTEM_CODEC.types else 0)
            body = CODEC.encode(body)
        self.wire.listener.on_frames(link, channel, (encode_header(Header(**values)), body, *buffers))

    def welcome(self, *channels, link=TO_PEER, version=PROTOCOL_VERSION, **fields):
        """What the peer answers to a hello, on both channels unless one is named."""
        for channel in channels or Channel:
            self.say(Verb.WELCOME, Welcome(version=version, member=WHO), link=link, channel=channel, **fields)

    def hello(self, link=FROM_PEER, channels=Channel, **fields):
        member = msgspec.structs.replace(WHO, actor_id=link.peer.actor_id, epoch=link.peer.epoch)
        versions = dict.fromkeys(("min_version", "max_version"), PROTOCOL_VERSION) | {
            k: fields.pop(k) for k in list(fields) if "_version" in k
        }
        for channel in channels:
            self.say(Verb.HELLO, Hello(member=member, **versions), link=link, channel=channel, **fields)

    def refused(self, code):
        return self.system.metrics.value("mesh_frames_refused_total", code=code)

    def errors(self):
        return [body.code for _, _, _, body in self.wire.sent if isinstance(body, ErrorBody)]

    def member(self):
        """The peer is a member, so that it can be dialed."""
        self.system.registration.view.reset(1, 1, [WHO])
