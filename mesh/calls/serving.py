"""The answering side of calls: the `Call` that an actor is handed, and the calls that it has not answered yet.

Owned by `ActorSystem`; the bookkeeping is `mesh/calls/table.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol, cast

from mesh.address import Address
from mesh.calls.table import Admission, Mailbox
from mesh.errors import NOT_SERVED, Cancelled, DeadlineExceeded, MeshError, PeerLost, TooLarge
from mesh.link.links import Links
from mesh.link.peer import Meta, Peer
from mesh.membership.permissions import Permissions
from mesh.runtime.task_supervisor import TaskSupervisor
from mesh.runtime.timers import DeadlineTimer
from mesh.transport.base import Buffer, Channel
from mesh.wire.codec import AnyMessage, BodyCodec
from mesh.wire.frames import SYSTEM_CODEC, Cancel, ErrorBody
from mesh.wire.header import SYSTEM_FLAG, Header, Verb

NO_DEADLINE_S: Final = 600.0
"""How long a call without a deadline stays in the mailbox (peers in other languages may name none)."""

_REPLY: Final = Verb.REPLY


class Call:
    """One ask that an actor has to answer: exactly once, now or later.

    If its handler forgets a call, the asker's deadline ends it, and its place in the mailbox is freed. `message` is
    decoded by the actor's codec, `buffers` are the raw parts that came with it, `deadline` is when the asker stops
    waiting, on the clock of `Context.now()`, and `traceparent` its W3C trace context; empty if it has none.
    """

    __slots__ = (
        "_callbacks", "_failure", "_serving", "buffers", "channel", "deadline", "key", "message", "peer", "traceparent",
    )  # fmt: skip

    def __init__(self, serving: "Serving", peer: Peer, channel: Channel, header: Header, deadline: float) -> None:
        self._serving = serving
        self.peer = peer
        self.channel = channel
        self.key = peer.address, header.message_id
        self._failure: MeshError | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.message: Any = None
        self.buffers: Sequence[Buffer] = ()
        self.deadline = deadline
        self.traceparent = header.trace

    @property
    def sender(self) -> Address:
        return self.peer.address

    @property
    def done(self) -> bool:
        """Whether it is answered, failed, cancelled or past its deadline, or the asker is gone."""
        return not self._serving.is_open(self)

    def remaining_s(self) -> float:
        return max(0.0, self.deadline - self._serving.now())

    def reply(self, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Answer the ask. On a call that is done this is ignored and counted."""
        if self._serving.settle(self):
            self._serving.answer(self, _REPLY, message, buffers)

    def fail(
        self, code: str, message: str, *, retryable: bool = False, param: str | None = None, known_epoch: int = 0
    ) -> None:
        """Answer with an error, which the asker sees as `RemoteError`."""
        if self._serving.settle(self):
            body = ErrorBody(code=code, message=message, retryable=retryable, param=param, known_epoch=known_epoch)
            self._serving.answer(self, Verb.ERROR, body)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call back when the asker cancels or is lost, or the deadline passes unanswered; at once if it already has."""
        # A handler may register late, after the call has ended.
        if self._failure is not None:
            callback()
        else:
            self._callbacks.append(callback)

    # For Serving

    def dropped(self, failure: MeshError, *, tell: bool = False) -> None:
        """The asker no longer wants the answer, or (`tell`) this actor will not give one."""
        self._failure = failure
        if tell:
            body = ErrorBody(code="stopping", message=failure.message, retryable=True)
            self._serving.answer(self, Verb.ERROR, body)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._serving.tasks.call("on_cancel", callback)


class Answerer(Protocol):
    """What is needed of the actor that answers; see `mesh/handlers.py`."""

    role: ClassVar[str]
    system_asks: ClassVar[tuple[type, ...]]

    def on_ask(self, call: Call) -> None:
        """Answers a call, now or later."""
        ...


class Serving:
    """All calls accepted here. `of_system`: handlers of the mesh's own asks but those in its `system_asks`."""

    def __init__(
        self,
        links: Links,
        bodies: BodyCodec,
        actor: Answerer,
        tasks: TaskSupervisor,
        permissions: Permissions | None,
        capacity: int,
    ) -> None:
        self.tasks = tasks
        self.of_system: dict[type, Callable[[Call], object]] = {}
        self._links = links
        links.metrics.begin("mesh_answers_ignored_total", "mesh_overloaded_total")
        self._bodies = bodies
        self._actor = actor
        self._permissions = permissions
        self._loop = asyncio.get_running_loop()
        self._mailbox: Mailbox[Call] = Mailbox(capacity)
        self._timer = DeadlineTimer(lambda: tasks, self._mailbox.next_deadline, self._expire, rest_s=0.0)
        self.now = self._loop.time
        links.handlers[Verb.ASK] = self._on_call
        links.handlers[Verb.CANCEL] = self._on_cancel

    def __len__(self) -> int:
        return len(self._mailbox)

    def is_open(self, call: Call) -> bool:
        return self._mailbox.get(call.key) is call

    def settle(self, call: Call) -> bool:
        if self.is_open(call):
            self._mailbox.settle(call.key)
            return True
        self._links.metrics.count("mesh_answers_ignored_total")
        return False

    def answer(self, call: Call, verb: Verb, message: AnyMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Send one answer, even if the call is settled already."""
        try:
            body, flags = self._bodies.encode(message, buffers)
        # Send an error instead, or the asker would wait until its deadline for an answer that cannot be sent.
        except TooLarge as error:
            verb, buffers, flags = Verb.ERROR, (), SYSTEM_FLAG
            body = SYSTEM_CODEC.encode(ErrorBody(code=error.code, message=error.message))
        self._links.send(call.peer, call.channel, verb, body, buffers, Meta(0, call.key[1], 0, flags))

    def lose(self, peer: Peer, reason: str) -> None:
        for call in self._mailbox.lose(peer.address):
            call.dropped(PeerLost(f"{peer.address} is lost: {reason}"))

    def close(self) -> None:
        self._timer.cancel()
        for call in self._mailbox.close():
            call.dropped(Cancelled("the answering actor is stopping"), tell=True)

    def _on_call(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        now = self._loop.time()
        deadline = now + (header.timeout_us / 1e6 if header.timeout_us > 0 else NO_DEADLINE_S)
        call = Call(self, peer, channel, header, deadline)
        # Before the mailbox: a call that cannot be decoded is refused, and must not take a place that is never freed.
        call.message = self._bodies.decode(header, parts[1])
        if self._permissions is not None:
            self._permissions.check(type(cast("object", call.message)), peer.address, peer.member)
        call.buffers = parts[2:]
        admission = self._mailbox.admit(peer.address, header.message_id, deadline, call)
        if admission is Admission.TAKEN:
            # Compared here as in `Asking.open`.
            if deadline < self._timer.at:
                self._timer.arm()
            self._hand_over(call, header)
        elif admission is Admission.OVERLOADED:
            self._links.metrics.count("mesh_overloaded_total")
            # Retryable, and sent at once: the asker may have time left to try another actor.
            most, of_one = self._mailbox.capacity, self._mailbox.per_sender
            why = f"too many calls are waiting: at most {most}, and {of_one} of one sender, are accepted"
            self.answer(call, Verb.ERROR, ErrorBody(code="overloaded", message=why, retryable=True))

    def _hand_over(self, call: Call, header: Header) -> None:
        message = call.message
        actor = self._actor
        kind = type(cast("object", message))
        if header.flags & SYSTEM_FLAG and not isinstance(message, actor.system_asks):
            answer = self.of_system.get(kind)
            if answer is not None:
                answer(call)
            else:
                call.fail(NOT_SERVED, f"{actor.role} does not answer {kind.__name__}")
            return
        try:
            actor.on_ask(call)
        except Exception as error:  # noqa: BLE001
            # One ask that a handler cannot take must not end the actor: its asker gets an error.
            self.tasks.failed(f"on_ask({kind.__name__})", error, message)
            # The handler may have answered before it raised.
            if not call.done:
                call.fail("internal", f"{actor.role} failed to answer {kind.__name__}")

    def _on_cancel(self, peer: Peer, channel: Channel, header: Header, parts: Sequence[Buffer]) -> None:
        body = SYSTEM_CODEC.decode(parts[1])
        call = self._mailbox.cancel((peer.address, header.correlation_id))
        if call is not None:
            call.dropped(Cancelled(body.reason if isinstance(body, Cancel) else "cancelled"))

    def _expire(self, now: float) -> None:
        for _, _, call in self._mailbox.expire(now):
            call.dropped(DeadlineExceeded("the asker is no longer waiting"))
        self._timer.arm()
