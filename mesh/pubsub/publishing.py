"""Topics of one actor: those that it publishes, and those of other actors that it follows.

    subscriber ──subscribe(epoch, next)──> publisher ──Subscribed(next, reset), then publications from next on──>

Everything goes on the data channel, so a confirmation and the publications after it stay in order. A subscriber that
sees a gap, or nothing for a while, subscribes again from its current position; that also repairs a lost request and
reveals a publisher that has forgotten it. Owned by `ActorSystem`; the numbering is `mesh/pubsub/topics.py`.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from mesh.address import Address
from mesh.calls.tells import Tells
from mesh.errors import CallError, FrameRefused
from mesh.handlers import Handlers
from mesh.link.links import Links
from mesh.link.peer import SYSTEM, Peer
from mesh.options import SystemOptions
from mesh.pubsub.topics import NEVER, Arrival, Subscription, TopicLog
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import AnyMessage
from mesh.wire.frames import SYSTEM_CODEC, Publication, Subscribe, Subscribed, Unsubscribe
from mesh.wire.header import Header, Verb

MAX_TOPICS: Final = 256
"""The mesh's own actors have two; the limit is for peers that name ever new ones."""
_REPLAY_BYTES: Final = 8 << 20
"""Kept of one topic for subscribers that missed some: cache events of some ten thousand pages."""


