"""What follows when members come, drain, leave or die: for the links with them, their topics, and the actor.

Owned by `ActorSystem`.
"""

from collections.abc import Collection, Sequence
from typing import Final

from mesh.address import Address
from mesh.handlers import Handlers
from mesh.link.links import Links
from mesh.link.peer import SYSTEM, Peer
from mesh.membership.incarnation import Incarnation
from mesh.membership.view import MemberChange
from mesh.pubsub.publishing import Publishing
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.transport.base import Buffer, Channel
from mesh.wire.frames import SYSTEM_CODEC, Draining, PeerDown
from mesh.wire.header import Header, Verb

BYE_GRACE_S: Final = 1.0
"""Its last messages and its bye take milliseconds. If the bye is lost, callers wait so long for a peer that is gone."""


class Changes:
    """What one incarnation does about changes of its view."""

    def __init__(
        self, me: Incarnation, links: Links, publishing: Publishing, actor: Handlers, tasks: TaskSupervisor
    ) -> None:
        self._me = me
        self._links = links
        self._publishing = publishing
        self._actor = actor
        self._tasks = tasks
        links.handlers[Verb.DRAINING] = self._on_draining

    def members_changed(self, change: MemberChange, leaving: Collection[Address] = ()) -> None:
        """The view has changed: end links with members that left, subscribe to topics of members that joined.

        An empty change does nothing. Members in `leaving` left in an orderly way; the registry's notice may overtake
        their last messages, so their bye is awaited for a while.
        """
        if not change:
            return
        for member in change.left:
            if member.address in leaving:
                self._tasks.later(BYE_GRACE_S, self._links.lose, member.address, "it left the mesh")
            else:
                self._links.lose(member.address, "it left the mesh")
        self._tasks.call("on_members", self._actor.on_members, change.joined, change.left, change.changed)
        for member in change.joined:
            self._publishing.appeared(member.actor_id)

    def bury(self, dead: Address, reason: str) -> None:
        """An incarnation is dead: drop its membership and its links at once, before the registry says so."""
        self._links.lose(dead, reason)
        self.members_changed(self._me.view.forget(dead))

    def peer_down(self, sender: Address, down: PeerDown) -> bool:
        peer = self._links.get(sender.actor_id)
        if peer is None or not self._me.credentials.believe(sender, is_proved=peer.is_proved):
            return False
        self.bury(Address(down.actor_id, down.epoch), down.reason or "its supervisor reported it dead")
        self._tasks.call("on_peer_down", self._actor.on_peer_down, sender, down)
        return True

    def say_draining(self) -> None:
        """Tell all peers that this actor takes no new work: they hear it sooner than from the registry."""
        body = SYSTEM_CODEC.encode(Draining())
        for peer in self._links.peers():
            self._links.send(peer, Channel.CONTROL, Verb.DRAINING, body, (), SYSTEM)

    def _on_draining(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        self.members_changed(self._me.view.mark_draining(peer.address))
