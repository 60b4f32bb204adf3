"""The process of an engine's mesh, as the engine's loop sees it: its news, its end, and what it says to people.

The last goes to the logger `kvmesh`, at level INFO.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from typing import Final

import msgspec

from nodes.engine.errors import StartFailed
from nodes.engine.launch import Launched
from nodes.engine.startup import AllReady, Begun, News, Refused

_STOP_S: Final = 15.0
"""A forced stop takes less than a second, and up to 10 s where the kernel still frees a device's memory."""
_KILLED_S: Final = 5.0
"""Until the kernel has ended a process that was killed."""
_PIECE_BYTES: Final = 1 << 16
"""What a pipe holds."""
_LAST_LINES: Final = 5
"""Of stderr, for an end without a reason: the error of a traceback and some of what led to it."""

_log = logging.getLogger("kvmesh")


class ProcessEnd:
    """The end of a process that somebody else has started. `done` is done once it has ended."""

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
            self.done.set_result(None)
        else:
            self._loop.add_reader(self._pidfd, self._on_end)

    def close(self) -> None:
        """Wait for it no longer; calling this again is harmless."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_end(self) -> None:
        self.close()
        self.done.set_result(None)


class SupervisorProcess:
    """One process, from the engine's loop. `ended` is done once it has ended."""

    def __init__(self, launched: Launched) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.let_go = launched.let_go
        self.ended: asyncio.Future[None] = loop.create_future()
        self.all_ready = asyncio.Event()
        self._news: asyncio.Future[News | None] = loop.create_future()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._rest = {"out": b"", "err": b""}
        self._pid = launched.pid
        self._pidfd = os.pidfd_open(self._pid)
        loop.add_reader(self._pidfd, self._on_end)
        self._pipes = {"out": launched.out, "err": launched.err}
        for name, descriptor in self._pipes.items():
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, self._read, name)

    async def begun(self) -> Begun:
        """What it says first. Raises StartFailed."""
        news = await asyncio.shield(self._news)
        if isinstance(news, Begun):
            self._news = self._loop.create_future()
            self._take_lines()
            return news
        raise self._failure(news)

    async def failed(self) -> StartFailed:
        """Return once the mesh has ended, or will, with the reason."""
        return self._failure(await asyncio.shield(self._news))

    async def end(self) -> None:
        """End it, with all that it has started, and wait for that."""
        self.let_go()
        for timeout_s in (_STOP_S, _KILLED_S):
            # Of the two times above.
            done, _ = await asyncio.wait([self.ended], timeout=timeout_s)
            if done:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _failure(self, news: News | None) -> StartFailed:
        if isinstance(news, Refused):
            return StartFailed(f"{news.what}: {news.why}; {news.do}")
        said = " / ".join(self._lines) or "without a word"
        return StartFailed(f"the supervisor has ended: {said}; log at level INFO what the logger 'kvmesh' has to say")

    def _read(self, name: str) -> None:
        try:
            piece = os.read(self._pipes[name], _PIECE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            self._loop.remove_reader(self._pipes[name])
        self._rest[name] += piece
        self._take_lines()

    def _take_lines(self) -> None:
        *lines, self._rest["err"] = self._rest["err"].split(b"\n")
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                self._lines.append(text.strip())
                _log.info("%s", text)
        while not self._news.done() and b"\n" in self._rest["out"]:
            line, _, self._rest["out"] = self._rest["out"].partition(b"\n")
            news = msgspec.json.decode(line, type=News)
            if isinstance(news, AllReady):
                self.all_ready.set()
            else:
                self._news.set_result(news)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # What it said before its end.
        for name in self._pipes:
            self._read(name)
            self._loop.remove_reader(self._pipes[name])
            os.close(self._pipes[name])
        with contextlib.suppress(ChildProcessError):
            # The program may wait for all its children itself, and had this one already.
            os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        if not self._news.done():
            self._news.set_result(None)
        self.ended.set_result(None)