class Publishing:
    """Both sides of topics. A publisher that does not confirm a subscription is suspected."""

    def __init__(
        self, links: Links, tells: Tells, actor: Handlers, tasks: TaskSupervisor, options: SystemOptions
    ) -> None:
        self._links = links
        links.metrics.begin("mesh_subscriber_resets_total", "mesh_publication_gaps_total")
        self._tells = tells
        self._codec = actor.codec
        self._actor = actor
        self._tasks = tasks
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._logs: dict[str, TopicLog[bytes]] = {}
        self._subscribers: dict[str, dict[Address, None]] = {}
        self._followed: dict[tuple[str, str], Subscription] = {}
        self._timer: asyncio.TimerHandle | None = None
        links.handlers[Verb.SUBSCRIBE] = self._on_subscribe
        links.handlers[Verb.PUBLISH] = self._on_publish
        tells.of_system[Unsubscribe] = self._on_unsubscribe

    # Publisher

    def publish(self, topic: str, message: AnyMessage) -> int:
        """Send, and keep for replay; returns the number, from 1. Raises ValueError for a topic beyond `MAX_TOPICS`."""
        log = self._logs.get(topic)
        if log is None:
            if len(self._logs) >= MAX_TOPICS:
                raise ValueError(f"no room for {topic!r}: {MAX_TOPICS} topics are the maximum")
            log = self._logs[topic] = self._empty_log()
        # Encoded once, for all subscribers and for replay.
        payload = self._codec.encode(message)
        sequence = log.append(payload)
        subscribers = self._subscribers.get(topic)
        if subscribers:
            body = _publication(topic, sequence, payload)
            for address in subscribers:
                self._send(address, body)
        return sequence

    def _on_unsubscribe(self, sender: Address, message: Unsubscribe) -> bool:
        self._drop(message.topic, sender)
        return True

    def lose(self, peer: Peer) -> None:
        for topic in list(self._subscribers):
            self._drop(topic, peer.address)
        for (actor_id, _), followed in self._followed.items():
            if actor_id == peer.address.actor_id:
                followed.waiting = True
                # So that the next link with it subscribes again, or the next renewal round, at most 2 s later.
                followed.last_heard = NEVER

    def _on_subscribe(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        if not isinstance(body, Subscribe) or channel != Channel.DATA:
            raise FrameRefused("bad_body", "a subscribe body on the data channel was expected")
        log = self._logs.get(body.topic)
        # Topics that only subscribers have named do not count against those published here, and vanish with their
        # subscribers: otherwise they could keep this actor from publishing, which ends an actor.
        is_more = log is None and body.topic not in self._subscribers
        if is_more and len(self._subscribers) >= MAX_TOPICS:
            raise FrameRefused("too_many_topics", f"{MAX_TOPICS} topics already have subscribers here")
        log = log or self._empty_log()
        replay = log.replay(body.next_sequence if body.publisher_epoch == self._links.address.epoch else 1)
        confirmation = Subscribed(topic=body.topic, next_sequence=replay.first, reset=replay.reset)
        self._send(peer.address, SYSTEM_CODEC.encode(confirmation))
        for offset, payload in enumerate(replay.payloads):
            self._send(peer.address, _publication(body.topic, replay.first + offset, payload))
        self._subscribers.setdefault(body.topic, {})[peer.address] = None
        if replay.reset:
            self._links.metrics.count("mesh_subscriber_resets_total")
            self._tasks.call("on_subscriber_reset", self._actor.on_subscriber_reset, peer.address, body.topic)

    def _empty_log(self) -> TopicLog[bytes]:
        return TopicLog(self._options.replay_capacity, _REPLAY_BYTES)

    def _drop(self, topic: str, address: Address) -> None:
        subscribers = self._subscribers.get(topic, {})
        subscribers.pop(address, None)
        if not subscribers:
            self._subscribers.pop(topic, None)

    def _send(self, address: Address, body: bytes) -> None:
        peer = self._links.get(address.actor_id)
        if peer is not None and peer.address == address:
            self._links.send(peer, Channel.DATA, Verb.PUBLISH, body, (), SYSTEM)

    # Subscriber

    def subscribe(self, actor_id: str, topic: str) -> None:
        """Follow a topic, now or as soon as the peer is a member, across all its restarts."""
        if (actor_id, topic) not in self._followed:
            self._followed[actor_id, topic] = Subscription()
            self._request(actor_id, topic)
            if self._timer is None:
                self._timer = self._loop.call_later(self._options.renew_subscription_s, self._renew)

    def unsubscribe(self, actor_id: str, topic: str) -> None:
        if self._followed.pop((actor_id, topic), None) is not None:
            self._tells.tell(actor_id, Unsubscribe(topic=topic))

    def appeared(self, actor_id: str) -> None:
        for followed_id, topic in list(self._followed):
            if followed_id == actor_id:
                self._request(actor_id, topic)

    def linked(self, peer: Address) -> None:
        """A link with an actor is up (again): request the subscriptions not requested since it was lost."""
        for (followed_id, topic), followed in list(self._followed.items()):
            # A subscription that dialed this link has been requested already: its request followed the hello.
            if followed_id == peer.actor_id and followed.last_heard == NEVER:
                self._request(followed_id, topic)

    def close(self) -> None:
        self._followed.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _renew(self) -> None:
        self._timer = None
        quiet_since = self._loop.time() - self._options.renew_subscription_s
        for (actor_id, topic), followed in list(self._followed.items()):
            # A quiet topic looks like a publisher that has forgotten its subscriber, so subscribe again now and then.
            if followed.last_heard <= quiet_since:
                if followed.waiting:
                    self._links.suspect(actor_id)
                self._request(actor_id, topic)
        if self._followed:
            self._timer = self._loop.call_later(self._options.renew_subscription_s, self._renew)

    def _request(self, actor_id: str, topic: str) -> None:
        followed = self._followed[actor_id, topic]
        try:
            peer = self._links.reach(actor_id)
        except CallError:
            return  # requested again when it appears, or by the timer
        followed.last_heard = self._loop.time()
        epoch, next_sequence = followed.request(peer.address.epoch)
        body = Subscribe(topic=topic, publisher_epoch=epoch, next_sequence=next_sequence)
        self._links.send(peer, Channel.DATA, Verb.SUBSCRIBE, SYSTEM_CODEC.encode(body), (), SYSTEM)

    def _on_publish(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        if not isinstance(body, Publication | Subscribed):
            raise FrameRefused("bad_body", "a publish body was expected")
        address = peer.address
        followed = self._followed.get((address.actor_id, body.topic))
        if followed is None:
            return
        followed.last_heard = self._loop.time()
        if isinstance(body, Subscribed):
            if followed.confirmed(address.epoch, body.next_sequence, body.reset):
                self._tasks.call("on_subscription_reset", self._actor.on_subscription_reset, address, body.topic)
            return
        arrival = followed.arrived(address.epoch, body.sequence)
        if arrival is Arrival.NEXT:
            message = self._codec.decode(bytes(body.payload))
            publication = (address, body.topic, body.sequence, message)
            self._tasks.call("on_publication", self._actor.on_publication, *publication)
        elif arrival is Arrival.GAP:
            self._links.metrics.count("mesh_publication_gaps_total")
            self._request(address.actor_id, body.topic)


def _publication(topic: str, sequence: int, payload: bytes) -> bytes:
    return SYSTEM_CODEC.encode(Publication(topic=topic, sequence=sequence, payload=msgspec.Raw(payload)))
