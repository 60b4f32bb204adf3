"""Heartbeats in a star, only between an actor and its hubs: its supervisor and the registry. Owned by `ActorSystem`.

    on the registry's host   actor --Renew each interval, no answer--> supervisor --Renew of all, each 2 s--> registry
                                                                                  <--Heartbeat, its version--
    all others               actor --Renew each interval--> registry
                                   <--Heartbeat, its version--

An actor hears of its supervisor's end by a pipe, and of its registry's by the supervisor or by the connection that
ends, so on one host nobody answers it. All are sent by the loop's thread, which they prove alive. A peer is watched
from its first heartbeat on; a registry that answers each, from the first one sent to it; until it is lost.

A supervisor that stands still renews nobody: the registry then asks each actor itself to renew its lease, before that
ends. Whom the supervisor renews is decided in `renewals.py`.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from mesh.address import Address
from mesh.errors import CallError, FrameRefused
from mesh.handlers import Handlers
from mesh.link.links import Links
from mesh.link.peer import SYSTEM, Peer
from mesh.membership.incarnation import Incarnation
from mesh.membership.registration import Registration
from mesh.membership.renewals import EVERY, Renewals
from mesh.runtime.own_figures import OwnFigures
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.transport.base import Buffer, Channel
from mesh.wire.frames import SYSTEM_CODEC, Heartbeat, Renew, Renewed
from mesh.wire.header import Header, Verb

_MAX_PROGRESS_CHARS: Final = 200
"""One line of `ps`. It goes out with every heartbeat, twice a second."""


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
        self._renewals = Renewals(interval_s)
        self._num_beats = 0
        links.handlers[Verb.HEARTBEAT] = self._on_heartbeat

    def start(self) -> None:
        self._tick()

    def send_now(self) -> None:
        """Send one to every hub now: called when the state has changed, and as the first."""
        self._send_to_supervisor()
        self._send_to_registry()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lost(self, peer: Address) -> None:
        self._renewals.lost(peer)

    def _tick(self) -> None:
        try:
            # Guarded separately: a failure to collect metrics is no reason to fall silent.
            self._tasks.call("tick", self._figures.sample, self._loop.time())
            self._links.beat()
            self._send_to_supervisor()
            # Of a registry that this supervisor watches, by its own heartbeats, nothing but the version is to be heard.
            if not self._renews_others() or self._num_beats % EVERY == 0:
                self._send_to_registry()
            self._num_beats += 1
            self._tasks.call("waning", self._remind)
        finally:
            # Whatever happened in this beat: an actor that stops sending heartbeats is killed for it.
            # Scheduled from now, not from when this beat was due: after a stall of the loop one beat is enough.
            self._timer = self._loop.call_later(self._pause_s(), self._tick)

    def _pause_s(self) -> float:
        """Until the next beat: at a multiple of the interval on the monotonic clock, which a host's actors share.

        So their beats come together, and the supervisor wakes for several: of 0.43 % of a core with beats in four parts
        of the interval it then takes 0.30 %, most of which is waking.
        """
        left_s = self._interval_s - self._loop.time() % self._interval_s
        # A timer may fire some ms early, and the first beat comes at any time.
        return left_s if left_s > self._interval_s / 10 else left_s + self._interval_s

    def _remind(self) -> None:
        for address in self._actor.waning():
            self._say(address, Heartbeat(renew=True))

    def _send_to_supervisor(self) -> None:
        supervisor, view = self._registration.supervisor, self._registration.view
        if supervisor is not None:
            state, version = self._me.describe().state, (view.registry_epoch, view.version)
            self._beat(supervisor, Renew(state, self._progress(), False, *version))

    def _send_to_registry(self) -> None:
        registry, supervisor = self._registration.registry, self._registration.supervisor
        if registry is None:
            return
        if supervisor is not None and self._is_here(registry):
            # Otherwise it would wait for the registry to ask, and nobody would tell it that its epoch is over.
            if not self._is_linked(supervisor):
                self._renew_at(registry, next_in=0)
        elif self._renews_others():
            self._renew_at(registry, self._renewals.due(self._loop.time()), EVERY)
        elif (peer := self._renew_at(registry)) is not None:
            peer.is_watched = True

    def _renew_at(self, registry: Address, renewed: list[Renewed] | None = None, next_in: int = 1) -> Peer | None:
        state = self._me.describe().state
        return self._beat(registry, Renew(state, self._progress(), renewed=renewed or [], next_in=next_in))

    def _is_here(self, registry: Address) -> bool:
        peer = self._links.get(registry.actor_id)
        return peer is not None and peer.member is not None and peer.member.host == self._me.describe().host

    def _is_linked(self, supervisor: Address) -> bool:
        """Whether the supervisor has answered; one that was only dialed may be gone."""
        peer = self._links.get(supervisor.actor_id)
        return peer is not None and peer.address == supervisor and peer.member is not None

    def _renews_others(self) -> bool:
        """Whether this is the supervisor of the registry's host: the registry itself sends it heartbeats."""
        registry = self._registration.registry
        return registry is not None and registry in self._renewals

    def _beat(self, hub: Address, renew: Renew) -> Peer | None:
        try:
            peer = self._links.reach(hub.actor_id)
        # An unreachable hub is tried again at the next beat; the others must not wait for it.
        except CallError:
            return None
        sent = self._links.send(peer, Channel.CONTROL, Verb.HEARTBEAT, SYSTEM_CODEC.encode(renew), (), SYSTEM)
        return peer if sent else None

    def _say(self, address: Address, beat: Heartbeat) -> None:
        """Tell a linked peer something that it did not ask for."""
        peer = self._links.get(address.actor_id)
        if peer is not None and peer.address == address:
            self._links.send(peer, Channel.CONTROL, Verb.HEARTBEAT, SYSTEM_CODEC.encode(beat), (), SYSTEM)

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
            self._on_answer(peer.address, beat)
            return
        peer.is_watched = beat.next_in == 1
        if beat.answer:
            answer = self._actor.heartbeat_to(peer, beat.renewed)
            self._links.send(peer, Channel.CONTROL, Verb.HEARTBEAT, SYSTEM_CODEC.encode(answer), (), SYSTEM)
        else:
            self._take_charge(peer.address, beat)
        self._tasks.call("on_heartbeat", self._actor.on_heartbeat, peer.address, beat.state, beat.progress)

    def _on_answer(self, hub: Address, beat: Heartbeat) -> None:
        if hub == self._registration.registry and beat.renew:
            # Its supervisor stands still. This says nothing of the version, so the answer to it will.
            self._renew_at(hub, next_in=0)
            return
        self._registration.heartbeat(hub, beat)
        if hub == self._registration.registry:
            for address in self._renewals.unknown(beat.unknown):
                self._say(address, Heartbeat(beat.registry_epoch, beat.version, known=False))

    def _take_charge(self, address: Address, beat: Renew) -> None:
        """An actor leaves its lease to this supervisor, and says which version of the registry it knows."""
        view = self._registration.view
        current = view.registry_epoch, view.version
        if self._renewals.heard(address, (beat.registry_epoch, beat.version), current, self._loop.time()):
            self._say(address, Heartbeat(*current))
