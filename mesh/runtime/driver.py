"""Drives a pure core: gives it one event at a time and performs what it wants done before it gets the next.

    feed(event) --> handle(event, now) --> command, command, ... --> perform --+
         ^                                                                     |
         +------------------- an event that performing brings about -----------+   queued, never recursed into

A core that raises has stopped half-way: what it changed stands, what it wanted done is lost. Nothing that it says after
that can be believed, so the actor ends and its next incarnation begins from what others know. The log gets the core's
last events, from which a test can run it again (`mesh/testing/replay.py`).

Not so where the end of the owner would cost more than a wrong state (`ends_owner` False): there one event is lost.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from mesh.actor import Context
from mesh.runtime.recording import EventRecorder, Redact, Writer, keep_all

Event = TypeVar("Event")
Command = TypeVar("Command")

CORE_FAILED: Final = "core failed"
CORE_EVENT: Final = "core event"
"""Lines of the log: one of the first, then the last events, oldest first."""


class Driven(Protocol):
    """Whose core it is: an actor, or a part of one."""

    @property
    def ctx(self) -> Context:
        """The actor's own."""
        ...


class CoreDriver(Generic[Event, Command]):
    """See the module. Made before the actor has its context, which is needed with the first event.

    Args:
        owner: ends when the core raises.
        ends_owner: False: it does not. The failure is logged and counted, and the next event handled; `feed` raises
            nothing but refusals.
        name: of the core, for the log.
        handle: takes an event and the time (`Context.now()`), returns commands in order.
        perform: carries one command out. What it raises is a failure too: the core believes the rest was done.
        refusals: what `handle` raises when it has taken nothing of an event. They go to the feeder, and all goes on;
            of an event that had to wait they are logged, since who fed it was told False long ago.
        setup: what the core was made of, for whoever runs it again.
        redact: makes what writes a field of an event; called once for each failure.
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
        """Handle an event and all that come of it. Raises what the core raises, once; after that nothing is handled.

        Returns False when called by `perform`: the event waits for its turn, and who fed the first is told True.
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
                # Not to the feeder of the first: its own event was taken, and what waits behind must not stay there.
                except self._refusals as refusal:
                    self._owner.ctx.log.warning("event refused", core=self._name, error=str(refusal))
        finally:
            self._is_handling = False
        return True

    def _take(self, event: Event) -> None:
        now = self._owner.ctx.now()
        self._recorder.add(now, event)
        has_begun = False
        try:
            for command in self._handle(event, now):
                has_begun = True
                self._perform(command)
        except Exception as error:
            # Of an event that commands were performed of something was taken: whatever is raised then is a failure.
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
            # Nobody above it sees the error. Its last events are written once: they are up to 1 MiB, and whatever made
            # it fail comes again with each heartbeat, several times a second.
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
            ctx.end(f"its core {self._name} failed: {what}")
