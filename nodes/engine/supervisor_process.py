"""The process that an engine starts for its mesh, and the pipe that ends it with the engine's process.

It is started by exec, never by fork: the process of an engine has threads. What it says on stderr goes to the logger
`kvmesh`, at level INFO.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import weakref
from collections import deque
from pathlib import Path
from site import getsitepackages, getusersitepackages
from typing import Final

import msgspec

from nodes.engine.errors import StartFailed
from nodes.engine.startup import Begun, News, Refused, Wish

_STOP_S: Final = 15.0
"""A forced stop takes less than a second, and up to 10 s where the kernel still frees a device's memory."""
_KILLED_S: Final = 5.0
"""Until the kernel has ended a process that was killed."""
_PIECE_BYTES: Final = 1 << 16
"""What a pipe holds."""
_LAST_LINES: Final = 5
"""Of stderr, for an end without a reason: the error of a traceback and some of what led to it."""

_log = logging.getLogger("kvmesh")
_lifelines: "weakref.WeakSet[SupervisorProcess]" = weakref.WeakSet()


class SupervisorProcess:
    """One process, from the engine's loop. `ended` is done once it has ended."""

    def __init__(self, wish: Wish) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._news: asyncio.Future[News | None] = loop.create_future()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._rest = {"out": b"", "err": b""}
        stdin, self._lifeline = os.pipe()
        _lifelines.add(self)
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        # A supervisor must not wait for a process whose interpreter is busy, or hangs: it does without its lines.
        os.set_blocking(its_err, False)
        try:
            os.write(self._lifeline, msgspec.json.encode(wish) + b"\n")
            self._pid = _spawn(stdin, its_out, its_err)
        except OSError as error:
            self.let_go()
            for descriptor in (out, err):
                os.close(descriptor)
            raise StartFailed(f"the supervisor cannot be started: {error.strerror}; make room for a process") from error
        finally:
            for descriptor in (stdin, its_out, its_err):
                os.close(descriptor)
        self._pidfd = os.pidfd_open(self._pid)
        loop.add_reader(self._pidfd, self._on_end)
        self._pipes = {"out": out, "err": err}
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

    def let_go(self) -> None:
        """Close the pipe, which ends the process; calling this again is harmless. Also called in forked children."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

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
        if not self._news.done() and b"\n" in self._rest["out"]:
            line, _, self._rest["out"] = self._rest["out"].partition(b"\n")
            self._news.set_result(msgspec.json.decode(line, type=News))

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


def _spawn(stdin: int, out: int, err: int) -> int:
    """Start `python -m cli engine` in a session of its own, so that a terminal's Ctrl-C does not reach it."""
    actions = [(os.POSIX_SPAWN_DUP2, here, there) for there, here in enumerate((stdin, out, err))]
    arguments = [sys.executable, "-m", "cli", "engine"]
    return os.posix_spawn(sys.executable, arguments, _environment(), file_actions=actions, setsid=True)


def _environment() -> dict[str, str]:
    """This process's, with which the child finds the same packages as this one, and none of the working directory."""
    root = str(Path(__file__).parents[2])
    ours = "" if root in (*getsitepackages(), getusersitepackages()) else root
    path = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def _let_go_in_child() -> None:
    # Else the mesh would live as long as any child, and that may be long after the engine's process.
    for process in list(_lifelines):
        process.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
