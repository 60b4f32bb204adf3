"""Messages that need no answer, sent and received by one actor. Owned by `ActorSystem`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from mesh.address import Address
from mesh.errors import CallError, FrameRefused, TooLarge, Unreachable
from mesh.handlers import Handlers
from mesh.link.links import Links
from mesh.link.peer import PLAIN, SYSTEM, Peer
from mesh.membership.permissions import Permissions
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import AnyMessage, BodyCodec
from mesh.wire.frames import SYSTEM_CODEC
from mesh.wire.header import SYSTEM_FLAG, Header, Verb

_TELL: Final = Verb.TELL

SystemTell = Callable[[Address, Any], bool]
"""Takes the sender and the body of one of the mesh's own frames; False if this sender may not send it."""


class Tells:
    """The tells of one actor, in both directions. `of_system` has the handlers for the mesh's own frames, by class."""

    def __init__(
        self, links: Links, bodies: BodyCodec, actor: Handlers, tasks: TaskSupervisor, permissions: Permissions | None
    ) -> None:
        self.of_system: dict[type, SystemTell] = {}
        self._links = links
        links.metrics.begin("mesh_tells_dropped_total", code=(TooLarge.code, Unreachable.code))
        self._bodies = bodies
        self._decode = actor.codec.decode
        self._actor = actor
        self._permissions = permissions
        self._tasks = tasks
        links.handlers[_TELL] = self._on_tell

    def tell(
        self, actor_id: str, message: AnyMessage, buffers: Sequence[Buffer] = (), *, channel: Channel = Channel.DATA
    ) -> bool:
        """Send and forget; FIFO per receiver and channel. False, and counted, if too large, unreachable or full."""
        try:
            body, flags = self._bodies.encode(message, buffers)
            peer = self._links.reach(actor_id)
        except CallError as error:
            self._links.metrics.count("mesh_tells_dropped_total", code=error.code)
            return False
        return self._links.send(peer, channel, _TELL, body, buffers, SYSTEM if flags else PLAIN)

    def tell_all(self, actor_ids: Iterable[str], message: AnyMessage, *, channel: Channel = Channel.DATA) -> None:
        """`tell` each of them; the message is encoded once."""
        count = self._links.metrics.count
        try:
            body, flags = self._bodies.encode(message)
        except CallError as error:
            count("mesh_tells_dropped_total", code=error.code)
            return
        for actor_id in actor_ids:
            try:
                peer = self._links.reach(actor_id)
            except CallError as error:
                count("mesh_tells_dropped_total", code=error.code)
                continue
            self._links.send(peer, channel, _TELL, body, (), SYSTEM if flags else PLAIN)

    def _on_tell(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        if header.flags & SYSTEM_FLAG:
            self._on_system_tell(peer.address, SYSTEM_CODEC.decode(parts[1]))
            return
        message: object = self._decode(parts[1])
        if self._permissions is not None:
            self._permissions.check(type(message), peer.address, peer.member)
        try:
            self._actor.on_tell(peer.address, message, parts[2:])
        except Exception as error:  # noqa: BLE001
            # One bad message must not end the actor, nor the link that it came by.
            self._tasks.failed(f"on_tell({type(message).__name__})", error, message)

    def _on_system_tell(self, sender: Address, message: object) -> None:
        kind = type(message)
        take = self.of_system.get(kind)
        if take is None or not take(sender, message):
            raise FrameRefused("unexpected", f"{sender} may not send {kind.__name__}")
