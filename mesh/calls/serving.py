"""The answering side of calls: the mailbox, and the `Call` that an actor is handed. Owned by `ActorSystem`."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from mesh.actor import AnyMessage
from mesh.address import Address
from mesh.calls.credit import CreditGate
from mesh.calls.mailbox import Admission, Mailbox
from mesh.errors import Cancelled, DeadlineExceeded, FrameRefused, MeshError, PeerLost, TooLarge
from mesh.link.links import Links
from mesh.link.peer import Meta, Peer
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Buffer, Lane
from mesh.wire.frames import SYSTEM_CODEC, Cancel, Credit, End, ErrorBody
from mesh.wire.header import SYSTEM_FLAG, Header, Verb
from mesh.wire.wording import Wording

NO_DEADLINE_S: Final = 600.0
"""How long a call stays in the mailbox whose asker names no deadline (peers in other languages)."""

_REPLY: Final = Verb.REPLY
_STREAM: Final = Verb.STREAM


class IncomingCall:
    """One ask or stream to be answered; implements `mesh.actor.Call`."""

    __slots__ = (
        "_callbacks", "_failure", "_gate", "_lane", "_peer", "_serving", "_waiter",
        "buffers", "deadline", "key", "message", "traceparent",
    )  # fmt: skip

    def __init__(self, serving: "Serving", peer: Peer, lane: Lane, header: Header, deadline: float) -> None:
        self._serving = serving
        self._peer = peer
        self._lane = lane
        self.key = peer.address, header.message_id
        self._gate = CreditGate(header.position) if header.verb == _STREAM else None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: MeshError | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.message: Any = None
        self.buffers: Sequence[Buffer] = ()
        self.deadline = deadline
        self.traceparent = header.trace

    @property
    def sender(self) -> Address:
        """Who asks."""
        return self._peer.address

    @property
    def is_stream(self) -> bool:
        """Whether items are expected rather than one reply."""
        return self._gate is not None

    @property
    def done(self) -> bool:
        """Whether nothing can be answered any more."""
        return not self._serving.is_open(self)

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - self._serving.now())

    def reply(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Answer an ask. On a call that is done: ignored and counted."""
        if self._gate is not None:
            self.fail("bad_answer", "one reply where a stream was asked for")
        elif self._serving.settle(self):
            self._send(_REPLY, message, buffers, 0)

    def fail(self, code: str, message: str, *, retryable: bool = False, param: str | None = None) -> None:
        """Answer with an error."""
        if self._serving.settle(self):
            body = ErrorBody(code=code, message=message, retryable=retryable, param=param)
            self._send(Verb.ERROR, body, (), 0)

    async def item(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Send the next item once there is credit; raises `Cancelled`, `DeadlineExceeded` or `PeerLost`."""
        gate = self._gate
        if gate is None:
            raise TypeError("this call asks for one reply: answer it with reply()")
        while not gate.is_open and not self.done:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.done:
            raise self._failure or Cancelled("the stream has ended already")
        if not self._send(Verb.ITEM, message, buffers, gate.take()):
            self._serving.settle(self)
            raise PeerLost(f"the way to {self._peer.address} is gone or full")

    def end(self) -> None:
        """All items of the stream have been sent."""
        if self._gate is None:
            self.fail("bad_answer", "the end of a stream where one reply was asked for")
        elif self._serving.settle(self):
            self._send(Verb.END, End(), (), self._gate.sent)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call back when nobody wants the answer any more; at once if that is so already."""
        if self._failure is not None:
            callback()
        else:
            self._callbacks.append(callback)

    # For Serving

    def grant(self, limit: int) -> None:
        """More items are wanted."""
        if self._gate is not None and self._gate.grant(limit):
            self._wake()

    def dropped(self, failure: MeshError, *, tell: bool = False) -> None:
        """Nobody wants the answer any more, or (`tell`) nobody will give it."""
        self._failure = failure
        if tell:
            self._send(Verb.ERROR, ErrorBody(code="stopping", message=failure.message, retryable=True), (), 0)
        self._wake()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._serving.guard(callback)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send(self, verb: Verb, message: AnyMessage, buffers: Sequence[Buffer], position: int) -> bool:
        return self._serving.answer((self._peer, self._lane, self.key[1]), verb, message, buffers, position)


class Serving:
    """All calls that this actor has taken.

    `dispatch` hands a call to whoever answers it; `guard` runs a callback of the actor inside the supervision boundary.
    """

    def __init__(
        self,
        links: Links,
        wording: Wording,
        capacity: int,
        dispatch: Callable[[IncomingCall, Header], None],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self.guard = guard
        self._links = links
        self._wording = wording
        self._dispatch = dispatch
        self._loop = asyncio.get_running_loop()
        self._mailbox: Mailbox[IncomingCall] = Mailbox(capacity)
        self._timer = DeadlineTimer(self._loop, self._mailbox.next_deadline, self._expire)
        self.now = self._loop.time
        links.handlers[Verb.ASK] = links.handlers[_STREAM] = self._on_call
        links.handlers[Verb.CANCEL] = self._on_cancel
        links.handlers[Verb.CREDIT] = self._on_credit

    def __len__(self) -> int:
        return len(self._mailbox)

    def is_open(self, call: IncomingCall) -> bool:
        """Whether a call still waits for its answer."""
        return self._mailbox.get(call.key) is call

    def settle(self, call: IncomingCall) -> bool:
        """The call is answered now; False, counted, if it is done already."""
        if self.is_open(call):
            self._mailbox.settle(call.key)
            return True
        self._links.metrics.count("mesh_answers_ignored_total")
        return False

    def answer(
        self, to: tuple[Peer, Lane, int], verb: Verb, message: AnyMessage, buffers: Sequence[Buffer], position: int
    ) -> bool:
        """Send one answer to (peer, lane, message id of the call)."""
        peer, lane, message_id = to
        try:
            body, flags = self._wording.encode(message, buffers)
        except TooLarge as error:
            verb, buffers, flags = Verb.ERROR, (), SYSTEM_FLAG
            body = SYSTEM_CODEC.encode(ErrorBody(code=error.code, message=error.message))
        return self._links.send(peer, lane, verb, body, buffers, Meta(0, message_id, 0, flags, position))

    def lose(self, peer: Peer, reason: str) -> None:
        """An asker is gone."""
        for call in self._mailbox.lose(peer.address):
            call.dropped(PeerLost(f"{peer.address} is lost: {reason}"))

    def close(self) -> None:
        """The actor stops: whoever still waits is told."""
        self._timer.cancel()
        for call in self._mailbox.close():
            call.dropped(Cancelled("the answering actor stops"), tell=True)

    def _on_call(self, peer: Peer, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        now = self._loop.time()
        deadline = now + (header.timeout_us / 1e6 if header.timeout_us > 0 else NO_DEADLINE_S)
        call = IncomingCall(self, peer, lane, header, deadline)
        call.message = self._wording.decode(header, parts[1])
        call.buffers = parts[2:]
        admission = self._mailbox.admit(peer.address, header.message_id, deadline, call)
        if admission is Admission.TAKEN:
            self._timer.arm(deadline)
            self._dispatch(call, header)
        elif admission is Admission.OVERLOADED:
            self._links.metrics.count("mesh_overloaded_total")
            error = ErrorBody(code="overloaded", message=f"{self._mailbox.capacity} calls are waiting", retryable=True)
            self.answer((peer, lane, header.message_id), Verb.ERROR, error, (), 0)

    def _on_cancel(self, peer: Peer, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        call = self._mailbox.cancel((peer.address, header.correlation_id))
        if call is not None:
            call.dropped(Cancelled(body.reason if isinstance(body, Cancel) else "cancelled"))

    def _on_credit(self, peer: Peer, lane: Lane, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        if not isinstance(body, Credit):
            raise FrameRefused("bad_body", "the body of a credit is expected")
        call = self._mailbox.get((peer.address, header.correlation_id))
        if call is not None:
            call.grant(body.limit)

    def _expire(self, now: float) -> None:
        for _, _, call in self._mailbox.expire(now):
            call.dropped(DeadlineExceeded("the asker no longer waits"))
