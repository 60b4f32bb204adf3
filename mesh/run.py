"""Runs one actor as the current process: uvloop, ZeroMQ, signals, and the pipe that shows whether the supervisor lives.

    SIGTERM or SIGINT   drain, then stop; stop at once if the start is not complete, and on the second signal.
                        With a supervisor: pass it up, and go on until that says what to do
    supervisor's line   drain, then stop, when it says so; stop at once when it ends: an actor must not outlive it

Called by `meshctl run ROLE`, by the processes that the supervisor spawns or forks, and by custom actors' own programs.
"""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

import uvloop

from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.errors import NotReadyInTime
from mesh.membership.view import STARTING
from mesh.options import SystemOptions
from mesh.runtime.interruption import Interruption
from mesh.runtime.plain_structlog import structlog
from mesh.runtime.process_limits import peers_that_fit, raise_limits
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.supervisor_line import ActorEnd
from mesh.runtime.telemetry import LogSettings, setup_log
from mesh.runtime.trace_ring import TRACE, map_ring
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions

_STOP_TIMEOUT_S: Final = 5.0
"""A lease: by then the mesh has given this actor up anyway. Longer than a gateway's own end, 2 s (`STOP_S`)."""
_COLLECT_EVERY: Final = 10_000
"""Objects more than at the last collection; Python's own 700 are less than two requests have alive at a gateway. Calls
and messages leave no cycles (`tests/nodes/gateway/test_http.py`), so that collections free nothing, and took 6 % of a
gateway's time and 3 % of a scheduler's. One of so many objects takes 0.5 ms."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_PASSED_UP: Final = (*_SIGNALS, signal.SIGHUP)
"""By an actor with a supervisor, which is told to end by the hangup of a terminal too."""


def run_actor(
    actor: Actor,
    address: Address,
    *,
    run_directory: RunDirectory,
    supervisor: tuple[Address, Endpoint] | None = None,
    supervisor_fd: int | None = None,
    listen: ZeroMQOptions | None = None,
    options: SystemOptions | None = None,
    drain_timeout_s: float = 30.0,
    start_timeout_s: float | None = None,
) -> int:
    """Run until told to stop; returns the process's exit code, 0 unless the stop was forced.

    Args:
        actor: not started yet.
        address: its id and the epoch its supervisor issued.
        run_directory: of its mesh; says where the registry is and holds the ipc sockets.
        supervisor: where heartbeats go besides the registry.
        supervisor_fd: the actor's end of its line to the supervisor (`mesh/runtime/supervisor_line.py`), or of any pipe
            that ends with the supervisor.
        listen: where to listen; by default as `host.json` in the run directory says.
        options: for its system; `supervisor`, `mesh`, `spec`, `usage`, `vet_host` and an empty `host` are filled in,
            and `max_peers` is as many as there are descriptors for.
        drain_timeout_s: how long a drain may take before the actor is stopped regardless.
        start_timeout_s: how long its start may take without progress; None: any time, for one whose supervisor knows.

    Raises:
        BadSetting: an environment variable for the log has an invalid value.
        BindError: an address is taken or may not be listened on. What the actor's `start` raises is passed on too.
        CoreFailed: a core of the actor raised.
        DrainFailed: its `drain` raised; it has been stopped.
        ActorFailed: it said itself that it cannot go on.
        LimitReached: a limit of the system leaves no room for it.
        NotReadyInTime: it was not ready, or no member, within `start_timeout_s`.
        Superseded: a later incarnation of the actor is known; this one's resources have been released.
        WrongMesh: the registry that was found belongs to another mesh, or (WrongSpec) to one with another spec.
    """
    log = LogSettings.from_environment(os.environ)
    setup_log(level=log.level, json=not sys.stderr.isatty() if log.json is None else log.json)
    run_directory.create()
    raise_limits()
    gc.set_threshold(_COLLECT_EVERY)
    host = run_directory.host()
    listen = listen or ZeroMQOptions.of_host(run_directory)
    given = options or SystemOptions()
    filled = replace(
        given, supervisor=supervisor, usage=Interruption().usage, mesh=run_directory.mesh, vet_host=listen.vet_host,
        host=given.host or run_directory.host_name(), spec=host.spec if host is not None else {},
        max_peers=peers_that_fit(given.max_peers),
    )  # fmt: skip
    process = _Process(actor, address, listen, drain_timeout_s, start_timeout_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run(run_directory, filled, supervisor_fd))


def unsupervised(actor_id: str) -> Address:
    """The next incarnation of an unsupervised actor: its epoch is the clock in ms, so each start has a higher one."""
    return Address(actor_id, time.time_ns() // 1_000_000)


class _Process:
    """The life of one actor process."""

    def __init__(
        self,
        actor: Actor,
        address: Address,
        listen: ZeroMQOptions,
        drain_timeout_s: float,
        start_timeout_s: float | None = None,
    ) -> None:
        self._actor = actor
        self._address = address
        self._listen = listen
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._asked_to_drain = asyncio.Event()
        self._asked_to_stop = asyncio.Event()
        self._line: ActorEnd | None = None
        self._has_started = False
        self._is_member = not actor.joins
        self._was_forced = False
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(actor=address.actor_id, epoch=address.epoch)

    async def run(self, run_directory: RunDirectory, options: SystemOptions, supervisor_fd: int | None) -> int:
        loop = asyncio.get_running_loop()
        signals = _SIGNALS if supervisor_fd is None else _PASSED_UP
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        if supervisor_fd is not None:
            self._line = ActorEnd(supervisor_fd)
            loop.add_reader(supervisor_fd, self._on_supervisor, loop, self._line)
        options = replace(options, trace=map_ring(run_directory.path / TRACE, self._address, loop.time))
        transport = ZeroMQTransport(self._listen)
        system = ActorSystem(self._actor, self._address, transport, run_directory.bootstrap(options.secret), options)
        if self._start_timeout_s is not None:
            loop.call_later(self._start_timeout_s, self._look_at_start, system, self._start_timeout_s, "")
        life = asyncio.ensure_future(self._live(system))
        stop = asyncio.ensure_future(self._asked_to_stop.wait())
        try:
            await asyncio.wait((life, stop), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
        finally:
            stop.cancel()
            life.cancel()
            # Nothing that hangs while stopping may keep the process alive: others wait for its memory and sockets.
            watchdog = loop.call_later(_STOP_TIMEOUT_S, os._exit, 1)
            await asyncio.gather(life, stop, return_exceptions=True)
            await system.stop()
            watchdog.cancel()
            if supervisor_fd is not None:
                loop.remove_reader(supervisor_fd)
            for number in signals:
                loop.remove_signal_handler(number)
        self._log.info("stopped", forced=self._was_forced)
        if system.over is not None:
            raise system.over
        return 1 if self._was_forced else 0

    async def _live(self, system: ActorSystem) -> None:
        # Watched from the first moment: an actor that is replaced before it has started or joined never will.
        if not await _ended_first(system.start(), system.shutdown_asked()):
            return
        self._has_started = True
        if self._actor.joins:
            await _first_of(system.joined(), self._asked_to_drain.wait(), system.shutdown_asked())
        if not self._asked_to_drain.is_set():
            self._is_member = True
            where = system.describe().endpoint
            self._log.info("joined", role=self._actor.role, control=where.control, data=where.data, pid=os.getpid())
            await _first_of(system.shutdown_asked(), self._asked_to_drain.wait())
        if not self._asked_to_drain.is_set():
            return
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await system.drain()
        except TimeoutError:
            self._was_forced = True
            self._log.warning("drain timed out", after_s=self._drain_timeout_s)

    def _look_at_start(self, system: ActorSystem, timeout_s: float, progress_before: str) -> None:
        """End the actor if its start is not over and has come no further since the last look."""
        if self._is_member and system.describe().state != STARTING:
            return
        if (progress := self._actor.progress()) not in ("", progress_before):
            asyncio.get_running_loop().call_later(timeout_s, self._look_at_start, system, timeout_s, progress)
            return
        why = self._actor.ctx.join_trouble or "see what its log says that it waits for"
        reason = f"{self._address} was not ready within {timeout_s:g} s: {why}"
        self._actor.ctx.end(NotReadyInTime.code, NotReadyInTime(reason))

    def _on_signal(self, number: signal.Signals) -> None:
        if self._line is not None and self._line.pass_up(number):
            self._log.info("signal", signal=number.name, then="told the supervisor")
            return
        if self._asked_to_drain.is_set():
            self._was_forced = True
            self._asked_to_stop.set()
        elif not self._has_started:
            # What the start waits for may never come, and there is nothing to drain.
            self._asked_to_stop.set()
        self._log.info("signal", signal=number.name, then="stop" if self._asked_to_stop.is_set() else "drain")
        self._asked_to_drain.set()

    def _on_supervisor(self, loop: asyncio.AbstractEventLoop, line: ActorEnd) -> None:
        try:
            limits = line.read()
        except OSError as error:
            self._log.warning("supervisor line failed", error=str(error))
            limits = None
        if limits is None:
            loop.remove_reader(line.descriptor)
            self._log.warning("the supervisor is gone")
            self._asked_to_stop.set()
        elif limits:
            self._drain_timeout_s = min(self._drain_timeout_s, *limits)
            self._asked_to_drain.set()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _ended_first(work: Coroutine[Any, Any, object], end: Coroutine[Any, Any, object]) -> bool:
    """Whether `work` ended before `end`; raises what `work` raised. Otherwise `work` is cancelled and awaited."""
    task, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        ending.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
