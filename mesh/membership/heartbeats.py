"""Heartbeats in a star, only between an actor and its hubs: its supervisor and the registry. Owned by `ActorSystem`.

Every interval an actor sends a heartbeat to each of its hubs; a hub answers each with one of its own. Both sides expect
the next: a peer is watched from its first heartbeat on, a hub from the first one sent to it, until it is lost.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from mesh.errors import CallError, FrameRefused
from mesh.handlers import Handlers
from mesh.link.links import Links
from mesh.link.peer import SYSTEM, Peer
from mesh.membership.incarnation import Incarnation
from mesh.membership.registration import Registration
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.transport.base import Buffer, Channel
from mesh.wire.frames import SYSTEM_CODEC, Heartbeat, Renew
from mesh.wire.header import Header, Verb

_MAX_PROGRESS_CHARS: Final = 200
"""One line of `ps`. It goes out with every heartbeat, twice a second to two hubs."""


class Heartbeats:
    """Sends and answers heartbeats; `figures` are sampled before each."""

    def __init__(
        self,
        links: Links,
        actor: Handlers,
        me: Incarnation,
        registration: Registration,
        figures: OwnFigures,
        tasks: TaskSupervisor,
        interval_s: float,
    ) -> None:
        self._links = links
        self._actor = actor
        self._me = me
        self._registration = registration
        self._figures = figures
        self._tasks = tasks
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        links.handlers[Verb.HEARTBEAT] = self._on_heartbeat

    def start(self) -> None:
        self._tick()

    def send_now(self) -> None:
        """Send one to every hub now: called at each beat, and out of turn when the state has changed."""
        body = SYSTEM_CODEC.encode(Renew(state=self._me.describe().state, progress=self._progress()))
        for actor_id in self._registration.hubs():
            try:
                peer = self._links.reach(actor_id)
            # An unreachable hub is tried again at the next beat; the others must not wait for it.
            except CallError:
                continue
            if self._links.send(peer, Channel.CONTROL, Verb.HEARTBEAT, body, (), SYSTEM):
                peer.is_watched = True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        try:
            # Guarded separately: a failure to collect metrics is no reason to fall silent.
            self._tasks.call("tick", self._figures.sample, self._loop.time())
            self._links.beat()
            self.send_now()
        finally:
            # Whatever happened in this beat: an actor that stops sending heartbeats is killed for it.
            # Scheduled from now, not from when this beat was due: after a stall of the loop one beat is enough.
            self._timer = self._loop.call_later(self._interval_s, self._tick)

    def _progress(self) -> str:
        try:
            return self._actor.progress()[:_MAX_PROGRESS_CHARS]
        except Exception as error:  # noqa: BLE001
            # Without its heartbeat the actor would be killed for an error in a line of text.
            self._tasks.failed("progress", error)
            return ""

    def _on_heartbeat(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        beat = SYSTEM_CODEC.decode(parts[1])
        if not isinstance(beat, Heartbeat | Renew):
            raise FrameRefused("bad_body", "a heartbeat body was expected")
        # An answer is not answered, or two hubs could keep each other busy for ever.
        if isinstance(beat, Heartbeat):
            self._registration.heartbeat(peer.address, beat)
            return
        peer.is_watched = True
        answer = SYSTEM_CODEC.encode(self._actor.heartbeat_to(peer.address))
        self._links.send(peer, Channel.CONTROL, Verb.HEARTBEAT, answer, (), SYSTEM)
        self._tasks.call("on_heartbeat", self._actor.on_heartbeat, peer.address, beat.state, beat.progress)
