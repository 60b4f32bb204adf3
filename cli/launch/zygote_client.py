"""The supervisor's end of the zygote: starts it, asks for forks, starts it again if it dies.

A zygote that dies takes nothing with it but the requests it was asked: its forks are the supervisor's children.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

import msgspec

from cli.launch.children import Children, describe_exit, spawn_process
from cli.launch.role import RoleRun
from cli.launch.zygote import MAX_FRAME_BYTES, Forked, ForkFailed, ForkRequest, ZygoteMessage, ZygoteReady

# Where the child finds its descriptors; the pipe is at the same place as in actors that are started alone.
SUPERVISOR_FD: Final = 3
_CHANNEL_FD: Final = 4

OnForked = Callable[[int], None]
OnFailed = Callable[[str], None]


class ZygoteClient:
    """One zygote, started when first needed. Callbacks come on the loop, one of the two per request.

    It imports `modules`. One that leaves a request unanswered for `timeout_s` is killed.
    """

    def __init__(
        self,
        children: Children,
        modules: list[str],
        *,
        log: Path,
        supervisor_fd: int,
        environment: dict[str, str],
        timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._children = children
        self._modules = modules
        self._log = log
        self._supervisor_fd = supervisor_fd
        self._environment = environment
        self._timeout_s = timeout_s
        self._ending: asyncio.Task[None] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._numbers = 0
        self._waiting: dict[int, tuple[ForkRequest, OnForked, OnFailed]] = {}
        self.pid: int | None = None
        self.import_s = 0.0

    def start(self) -> None:
        """Start it if it does not run, so that it is warm when it is needed."""
        if self._channel is not None or self.pid is not None:
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        with there:
            arguments = ["-m", "cli.launch.zygote", str(_CHANNEL_FD), *self._modules]
            fds = {SUPERVISOR_FD: self._supervisor_fd, _CHANNEL_FD: there.fileno()}
            pid = spawn_process(arguments, self._log, fds, self._environment)
        self._channel, self._ready, self.pid = here, False, pid
        self._children.watch(pid, lambda status: self._ended(pid, status))
        self._loop.add_reader(here.fileno(), self._receive)

    def fork(self, run: RoleRun, log: Path, on_forked: OnForked, on_failed: OnFailed) -> None:
        """Ask for an actor; `on_forked(pid)` once it lives."""
        self._numbers += 1
        request = ForkRequest(number=self._numbers, run=run, log=str(log))
        self._waiting[request.number] = (request, on_forked, on_failed)
        self._loop.call_later(self._timeout_s, self._overdue, request.number)
        try:
            self.start()
        except OSError as error:
            self._fail_all(f"the zygote cannot be started: {error}")
            return
        if self._ready:
            self._send(request)

    def close(self) -> None:
        """Let it end, with whoever waits for unwatched children. Forks that were asked for and not answered fail."""
        self._hang_up()
        if self.pid is not None:
            self._children.unwatch(self.pid)
        if self._ending is not None:
            self._ending.cancel()
        self._fail_all("the supervisor stops")

    def _send(self, request: ForkRequest) -> None:
        assert self._channel is not None
        frame = msgspec.msgpack.encode(request)
        if len(frame) > MAX_FRAME_BYTES:
            _, _, on_failed = self._waiting.pop(request.number)
            self._loop.call_soon(on_failed, f"its configuration takes {len(frame)} of {MAX_FRAME_BYTES} bytes")
            return
        try:
            self._channel.send(frame)
        except OSError as error:
            sys.stderr.write(f"zygote: {error}\n")
            self._hang_up()

    def _receive(self) -> None:
        assert self._channel is not None
        try:
            frame = self._channel.recv(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            frame = b""
        if not frame:
            # Its end comes as a death, with a status to tell.
            self._loop.remove_reader(self._channel.fileno())
            return
        message = msgspec.msgpack.decode(frame, type=ZygoteMessage)
        match message:
            case ZygoteReady():
                self._ready = True
                self.import_s = message.import_s
                for request, _, _ in list(self._waiting.values()):
                    self._send(request)
            case Forked():
                if waiting := self._waiting.pop(message.number, None):
                    waiting[1](message.pid)
            case ForkFailed():
                if waiting := self._waiting.pop(message.number, None):
                    waiting[2](message.reason)
            case _:
                assert_never(message)

    def _overdue(self, number: int) -> None:
        if number in self._waiting and self.pid is not None:
            self._children.signal(self.pid, signal.SIGKILL)

    def _ended(self, pid: int, status: int) -> None:
        if pid != self.pid:
            return
        self._hang_up()
        reason = f"the zygote ended with {describe_exit(status)}, see {self._log}"
        self._ending = self._loop.create_task(self._end_nameless(reason), name="end-of-zygote")

    async def _end_nameless(self, reason: str) -> None:
        """It may have forked actors whose pid it told nobody: they end before others take their places."""
        await self._children.end_unwatched(0.0)
        self.pid = None
        self._fail_all(reason)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
            self._ready = False

    def _fail_all(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, _, on_failed in waiting.values():
            self._loop.call_soon(on_failed, reason)
