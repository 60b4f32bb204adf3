"""Drives a pure core: feeds it one event at a time and performs its commands before it gets the next event.

    feed(event) --> handle(event, now) --> command, command, ... --> perform --+
         ^                                                                     |
         +------------------- an event that performing brings about -----------+   queued, never recursed into

A core that raises has stopped half-way: its changes remain, its commands are lost. Its state can no longer be trusted,
so the actor ends, and its next incarnation starts from what others know. The core's last events are logged, so that a
test can replay them (`mesh/testing/replay.py`).

Where ending the owner would cost more than a wrong state (`ends_owner` False), only the one event is lost.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, assert_never

from mesh.actor import Answer, Context
from mesh.errors import CoreFailed, MeshError
from mesh.runtime.effects import Answered, Ask, AskFailed, Effect, Outcome, Publish, Refuse, Reply, Tell
from mesh.runtime.recording import EventRecorder, Redact, Writer, keep_all

Event = TypeVar("Event")
Command = TypeVar("Command")

CORE_FAILED: Final = "core failed"
CORE_EVENT: Final = "core event"
"""Log messages: one line with the first, then the core's last events, oldest first, as lines with the second."""


def _nobody_asks(outcome: Outcome) -> None:
    raise AssertionError(f"the outcome of {outcome.tag} is for a core that asks nothing")


def perform(effect: Effect, ctx: Context, feed: Callable[[Outcome], None] = _nobody_asks) -> None:
    """Perform what a core wants of the mesh; `feed` is called with the outcome of an `Ask`, once, and not in here."""
    match effect:
        case Tell(actor_id, message, channel, buffers):
            ctx.tell(actor_id, message, buffers, channel=channel)
        case Ask(actor_id, message, timeout_s, tag):
            ctx.ask_then(actor_id, message, lambda outcome: feed(_outcome(tag, outcome)), timeout_s=timeout_s)
        case Reply(call, message):
            call.reply(message)
        case Refuse(call, code, message, retryable, param, known_epoch):
            call.fail(code, message, retryable=retryable, param=param, known_epoch=known_epoch)
        case Publish(topic, message):
            ctx.publish(topic, message)
        case _:
            assert_never(effect)


def _outcome(tag: Any, outcome: Answer | MeshError) -> Outcome:
    if isinstance(outcome, MeshError):
        return AskFailed(tag, outcome.code, outcome.message)
    return Answered(tag, outcome.message, outcome.sender)


class Driven(Protocol):
    """The owner of a core: an actor, or a part of one."""

    @property
    def ctx(self) -> Context: ...


class CoreDriver(Generic[Event, Command]):
    """See the module. It may be made before the actor has its context, which is needed only from the first event on.

    Args:
        owner: ends when the core raises.
        ends_owner: if False, the owner does not end: the failure is logged and counted, and the next event is handled;
            `feed` raises nothing but refusals.
        handle: takes an event and the time (`Context.now()`), returns commands in order.
        perform: performs one command. If it raises, that is a failure too: the core assumes that all were performed.
        refusals: exceptions by which `handle` rejects an event without any effect. They are raised to the feeder, and
            the core goes on; for an event that was queued they are logged, as its `feed` has already returned False.
        redact: makes the function that redacts fields of events; called once for each failure.
    """

    def __init__(
        self,
        owner: Driven,
        name: str,
        handle: Callable[[Event, float], Iterable[Command]],
        perform: Callable[[Command], None],
        *,
        refusals: tuple[type[Exception], ...] = (),
        setup: Mapping[str, Any] | None = None,
        redact: Callable[[], Redact] = lambda: keep_all,
        ends_owner: bool = True,
    ) -> None:
        self._owner = owner
        self._name = name
        self._handle = handle
        self._perform = perform
        self._refusals = refusals
        self._setup = dict(setup or {})
        self._redact = redact
        self._ends_owner = ends_owner
        self._events: deque[Event] = deque()
        self._recorder: EventRecorder[Event] = EventRecorder()
        self._is_handling = False
        self.has_failed = False

    def feed(self, event: Event) -> bool:
        """Handle an event and all that result from it. Raises what the core raises, once; then handles nothing more.

        Returns False if the event was only queued, because this was called by `perform`, or dropped after a failure.
        """
        if self.has_failed and self._ends_owner:
            return False
        if self._is_handling:
            self._events.append(event)
            return False
        self._is_handling = True
        try:
            self._take(event)
            while self._events:
                try:
                    self._take(self._events.popleft())
                # Not raised to the feeder of the first event: that one was handled, and the rest of the queue must be.
                except self._refusals as refusal:
                    self._owner.ctx.log.warning("event refused", core=self._name, error=str(refusal))
        finally:
            self._is_handling = False
        return True

    def _take(self, event: Event) -> None:
        now = self._owner.ctx.now()
        if not self._recorder.num_seen:
            # Not when this was made: the owner may have had no context then.
            self._owner.ctx.metrics.begin("mesh_core_failures_total", core=(self._name,))
        self._recorder.add(now, event)
        has_begun = False
        try:
            for command in self._handle(event, now):
                has_begun = True
                self._perform(command)
        except Exception as error:
            # Once commands have been performed the event has had an effect: anything raised then is a failure.
            if isinstance(error, self._refusals) and not has_begun:
                raise
            self._fail(error)
            if self._ends_owner:
                raise

    def _fail(self, error: Exception) -> None:
        is_first, self.has_failed = not self.has_failed, True
        ctx = self._owner.ctx
        what = f"{type(error).__name__}: {error}"
        ctx.metrics.count("mesh_core_failures_total", core=self._name)
        if not self._ends_owner:
            # No caller sees the error. The last events are logged only once: they take up to 1 MiB, and the cause may
            # recur with each heartbeat, several times a second.
            ctx.log.error("core goes on", core=self._name, exc_info=error)
            if not is_first:
                return
        writer = Writer(self._redact())
        recorded = self._recorder.events()
        written = writer.write_newest(recorded)
        left_out = self._recorder.num_seen - len(written)
        # The feeder's task supervisor logs the traceback.
        setup = {name: writer.write(value) for name, value in self._setup.items()}
        ctx.log.error(
            CORE_FAILED, core=self._name, error=what, setup=setup, num_events=len(written), num_left_out=left_out
        )
        for number, data in enumerate(written):
            ctx.log.error(CORE_EVENT, core=self._name, number=number, **data)
        if self._ends_owner:
            self._events.clear()
            # Not `what`: this goes to peers too, and the error's text may be a client's.
            why = f"its core {self._name} failed ({type(error).__name__}); its log has the events that led to it"
            ctx.end(f"its core {self._name} failed: {what}", CoreFailed(self._name, why))
