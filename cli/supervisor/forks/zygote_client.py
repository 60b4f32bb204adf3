"""The supervisor's end of the zygote: starts it, asks for forks, keeps a spare, and starts it again if both are dead.

    none --start--> warming --ZygoteReady--> serving, asked for a spare <--ZygoteReady-- spare
      ^                |                        |
      |               dies                     dies
      |                v                        v
      +---- ending: unreported forks are killed, requests fail ----> the spare serves, if there is one

A zygote that dies takes only its open requests with it: its forks are the supervisor's children.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, assert_never

import msgspec

from cli.supervisor.forks.zygote import (
    MAX_FRAME_BYTES,
    Forked,
    ForkFailed,
    ForkRequest,
    SpareRequest,
    ZygoteMessage,
    ZygoteReady,
    ZygoteRequest,
)
from cli.supervisor.kept.log_files import LastLines
from cli.supervisor.processes.by_pid import Process
from cli.supervisor.processes.children import Children, spawn_process
from cli.supervisor.processes.exits import Exit, Exits

_CHANNEL_FD: Final = 3
"""Where the child finds its channel."""

_SPARE: Final = 0
"""The number of every request for a spare, of which there is one at a time; those of actors are above it."""

OnForked = Callable[[Process], None]
OnFailed = Callable[[str, bool], None]
"""Called with the reason, and whether somebody else killed the zygote."""


class _Zygote:
    """One zygote. A spare has no `process` until the zygote that forks it reports it."""

    def __init__(self, channel: socket.socket, process: Process | None = None) -> None:
        self.channel = channel
        self.process = process
        self.ready = False
        self.is_overdue = False


class _Waiting(NamedTuple):
    """A request without an answer. `line` is open until there is one."""

    request: ForkRequest
    line: int
    on_forked: OnForked
    on_failed: OnFailed


class ZygoteClient:
    """One zygote and its spare, started when first needed. Callbacks come on the loop, one of the two per request.

    The zygote imports `modules`. If it leaves a request unanswered for `timeout_s`, which is `start_timeout_s` of the
    settings, it is killed. `on_death` is told of every end.
    """

    def __init__(
        self,
        children: Children,
        exits: Exits,
        modules: list[str],
        *,
        on_death: Callable[[Exit], None],
        log: Path,
        environment: dict[str, str],
        timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._children = children
        self._exits = exits
        self._on_death = on_death
        self._modules = modules
        self._log = log
        self._last_lines = LastLines(log)
        self._environment = environment
        self._timeout_s = timeout_s
        self._ending: asyncio.Task[None] | None = None
        self._is_closed = False
        self._serving: _Zygote | None = None
        self._spare: _Zygote | None = None
        self._numbers = 0
        self._waiting: dict[int, _Waiting] = {}
        self._lost: dict[int, _Waiting] = {}

    @property
    def pids(self) -> list[int]:
        processes = (zygote.process for zygote in (self._serving, self._spare) if zygote is not None)
        return [process.pid for process in processes if process is not None]

    def start(self) -> None:
        """Start a zygote if none runs, so that it is warm when needed. If that fails, so do the waiting requests."""
        # Nothing is started while unreported forks of the last one are being killed: new ones would look the same.
        if self._is_closed or self._serving is not None or self._ending is not None:
            return
        self._last_lines = LastLines(self._log)
        here, there = _channel()
        with there:
            # `there` is closed here at once: a side sees the other one's end only if it holds no copy of it.
            arguments = ["-m", "cli.supervisor.forks.zygote", str(_CHANNEL_FD), *self._modules]
            try:
                process = spawn_process(arguments, self._log, {_CHANNEL_FD: there.fileno()}, self._environment)
            except OSError as error:
                here.close()
                self._fail_all(f"the zygote cannot be started: {error}")
                return
        self._serving = _Zygote(here, process)
        self._watch(self._serving, process)

    def fork(self, log: Path, line: int, on_forked: OnForked, on_failed: OnFailed) -> None:
        """`line` is the actor's end of it, and remains the caller's, who closes it once told how this went."""
        self._numbers += 1
        request = ForkRequest(number=self._numbers, log=str(log))
        self._waiting[request.number] = _Waiting(request, line, on_forked, on_failed)
        # Not cancelled by an answer: the number is no longer waited for then, and the call does nothing.
        self._loop.call_later(self._timeout_s, self._overdue, request.number)
        self.start()
        if self._serving is not None and self._serving.ready:
            self._send(self._serving, request, line)
        elif self._is_closed:
            self._fail_all()

    def close(self) -> None:
        """Let both zygotes end; `Children.end_unwatched` waits for them. Unanswered requests fail, now and later."""
        self._is_closed = True
        for zygote in (self._serving, self._spare):
            if zygote is not None:
                self._hang_up(zygote)
                if zygote.process is not None:
                    # Its end is wanted now, and must not count as a death.
                    self._children.unwatch(zygote.process.pid)
        if self._ending is not None:
            # It kills whom nobody knows, which those that were let go above would be among.
            self._ending.cancel()
        self._serving = self._spare = None
        self._fail_all()

    def _watch(self, zygote: _Zygote, process: Process) -> None:
        zygote.process = process
        self._children.watch(process, lambda status: self._ended(zygote, status))
        self._loop.add_reader(zygote.channel.fileno(), self._receive, zygote)

    def _send(self, zygote: _Zygote, request: ZygoteRequest, descriptor: int) -> None:
        # The zygote is dead, which its exit will tell, or hangs, which the request's own deadline will.
        with contextlib.suppress(OSError):
            socket.send_fds(zygote.channel, [msgspec.msgpack.encode(request)], [descriptor])

    def _ask_spare(self) -> None:
        serving = self._serving
        if self._spare is not None or serving is None or not serving.ready:
            return
        here, there = _channel()
        self._spare = _Zygote(here)
        with there:
            self._send(serving, SpareRequest(number=_SPARE), there.fileno())

    def _receive(self, zygote: _Zygote) -> None:
        while True:
            try:
                frame = zygote.channel.recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:
                # Its end is reported as a death, with a status.
                self._loop.remove_reader(zygote.channel.fileno())
                return
            self._take(zygote, msgspec.msgpack.decode(frame, type=ZygoteMessage))

    def _take(self, zygote: _Zygote, message: ZygoteMessage) -> None:
        match message:
            case ZygoteReady():
                zygote.ready = True
                if zygote is self._serving:
                    self._serve(zygote)
            case Forked() if message.number == _SPARE:
                if self._spare is not None:
                    self._watch(self._spare, Process(message.pid, message.start_time))
            case ForkFailed() if message.number == _SPARE:
                # The next death of either zygote asks again; until then there is no spare.
                self._drop_spare()
            case Forked():
                if waiting := self._waiting.pop(message.number, None):
                    waiting.on_forked(Process(message.pid, message.start_time))
            case ForkFailed():
                if waiting := self._waiting.pop(message.number, None):
                    waiting.on_failed(message.reason, False)
            case _:
                assert_never(message)

    def _serve(self, zygote: _Zygote) -> None:
        for waiting in list(self._waiting.values()):
            self._send(zygote, waiting.request, waiting.line)
        # After the waiting requests.
        self._ask_spare()

    def _overdue(self, number: int) -> None:
        serving = self._serving
        if number in self._waiting and serving is not None and serving.process is not None:
            serving.is_overdue = True
            self._children.signal(serving.process.pid, signal.SIGKILL)

    def _ended(self, zygote: _Zygote, status: int) -> None:
        if self._is_closed:
            # Found dead before it was let go, and told afterwards.
            return
        # What it reported before its end still counts.
        self._receive(zygote)
        self._hang_up(zygote)
        end = self._exits.read(status)
        if zygote.is_overdue and status == -signal.SIGKILL:
            # Its signal alone would not say that it was ours, nor which setting to raise.
            failed = "did not answer" if zygote.ready else "was not ready"
            text = f"it {failed} within start_timeout_s ({self._timeout_s:g} s) and was killed"
            end = end._replace(text=text, foreign=False)
        self._on_death(end)
        if zygote is self._spare:
            self._spare = None
            self._ask_spare()
        elif zygote is self._serving:
            self._serving = None
            if self._spare is not None and self._spare.process is None:
                # Its pid was never reported, so it is killed with the other unreported forks.
                self._drop_spare()
            self._lost, self._waiting = self._waiting, {}
            self._ending = self._loop.create_task(self._end_nameless(end), name="end-of-zygote")

    async def _end_nameless(self, end: Exit) -> None:
        """Kill actors that were forked but whose pids were never reported, before others take their places."""
        await self._children.end_unwatched(0.0)
        self._ending = None
        self._serving, self._spare = self._spare, None
        reason = self._last_lines.added_to(f"the zygote ended: {end.text}, see {self._log}")
        lost, self._lost = self._lost, {}
        for waiting in lost.values():
            waiting.on_failed(reason, end.foreign)
        if self._serving is not None and self._serving.ready:
            self._serve(self._serving)
        elif end.foreign or self._waiting:
            # Warm again before it is needed. One that ended by itself is started again only when an actor is.
            self.start()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._hang_up(self._spare)
            self._spare = None

    def _hang_up(self, zygote: _Zygote) -> None:
        if zygote.channel.fileno() >= 0:
            self._loop.remove_reader(zygote.channel.fileno())
            zygote.channel.close()

    def _fail_all(self, reason: str = "the supervisor stops") -> None:
        failed, self._waiting, self._lost = self._lost | self._waiting, {}, {}
        for waiting in failed.values():
            self._loop.call_soon(waiting.on_failed, reason, False)


def _channel() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    return here, there
