"""Frames that are no frames, or not for here: refused, counted, logged once; nobody crashes, nothing is held."""

import pytest
from structlog.testing import capture_logs

from mesh.address import Address
from mesh.errors import DeadlineExceeded
from mesh.transport.base import Channel, Link
from mesh.wire.frames import Bye, ErrorBody, Ping, Renew, Subscribe, Welcome
from mesh.wire.header import PROTOCOL_VERSION, Verb
from tests.mesh.mesh_under_test import Say, until
from tests.mesh.rig import FROM_PEER, PEER, TO_PEER


async def test_a_hello_is_welcomed_on_both_channels(met):
    assert [(channel, type(body)) for _, channel, _, body in met.wire.sent] == [
        (channel, Welcome) for channel in Channel
    ]
    met.say(Verb.TELL, Say(text="hi"))
    assert met.actor.told[0][:2] == (PEER, Say(text="hi"))


async def test_garbage_is_refused_counted_and_logged_once_per_peer(met):
    met.wire.sent.clear()
    with capture_logs() as logs:
        for garbage in ((), (b"",), (b"\xff", b""), (b"x" * 5000, b""), tuple(b"" for _ in range(100))):
            # Nobody can tell whether it is an answer, which is never answered.
            for link in (FROM_PEER, Link(Address("", 0), dialed=False)):
                for _ in range(3):
                    met.wire.listener.on_frames(link, Channel.DATA, garbage)
    assert met.refused("bad_header") == 30
    assert len(logs) == 2
    assert met.wire.sent == []
    met.say(Verb.TELL, Say(text="hi"))
    assert met.actor.told


async def test_a_message_with_too_many_parts_or_too_long_a_header_is_answered_with_its_number(met):
    """A call that is refused so fails at once, and not at its deadline."""

    met.wire.sent.clear()
    met.say(Verb.ASK, Say(text="hi"), buffers=[b""] * 100, message_id=31)
    met.say(Verb.ASK, Say(text="hi"), trace="t" * 5000, message_id=32)
    errors = [(header.verb, header.correlation_id, body.code) for _, _, header, body in met.wire.sent]
    assert errors == [(Verb.ERROR, 31, "too_many_parts"), (Verb.ERROR, 32, "too_large")]
    met.wire.sent.clear()
    met.say(Verb.ERROR, b"", buffers=[b""] * 100, flags=1)
    assert met.wire.sent == []
    assert met.actor.told == []


async def test_a_renewal_without_a_link_is_answered_although_its_sender_is_no_member(rig):
    """As at the registry, when the lease has run out meanwhile: who renews it begins again at once."""

    rig.say(Verb.TELL, Say(text="hi"))
    assert rig.wire.sent == [], "a stranger is told nothing"
    rig.say(Verb.HEARTBEAT, Renew(state="ready"))
    ((link, _, header, body),) = rig.wire.sent
    assert (link, header.verb, header.sequence, body.code) == (FROM_PEER, Verb.ERROR, 0, "no_hello")


async def test_a_known_peer_is_told_why(met):
    met.say(Verb.ASK, b"\xff\xff")
    met.say(Verb.TELL, b"")
    met.say(99, b"")
    met.say(Verb.TELL, Say(text="hi"), buffers=[memoryview(bytes(65 << 20))])
    met.say(Verb.TELL, Say(text="hi"), receiver_epoch=4)
    met.say(Verb.TELL, Say(text="hi"), version=PROTOCOL_VERSION + 1)
    codes = ["bad_body", "bad_body", "unknown_verb", "too_large", "wrong_epoch"]
    assert met.errors() == codes
    assert [met.refused(code) for code in set(codes)]
    assert met.refused("wrong_version") == 1
    assert met.actor.told == []
    # Errors and answers are never answered, so two peers cannot keep each other busy.
    met.wire.sent.clear()
    for verb in (Verb.ERROR, Verb.REPLY, Verb.CANCEL):
        met.say(verb, b"\xff", correlation_id=5, flags=1)
    assert met.wire.sent == []


