"""The asking side of calls: each ends exactly once, at its deadline at the latest. Owned by `ActorSystem`.

The bookkeeping is `mesh/calls/table.py`; streams are read by `mesh/calls/streaming.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

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
from mesh.wire.frames import SYSTEM_CODEC, Cancel, Credit, ErrorBody
from mesh.wire.header import SYSTEM_FLAG, Header, Verb

_ASK: Final = Verb.ASK
_REPLY: Final = Verb.REPLY


class Answer(NamedTuple):
    """A reply, or one item of a stream. `buffers` are valid as long as they are referenced."""

    message: Any
    buffers: Sequence[Buffer]
    sender: Address


class Asked(Protocol):
    """One call in flight, as `Asking` sees it. It ends with `failed`, `ended`, or an `arrived` that returns True."""

    def arrived(self, header: Header, answer: Answer) -> bool:
        """A reply or an item arrived. Returns whether the call is over."""
        ...

    def ended(self, header: Header) -> None:
        """A stream's `end` arrived."""
        ...

    def failed(self, error: MeshError) -> None:
        """Nothing more comes."""
        ...


class _AskedOnce:
    """A call for one reply."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Answer]) -> None:
        self.future = future

    def arrived(self, header: Header, answer: Answer) -> bool:
        """The reply."""
        if not self.future.done():
            if header.verb == _REPLY:
                self.future.set_result(answer)
            else:
                self.future.set_exception(RemoteError("bad_answer", "one reply was expected, but a stream came"))
        return True

    def ended(self, header: Header) -> None:
        """A stream without items where one reply was asked for."""
        self.failed(RemoteError("bad_answer", "one reply was expected, but the end of a stream came"))

    def failed(self, error: MeshError) -> None:
        """The asker's task raises `error`."""
        if not self.future.done():
            self.future.set_exception(error)


class _AskedThen:
    """A call for one reply that no task waits for: its only outcome is passed to `then`."""

    __slots__ = ("_asking", "_then")

    def __init__(self, asking: "Asking", then: "Then") -> None:
        self._asking = asking
        self._then = then

    def arrived(self, header: Header, answer: Answer) -> bool:
        """The reply; `then` is called before any later message is handled."""
        if header.verb == _REPLY:
            self._asking.deliver(self._then, answer)
        else:
            self.failed(RemoteError("bad_answer", "one reply was expected, but a stream came"))
        return True

    def ended(self, header: Header) -> None:
        """A stream without items where one reply was asked for."""
        self.failed(RemoteError("bad_answer", "one reply was expected, but the end of a stream came"))

    def failed(self, error: MeshError) -> None:
        """Calls back in the loop's next turn: not within the asker's `ask_then`, nor ahead of its `on_peer_lost`."""
        self._asking.deliver_soon(self._then, error)


Then = Callable[[Answer | MeshError], None]


