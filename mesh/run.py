"""Runs one actor as the process it is in: uvloop, ZeroMQ, signals, and the pipe that says whether the supervisor lives.

    SIGTERM or SIGINT   drain, then stop; before the start is done, and the second time, stop at once
    Shutdown (asked)    stop at once; ask `Drain` before it where there is work
    supervisor's pipe   at its end stop at once: an actor without supervisor is nobody's

Called by `meshctl run ROLE`, by whatever the supervisor spawns or forks, and by custom actors' own programs.
"""

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog
import uvloop

from mesh.actor import Actor
from mesh.address import Address, Endpoint
from mesh.options import SystemOptions
from mesh.runtime.process_usage import process_usage
from mesh.runtime.run_directory import RunDirectory
from mesh.runtime.telemetry import LogSettings, setup_log
from mesh.system import ActorSystem
from mesh.transport.zeromq import ZeroMQTransport
from mesh.transport.zeromq_binding import ZeroMQOptions

_STOP_TIMEOUT_S: Final = 5.0
_MAX_FILES: Final = 65_536
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


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
) -> int:
    """Run until told to stop; the process's exit code, 0 unless it had to be forced.

    Args:
        actor: not started yet.
        address: its id and the epoch its supervisor issued.
        run_directory: of its mesh; says where the registry is and holds the ipc sockets.
        supervisor: where heartbeats go beside the registry.
        supervisor_fd: reading end of a pipe whose writing end only the supervisor holds.
        listen: as `host.json` of the run directory says, unless this says otherwise.
        options: of its system; host and supervisor are filled in.
        drain_timeout_s: how long a drain may take before the actor is stopped all the same.

    Raises:
        BadSetting: a variable of the log has a value that it cannot have.
        BindError: an address is taken or may not be listened on. Whatever the actor's `start` raises goes through too.
        Superseded: a later incarnation of the actor is known; what it holds has been given back.
        WrongMesh: the registry that was found is another mesh's, or (WrongSpec) its mesh serves something else.
    """
    log = LogSettings.of(os.environ)
    setup_log(level=log.level, json=not sys.stderr.isatty() if log.json is None else log.json)
    run_directory.create()
    _allow_many_files()
    host = run_directory.host()
    listen = listen or ZeroMQOptions.of_host(run_directory)
    given = options or SystemOptions()
    filled = replace(
        given, supervisor=supervisor, usage=process_usage, mesh=run_directory.mesh, vet_host=listen.vet_host,
        host=given.host or run_directory.host_name(), spec=host.spec if host is not None else {},
    )  # fmt: skip
    process = _Process(actor, address, listen, drain_timeout_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run(run_directory, filled, supervisor_fd))


def unsupervised(actor_id: str) -> Address:
    """The next incarnation of an actor that nobody supervises.

    Its epoch is the clock's milliseconds, so that every start is later than the last without a file to count them in.
    """
    return Address(actor_id, time.time_ns() // 1_000_000)


class _Process:
    """The life of one actor process."""

    def __init__(self, actor: Actor, address: Address, listen: ZeroMQOptions, drain_timeout_s: float) -> None:
        self._actor = actor
        self._address = address
        self._listen = listen
        self._drain_timeout_s = drain_timeout_s
        self._asked_to_drain = asyncio.Event()
        self._asked_to_stop = asyncio.Event()
        self._has_started = False
        self._was_forced = False
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(actor=address.actor_id, epoch=address.epoch)

    async def run(self, run_directory: RunDirectory, options: SystemOptions, supervisor_fd: int | None) -> int:
        """Start, wait, drain, stop."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if supervisor_fd is not None:
            os.set_blocking(supervisor_fd, False)
            loop.add_reader(supervisor_fd, partial(self._on_supervisor, loop, supervisor_fd))
        transport = ZeroMQTransport(self._listen)
        system = ActorSystem(self._actor, self._address, transport, run_directory.bootstrap(options.secret), options)
        life = asyncio.ensure_future(self._live(system))
        stop = asyncio.ensure_future(self._asked_to_stop.wait())
        try:
            await asyncio.wait((life, stop), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
        finally:
            stop.cancel()
            life.cancel()
            # Whatever hangs while stopping must not keep the process: its memory and sockets are waited for.
            watchdog = loop.call_later(_STOP_TIMEOUT_S, os._exit, 1)
            await asyncio.gather(life, stop, return_exceptions=True)
            await system.stop()
            watchdog.cancel()
            if supervisor_fd is not None:
                loop.remove_reader(supervisor_fd)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
        self._log.info("stopped", forced=self._was_forced)
        if system.over is not None:
            raise system.over
        return 1 if self._was_forced else 0

    async def _live(self, system: ActorSystem) -> None:
        """From the start to the end of the drain, or to the wish of a peer that this actor end."""
        # From the first moment on: who was replaced before it has started, or joined, never will.
        if not await _ended_first(system.start(), system.shutdown_asked()):
            return
        self._has_started = True
        if self._actor.joins:
            await _first_of(system.joined(), self._asked_to_drain.wait(), system.shutdown_asked())
        if not self._asked_to_drain.is_set():
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

    def _on_signal(self, number: signal.Signals) -> None:
        if self._asked_to_drain.is_set():
            self._was_forced = True
            self._asked_to_stop.set()
        elif not self._has_started:
            # What it waits for may never come, and it has nothing to drain.
            self._asked_to_stop.set()
        self._log.info("signal", signal=number.name, then="stop" if self._asked_to_stop.is_set() else "drain")
        self._asked_to_drain.set()

    def _on_supervisor(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        try:
            if os.read(fd, 4096):
                return
        except BlockingIOError:
            return
        except OSError as error:
            self._log.warning("supervisor pipe failed", error=str(error))
        loop.remove_reader(fd)
        self._log.warning("the supervisor is gone")
        self._asked_to_stop.set()


def _allow_many_files() -> None:
    """A linked peer takes eight descriptors; the soft limit of a shell is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _ended_first(work: Coroutine[Any, Any, object], end: Coroutine[Any, Any, object]) -> bool:
    """Whether `work` ended before `end` did, and raise what it raised; else it is cancelled, and has ended too."""
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