async def test_bodies_of_the_wrong_verb_are_refused(met):
    for verb in (Verb.HELLO, Verb.WELCOME, Verb.ERROR, Verb.HEARTBEAT, Verb.SUBSCRIBE, Verb.PUBLISH):
        before = met.refused("bad_body")
        met.say(verb, Bye())
        assert met.refused("bad_body") == before + 1, verb
    met.say(Verb.SUBSCRIBE, Subscribe(topic="t", publisher_epoch=0), channel=Channel.CONTROL)
    met.say(Verb.TELL, Ping())
    assert met.refused("unexpected") == 1
    met.say(Verb.CANCEL, Bye(), correlation_id=99)
    assert met.system.links.get("peer")


async def test_nobody_speaks_before_hello_or_for_others(rig):
    rig.say(Verb.TELL, Say(text="hi"))
    assert rig.refused("no_hello") == 1
    assert rig.wire.closed == [FROM_PEER]
    assert rig.wire.sent == []
    rig.say(Verb.BYE, Bye())
    assert rig.refused("no_hello") == 1
    rig.hello(sender="somebody")
    assert rig.refused("wrong_sender") == 2
    rig.hello(Link(Address("", 0), dialed=False))
    rig.hello(Link(Address("me", 6), dialed=False))
    assert rig.refused("wrong_epoch") == 4
    rig.hello(min_version=PROTOCOL_VERSION + 1, max_version=PROTOCOL_VERSION + 2)
    assert rig.refused("wrong_version") == 2
    rig.say(Verb.HELLO, Ping())
    assert rig.refused("bad_body") == 1
    assert rig.system.links.peers() == []


async def test_what_comes_after_the_end_of_its_link_is_refused_without_a_warning(met):
    met.wire.listener.on_link_down(FROM_PEER, "gone")
    with capture_logs() as logs:
        met.say(Verb.TELL, Say(text="late"))
        met.say(Verb.TELL, Say(text="late"), channel=Channel.CONTROL)
    assert [entry["log_level"] for entry in logs if entry["log_level"] != "debug"] == []
    assert met.refused("no_hello") == 2
    assert met.actor.told == []


async def test_a_member_without_hello_is_told_to_begin_again(rig):
    rig.member()
    rig.say(Verb.TELL, Say(text="hi"))
    ((link, _, header, body),) = rig.wire.sent
    assert (link, header.sequence, body.code) == (FROM_PEER, 0, "no_hello")
    # And who is told so itself forgets the link, and dials anew.
    assert rig.system.actor.ctx.tell("peer", Say(text="x"))
    rig.welcome()
    rig.say(Verb.ERROR, ErrorBody(code="no_hello", message="who?"), link=TO_PEER, sequence=0)
    assert rig.actor.lost == [(PEER, "the peer refuses the link (no_hello: who?)")]
    assert rig.system.actor.ctx.tell("peer", Say(text="x"))
    assert rig.wire.dialed == [PEER, PEER]


async def test_a_dial_that_fails_is_not_repeated_at_once(rig):
    rig.member()
    for _ in range(3):
        rig.system.actor.ctx.tell("peer", Say(text="x"))
        rig.wire.listener.on_link_down(TO_PEER, "could not connect")
    assert len(rig.wire.dialed) == 1
    assert rig.system.metrics.value("mesh_tells_dropped_total", code="unreachable") == 2
    await until(lambda: rig.system.actor.ctx.tell("peer", Say(text="x")))
    assert len(rig.wire.dialed) == 2


async def test_no_welcome_in_time_is_a_lost_peer(rig):
    rig.member()
    rig.system.actor.ctx.tell("peer", Say(text="x"))
    await until(lambda: rig.actor.lost)
    assert rig.actor.lost == [(PEER, "no welcome in answer to hello")]
    assert rig.wire.closed == [TO_PEER]


async def test_somebody_else_at_the_address_is_a_lost_peer(rig):
    rig.member()
    rig.system.actor.ctx.tell("peer", Say(text="x"))
    rig.welcome(Channel.CONTROL, sender_epoch=3)
    await until(lambda: rig.actor.lost)
    assert [peer for peer, _ in rig.actor.lost] == [PEER]


