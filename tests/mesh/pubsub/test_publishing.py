from mesh.pubsub.publishing import MAX_TOPICS
from mesh.transport.base import Channel
from mesh.wire.frames import Hello, Publication, Subscribe, Subscribed, Unsubscribe
from mesh.wire.header import Verb
from tests.mesh.mesh_under_test import Say
from tests.mesh.rig import FROM_PEER, PEER, TO_PEER

HI = Say(text="hi")


def asked(rig):
    """The links on which the system has asked for the topic."""
    return [link for link, _, _, body in rig.wire.sent if isinstance(body, Subscribe)]


async def test_a_publisher_that_links_again_is_asked_at_once(rig):
    rig.system.publishing.subscribe("peer", "load")
    assert asked(rig) == []
    rig.hello()
    assert asked(rig) == [FROM_PEER]
    rig.system.links.lose(PEER, "silent")
    rig.hello(sequence=2 << 32 | 1)
    assert asked(rig) == [FROM_PEER] * 2


async def test_a_publisher_that_was_dialed_for_something_else_is_asked_when_it_welcomes(rig):
    rig.system.publishing.subscribe("peer", "load")
    rig.member()
    rig.system.links.reach("peer")
    assert asked(rig) == []
    rig.welcome()
    assert asked(rig) == [TO_PEER]


async def test_a_subscription_that_dials_asks_once(rig):
    rig.member()
    rig.system.publishing.subscribe("peer", "load")
    rig.welcome()
    greetings = [body for _, _, _, body in rig.wire.sent if isinstance(body, Hello)]
    assert (len(greetings), asked(rig)) == (2, [TO_PEER])


def follow(rig, topic):
    rig.say(Verb.SUBSCRIBE, Subscribe(topic=topic, publisher_epoch=0, next_sequence=1), channel=Channel.DATA)


def answered(rig, kind):
    """The topics of what was sent of one kind, in order."""
    return [body.topic for _, _, _, body in rig.wire.sent if isinstance(body, kind)]


async def test_a_peer_that_names_all_topics_there_may_be_takes_none_from_the_publisher(rig):
    rig.hello()
    for number in range(MAX_TOPICS + 5):
        follow(rig, f"invented-{number}")
    assert (len(answered(rig, Subscribed)), rig.refused("too_many_topics")) == (MAX_TOPICS, 5)
    assert rig.actor.ctx.publish("load", HI) == 1
    follow(rig, "load")
    assert answered(rig, Publication) == ["load"], "what is published can be followed all the same"


async def test_topics_that_nobody_follows_any_more_leave_their_room_to_others(rig):
    rig.hello()
    for number in range(MAX_TOPICS):
        follow(rig, f"invented-{number}")
    rig.say(Verb.TELL, Unsubscribe(topic="invented-0"))
    follow(rig, "one")
    follow(rig, "two")
    assert rig.refused("too_many_topics") == 1
    rig.system.links.lose(PEER, "silent")
    rig.hello(sequence=2 << 32 | 1)
    rig.sequences[Channel.DATA] = 2 << 32 | 1
    follow(rig, "three")
    assert rig.refused("too_many_topics") == 1
    assert answered(rig, Subscribed)[-2:] == ["one", "three"]
