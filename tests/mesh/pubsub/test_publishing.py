from mesh.transport.base import Channel
from mesh.wire.frames import Hello, Subscribe, Welcome
from mesh.wire.header import PROTOCOL_VERSION, Verb
from tests.mesh.rig import FROM_PEER, PEER, TO_PEER


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
    member = rig.member()
    rig.system.links.reach("peer")
    assert asked(rig) == []
    for channel in Channel:
        rig.say(Verb.WELCOME, Welcome(version=PROTOCOL_VERSION, member=member), link=TO_PEER, channel=channel)
    assert asked(rig) == [TO_PEER]


async def test_a_subscription_that_dials_asks_once(rig):
    member = rig.member()
    rig.system.publishing.subscribe("peer", "load")
    for channel in Channel:
        rig.say(Verb.WELCOME, Welcome(version=PROTOCOL_VERSION, member=member), link=TO_PEER, channel=channel)
    greetings = [body for _, _, _, body in rig.wire.sent if isinstance(body, Hello)]
    assert (len(greetings), asked(rig)) == (2, [TO_PEER])