async def test_welcomes_have_to_fit(rig):
    rig.hello()
    rig.welcome(Channel.CONTROL, link=FROM_PEER)
    rig.member()
    rig.say(Verb.BYE, Bye())
    rig.say(Verb.BYE, Bye(), channel=Channel.DATA)
    assert rig.actor.lost == [(PEER, "it said bye")]
    rig.system.actor.ctx.tell("peer", Say(text="x"))
    rig.welcome(Channel.CONTROL, version=9)
    rig.hello(TO_PEER, [Channel.CONTROL])
    assert rig.refused("wrong_version") == 1
    assert rig.refused("unexpected") == 2


async def test_repeats_are_dropped_and_gaps_counted(met):
    first = met.sequences[Channel.CONTROL] + 1
    met.say(Verb.TELL, Say(text="1"))
    met.say(Verb.TELL, Say(text="1"), sequence=first)
    met.say(Verb.TELL, Say(text="5"), sequence=first + 4)
    met.say(Verb.TELL, Say(text="late"), sequence=first + 2)
    assert [message.text for _, message, _ in met.actor.told] == ["1", "5"]
    assert met.system.metrics.value("mesh_frames_repeated_total") == 2
    assert met.system.metrics.value("mesh_frames_missing_total") == 3


async def test_a_peer_that_dials_again_has_begun_again(met):
    met.say(Verb.TELL, Say(text="1"))
    met.sequences = [2 << 32, 2 << 32]
    met.say(Verb.TELL, Say(text="without hello"))
    assert met.refused("no_hello") == 1
    met.sequences = [2 << 32, 2 << 32]
    met.hello()
    met.say(Verb.TELL, Say(text="2"))
    met.say(Verb.TELL, Say(text="late"), sequence=(1 << 32) + 9)
    assert met.actor.lost == [(PEER, "it restarted the connection")]
    assert met.wire.closed == []
    assert [message.text for _, message, _ in met.actor.told] == ["1", "2"]
    assert met.system.metrics.value("mesh_frames_repeated_total") == 1


async def test_a_hello_after_the_welcome_means_the_welcome_is_forgotten(rig):
    rig.member()
    rig.actor.ctx.tell("peer", Say(text="x"))
    rig.welcome()
    # A hello that was on its way before the welcome has a lower number, and means nothing.
    rig.sequences = [0 << 32, 0 << 32]
    rig.hello()
    assert rig.actor.lost == []
    rig.sequences = [5 << 32, 5 << 32]
    rig.hello()
    assert [peer for peer, _ in rig.actor.lost] == [PEER]
    assert rig.wire.closed == [TO_PEER]
    assert not rig.system.links.get("peer").route.link.dialed


async def test_welcomes_of_two_times_are_none(rig):
    rig.member()
    rig.actor.ctx.tell("peer", Say(text="x"))
    rig.welcome(Channel.CONTROL)
    rig.sequences[Channel.DATA] = 2 << 32
    rig.welcome(Channel.DATA)
    assert [peer for peer, _ in rig.actor.lost] == [PEER]


async def test_a_silent_peer_is_lost_after_an_ask_ran_out(met):
    with pytest.raises(DeadlineExceeded):
        await met.actor.ctx.ask("peer", Say(text="x"), timeout_s=0.01)
    await until(lambda: sum(isinstance(body, Ping) for *_, body in met.wire.sent) == 2)
    await until(lambda: met.actor.lost)
    assert met.actor.lost == [(PEER, "it does not answer")]
    assert met.system.metrics.value("mesh_silent_peers_total") == 1
    met.system.links.suspect(PEER.actor_id)


async def test_a_peer_that_says_anything_is_not_silent(met):
    met.system.links.suspect(PEER.actor_id)
    met.system.links.suspect(PEER.actor_id)
    await until(lambda: sum(isinstance(body, Ping) for *_, body in met.wire.sent) == 2)
    number = met.wire.sent[-2][2].message_id
    met.say(Verb.ERROR, ErrorBody(code="not_served", message=""), correlation_id=number)
    met.say(Verb.TELL, Say(text="busy"), channel=Channel.DATA)
    await until(lambda: len(met.system.asking) == 0)
    assert met.actor.lost == []


