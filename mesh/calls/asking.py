"""The asking side of calls: each ends exactly once, at its deadline at the latest. Owned by `ActorSystem`.

The bookkeeping is `mesh/calls/table.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from mesh.address import Address
from mesh.calls.table import PendingCalls
from mesh.errors import (
    CallError,
    Cancelled,
    DeadlineExceeded,
    FrameRefused,
    MeshError,
    PeerLost,
    RemoteError,
    Unreachable,
)
from mesh.link.links import Links
from mesh.link.peer import Meta, Peer
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import AnyMessage, BodyCodec
from mesh.wire.frames import SYSTEM_CODEC, Cancel, ErrorBody
from mesh.wire.header import SYSTEM_FLAG, Header, Verb

_ASK: Final = Verb.ASK


class Answer(NamedTuple):
    """A reply. `buffers` are valid as long as they are referenced."""

    message: Any
    buffers: Sequence[Buffer]
    sender: Address


Then = Callable[[Answer | MeshError], None]
"""Takes the one outcome of a call."""


class Asking:
    """All calls this actor has made. Peers that do not answer in time are suspected; `ask_then` calls under `tasks`."""

    def __init__(self, links: Links, bodies: BodyCodec, capacity: int, tasks: TaskSupervisor) -> None:
        self._guard = tasks.call
        self._is_closed = False
        self._links = links
        links.metrics.begin("mesh_late_answers_total", "mesh_errors_told_total")
        self._bodies = bodies
        self._loop = asyncio.get_running_loop()
        self._pending: PendingCalls[Then] = PendingCalls(capacity)
        self._timer = DeadlineTimer(lambda: tasks, self._pending.next_deadline, self._expire, rest_s=0.0)
        links.handlers[Verb.REPLY] = self._on_reply
        links.handlers[Verb.ERROR] = self._on_error

    def __len__(self) -> int:
        return len(self._pending)

    async def ask(
        self,
        actor_id: str,
        message: AnyMessage,
        *,
        timeout_s: float,
        buffers: Sequence[Buffer] = (),
        channel: Channel = Channel.CONTROL,
    ) -> Answer:
        """Send, and wait for the reply; raises a `CallError` by the deadline. Cancelling the task sends `cancel`."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        message_id = self.open(partial(_end_wait, future), actor_id, message, timeout_s, buffers, channel)
        try:
            return await future
        except asyncio.CancelledError:
            self.abandon(message_id, "the asker was cancelled")
            raise

    def ask_then(
        self, actor_id: str, message: AnyMessage, then: Then, *, timeout_s: float, channel: Channel = Channel.CONTROL
    ) -> None:
        """Send; `then` is called once, with the answer or the `CallError` that `ask` would raise, but not after `stop`.

        Needs no task. `then` runs under the actor's `TaskSupervisor`, and never before this method returns.
        """
        settled = partial(self._settled, then)
        try:
            self.open(settled, actor_id, message, timeout_s, (), channel)
        except CallError as error:
            settled(error)

    def open(
        self,
        settled: Then,
        actor_id: str,
        message: AnyMessage,
        timeout_s: float,
        buffers: Sequence[Buffer],
        channel: Channel,
    ) -> int:
        """Send a call and return its message id. If this raises a `CallError`, `settled` is not called."""
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time is left to ask {actor_id}")
        # A call made after `close` would never be settled, and its timer would outlive the actor.
        if self._is_closed:
            raise Cancelled("the asking actor is stopping")
        body, flags = self._bodies.encode(message, buffers)
        peer = self._links.reach(actor_id)
        message_id = self._links.next_id()
        deadline = self._loop.time() + timeout_s
        # Registered before it is sent, so that no answer can come too early for it, not even from this actor itself.
        self._pending.open(message_id, peer.address, deadline, settled)
        # The remaining time, at least a microsecond: 0 would mean that there is no deadline.
        meta = Meta(message_id, 0, max(1, int(timeout_s * 1e6)), flags)
        # If sending the frames queued before this one lost the peer, the call is settled and `settled` was called.
        is_sent = self._links.send(peer, channel, _ASK, body, buffers, meta)
        if not is_sent and self._pending.settle(message_id) is not None:
            raise Unreachable(f"the outbox to {peer.address} is full")
        # Compared here because nearly all are later than the armed one: `arm` was two of the 68 calls in an ask.
        if deadline < self._timer.at:
            self._timer.arm()
        return message_id

    def abandon(self, message_id: int, reason: str) -> None:
        address = self._pending.peer_of(message_id)
        if address is not None:
            self._pending.settle(message_id)
            self._cancel(message_id, address, reason)

    def lose(self, peer: Peer, reason: str) -> None:
        for settled in self._pending.lose(peer.address):
            lost = PeerLost(f"{peer.address} is lost: {reason}")
            lost.reason, lost.refusal = reason, peer.refusal
            # Whether the peer can have received the call at all: only then may the call be what brought it down.
            lost.was_heard = peer.was_heard
            settled(lost)

    def close(self) -> None:
        self._is_closed = True
        self._timer.cancel()
        for settled in self._pending.close():
            settled(Cancelled("the asking actor is stopping"))

    def _on_reply(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        settled = self._pending.answered(header.correlation_id, peer.address)
        if settled is None:
            self._links.metrics.count("mesh_late_answers_total")
            return
        try:
            message = self._bodies.decode(header, parts[1])
        except FrameRefused as refusal:
            settled(RemoteError("bad_answer", f"{header.sender} sent a malformed answer: {refusal.message}"))
            raise
        settled(Answer(message, parts[2:], peer.address))

    def _on_error(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        if not isinstance(body, ErrorBody):
            raise FrameRefused("bad_body", "an error body was expected")
        settled = self._pending.answered(header.correlation_id, peer.address)
        if settled is not None:
            settled(RemoteError(body.code, body.message, body.retryable, body.param, body.known_epoch))
        else:
            # Not labelled by code, which the peer chooses: one series per code would leave no room for others.
            self._links.metrics.count("mesh_errors_told_total")

    def _expire(self, now: float) -> None:
        for message_id, address, settled in self._pending.expire(now):
            settled(DeadlineExceeded(f"{address} did not answer in time"))
            self._cancel(message_id, address, "deadline")
            self._links.suspect(address.actor_id)
        self._timer.arm()

    def _settled(self, then: Then, outcome: Answer | MeshError) -> None:
        """An answer is handed to `then` before any later message is handled.

        An error in the loop's next turn: not within the asker's `ask_then`, nor ahead of its `on_peer_lost`.
        """
        if isinstance(outcome, MeshError):
            self._loop.call_soon(self._deliver, then, outcome)
        else:
            self._deliver(then, outcome)

    def _deliver(self, then: Then, outcome: Answer | MeshError) -> None:
        if not self._is_closed:
            self._guard("then", then, outcome)

    def _cancel(self, message_id: int, address: Address, reason: str) -> None:
        """Tell the incarnation that was asked, if still linked: no other knows the call."""
        peer = self._links.get(address.actor_id)
        if peer is not None and peer.address == address:
            meta = Meta(correlation_id=message_id, flags=SYSTEM_FLAG)
            # On the control channel, whichever channel the call is on: bulk must not delay it.
            body = SYSTEM_CODEC.encode(Cancel(reason=reason))
            self._links.send(peer, Channel.CONTROL, Verb.CANCEL, body, (), meta)


def _end_wait(future: asyncio.Future[Answer], outcome: Answer | MeshError) -> None:
    if future.done():
        return
    if isinstance(outcome, MeshError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