class Asking:
    """All calls this actor has made. Peers that do not answer in time are suspected.

    Callbacks passed to `ask_then` run under `tasks`.
    """

    def __init__(self, links: Links, bodies: BodyCodec, capacity: int, tasks: TaskSupervisor) -> None:
        self._guard = tasks.call
        self._is_closed = False
        self._links = links
        self._bodies = bodies
        self._loop = asyncio.get_running_loop()
        self._pending: PendingCalls[Asked] = PendingCalls(capacity)
        self._timer = DeadlineTimer(lambda: tasks, self._pending.next_deadline, self._expire, rest_s=0.0)
        handlers = links.handlers
        handlers[_REPLY] = self._on_reply
        handlers[Verb.ITEM] = self._on_item
        handlers[Verb.ERROR] = self._on_error
        handlers[Verb.END] = self._on_end

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
        """Send, and wait for the reply; raises a `CallError`, at the deadline at the latest.

        Cancelling the task sends `cancel` to the peer.
        """
        future: asyncio.Future[Answer] = self._loop.create_future()
        message_id = self.open(_AskedOnce(future), _ASK, actor_id, message, timeout_s, buffers, channel)
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
        asked = _AskedThen(self, then)
        try:
            self.open(asked, _ASK, actor_id, message, timeout_s, (), channel)
        except CallError as error:
            asked.failed(error)

    def open(
        self,
        asked: Asked,
        verb: Verb,
        actor_id: str,
        message: AnyMessage,
        timeout_s: float,
        buffers: Sequence[Buffer],
        channel: Channel,
        credit: int = 0,
    ) -> int:
        """Send a call and return its message id. If this raises a `CallError`, `asked` is not called.

        `credit` is the first limit of a stream: how many items the peer may send.
        """
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
        self._pending.open(message_id, peer.address, deadline, asked)
        # The remaining time, at least a microsecond: 0 would mean that there is no deadline.
        meta = Meta(message_id, 0, max(1, int(timeout_s * 1e6)), flags, credit)
        # If sending the frames queued before this one lost the peer, the call is settled and `asked` has been told.
        is_sent = self._links.send(peer, channel, verb, body, buffers, meta)
        if not is_sent and self._pending.settle(message_id) is not None:
            raise Unreachable(f"the outbox to {peer.address} is full")
        # Compared here because nearly all are later than the armed one: `arm` was two of the 68 calls in an ask.
        if deadline < self._timer.at:
            self._timer.arm()
        return message_id

    def deliver(self, then: Then, outcome: Answer | MeshError) -> None:
        """Call back, unless the actor has stopped in the meantime."""
        if not self._is_closed:
            self._guard("then", then, outcome)

    def deliver_soon(self, then: Then, error: MeshError) -> None:
        """Call back in the loop's next turn."""
        if not self._is_closed:
            self._loop.call_soon(self.deliver, then, error)

    def abandon(self, message_id: int, reason: str) -> None:
        """The answer is no longer wanted; tell the peer, unless it has already answered."""
        address = self._pending.peer_of(message_id)
        if address is not None:
            self._pending.settle(message_id)
            self._say(message_id, address, Verb.CANCEL, Cancel(reason=reason))

    def grant(self, message_id: int, limit: int) -> None:
        """Tell the sender of a stream how many items it may send in total."""
        address = self._pending.peer_of(message_id)
        if address is not None:
            self._say(message_id, address, Verb.CREDIT, Credit(limit=limit))

    def lose(self, peer: Peer, reason: str) -> None:
        """A peer is gone: calls to it fail at once."""
        for asked in self._pending.lose(peer.address):
            lost = PeerLost(f"{peer.address} is lost: {reason}")
            lost.reason, lost.refusal = reason, peer.refusal
            # Whether the peer can have received the call at all: only then may the call be what brought it down.
            lost.was_heard = peer.was_heard
            asked.failed(lost)

    def close(self) -> None:
        """The actor stops: all calls in flight fail."""
        self._is_closed = True
        self._timer.cancel()
        for asked in self._pending.close():
            asked.failed(Cancelled("the asking actor is stopping"))

    def _on_reply(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        asked = self._pending.answered(header.correlation_id, peer.address)
        if asked is None:
            self._links.metrics.count("mesh_late_answers_total")
            return
        asked.arrived(header, Answer(self._decode(asked, header, parts), parts[2:], peer.address))

    def _on_item(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        number = header.correlation_id
        asked = self._pending.waiting(number, peer.address)
        if asked is None:
            self._links.metrics.count("mesh_late_answers_total")
            return
        if asked.arrived(header, Answer(self._decode(asked, header, parts), parts[2:], peer.address)):
            self._pending.settle(number)

    def _decode(self, asked: Asked, header: Header, parts: Sequence[Buffer]) -> Any:
        try:
            return self._bodies.decode(header, parts[1])
        except FrameRefused as refusal:
            self._pending.settle(header.correlation_id)
            asked.failed(RemoteError("bad_answer", f"{header.sender} sent a malformed answer: {refusal.message}"))
            raise

    def _on_end(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        asked = self._pending.answered(header.correlation_id, peer.address)
        if asked is not None:
            asked.ended(header)
        else:
            self._links.metrics.count("mesh_late_answers_total")

    def _on_error(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        if not isinstance(body, ErrorBody):
            raise FrameRefused("bad_body", "an error body was expected")
        asked = self._pending.answered(header.correlation_id, peer.address)
        if asked is not None:
            asked.failed(RemoteError(body.code, body.message, body.retryable, body.param, body.known_epoch))
        else:
            # Not labelled by code, which the peer chooses: one series per code would leave no room for others.
            self._links.metrics.count("mesh_errors_told_total")

    def _expire(self, now: float) -> None:
        for message_id, address, asked in self._pending.expire(now):
            asked.failed(DeadlineExceeded(f"{address} did not answer in time"))
            self._say(message_id, address, Verb.CANCEL, Cancel(reason="deadline"))
            self._links.suspect(address.actor_id)
        self._timer.arm()

    def _say(self, message_id: int, address: Address, verb: Verb, body: Cancel | Credit) -> None:
        """Send `body`, about a call, to the incarnation that was asked, if still linked: no other knows the call."""
        peer = self._links.get(address.actor_id)
        if peer is not None and peer.address == address:
            meta = Meta(correlation_id=message_id, flags=SYSTEM_FLAG)
            # On the control channel, whichever channel the call is on: bulk must not delay it.
            self._links.send(peer, Channel.CONTROL, verb, SYSTEM_CODEC.encode(body), (), meta)