async def test_a_new_epoch_ends_the_old_and_is_not_followed_by_it(met):
    newer = Link(Address("peer", 3), dialed=False)
    met.hello(newer)
    assert met.actor.lost == [(PEER, "replaced by epoch 3")]
    met.say(Verb.TELL, Say(text="late"))
    assert met.refused("no_hello") == 1
    met.wire.sent.clear()
    met.hello()
    # It is told on both channels, so that it may end.
    assert met.refused("superseded") == 2
    told = [(link, header.sequence, body.code, body.known_epoch) for link, _, header, body in met.wire.sent]
    assert told == [(FROM_PEER, 0, "superseded", 3)] * 2
    assert met.actor.told == []
    assert met.system.links.get("peer").address.epoch == 3


async def test_the_hello_of_a_connection_that_was_overtaken_is_refused(rig):
    newer, older = (Link(PEER, dialed=False, nonce=nonce) for nonce in ("newer", "older"))
    rig.sequences = [2 << 32, 2 << 32]
    rig.hello(newer)
    rig.sequences = [1 << 32, 1 << 32]
    rig.hello(older)
    assert rig.refused("no_hello") == 2
    assert rig.wire.closed == [older, older]
    assert rig.actor.lost == []
    rig.sequences = [2 << 32 | 1, 2 << 32 | 1]
    rig.say(Verb.TELL, Say(text="hi"), link=newer)
    assert len(rig.actor.told) == 1


async def test_a_successor_where_nobody_is_dialed_any_more_is_no_news(met):
    told = ErrorBody(code="wrong_epoch", message="", known_epoch=3)
    met.wire.sent.clear()
    met.say(Verb.ERROR, told, link=TO_PEER, sender_epoch=3)
    assert (met.wire.sent, met.wire.closed, met.actor.lost) == ([], [], [])
    assert met.refused("wrong_sender") == 0


async def test_any_other_peers_word_that_there_is_a_later_one_only_ends_the_link(rig):
    rig.member()
    assert rig.actor.ctx.tell("peer", Say(text="x"))
    rig.say(Verb.ERROR, ErrorBody(code="superseded", message="epoch 9"), link=TO_PEER, sequence=0)
    assert rig.actor.lost == [(PEER, "the peer refuses the link (superseded: epoch 9)")]
    assert rig.system.over is None


async def test_an_accepted_channel_waits_for_its_hello(rig):
    rig.hello(channels=[Channel.CONTROL])
    rig.wire.sent.clear()
    for number in range(1100):
        sent = rig.system.actor.ctx.tell("peer", Say(text=str(number)))
        assert sent == (number < 1000)
    assert rig.wire.sent == []
    rig.hello(channels=[Channel.DATA])
    bodies = [body for _, _, _, body in rig.wire.sent]
    assert isinstance(bodies[0], Welcome)
    assert [body.text for body in bodies[1:]] == [str(number) for number in range(1000)]


async def test_a_full_way_is_said_and_leaves_no_gap(met):
    met.wire.full = True
    assert not met.system.actor.ctx.tell("peer", Say(text="x"))
    met.wire.full = False
    met.wire.sent.clear()
    assert met.system.actor.ctx.tell("peer", Say(text="y"))
    assert met.system.actor.ctx.tell("peer", Say(text="z"))
    first, second = (header.sequence for _, _, header, _ in met.wire.sent)
    assert second == first + 1
    assert met.system.metrics.value("mesh_outbox_full_total") == 1


async def test_the_number_of_peers_is_bounded(rig):
    for number in range(64):
        rig.hello(Link(Address(f"p{number}", 1), dialed=False))
    rig.hello()
    assert rig.refused("too_many_peers") == 2
    rig.member()
    assert not rig.system.actor.ctx.tell("peer", Say(text="x"))
