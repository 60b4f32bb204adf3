"""Starts the process of an engine's mesh, with the pipe that ends it with this process. Imports next to nothing: while
that process starts, this one imports what an engine is made of.

It is started by exec, never by fork: the process of an engine has threads.
"""

import errno
import os
import sys
import weakref
from pathlib import Path
from site import getsitepackages, getusersitepackages

import msgspec

from nodes.engine.errors import StartFailed
from nodes.engine.startup import Wish

_lifelines: "weakref.WeakSet[Launched]" = weakref.WeakSet()


class Launched:
    """A process, and this one's ends of its pipes: `out` has its news, `err` what it says to people.

    Raises StartFailed.
    """

    def __init__(self, wish: Wish) -> None:
        wished = encoded(wish)
        stdin, self._lifeline = os.pipe()
        _lifelines.add(self)
        self.out, its_out = os.pipe()
        self.err, its_err = os.pipe()
        # A supervisor must not wait for a process whose interpreter is busy, or hangs: it does without its lines.
        os.set_blocking(its_err, False)
        # Nobody reads it before the process runs: a wish that is larger than a pipe would be waited for, for ever.
        os.set_blocking(self._lifeline, False)
        try:
            _write_whole(self._lifeline, wished + b"\n")
            self.pid = _spawn(stdin, its_out, its_err)
        except OSError as error:
            # Its ends alone: those of the process are closed below, as after a good start.
            self.let_go()
            for descriptor in (self.out, self.err):
                os.close(descriptor)
            is_large = error.errno == errno.EMSGSIZE
            do = "put what you set into a topology file (`file=`)" if is_large else "make room for a process"
            raise StartFailed(f"the supervisor cannot be started: {error.strerror}; {do}") from error
        finally:
            for descriptor in (stdin, its_out, its_err):
                os.close(descriptor)

    def let_go(self) -> None:
        """Close the pipe, which ends the process; calling this again is harmless. Also called in forked children."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def encoded(wish: Wish) -> bytes:
    """As JSON. Raises StartFailed for a setting that is no data; a path is its text."""
    try:
        return msgspec.json.encode(wish, enc_hook=os.fspath)
    except TypeError as error:
        message = f"a setting cannot be told to the supervisor: {error}; give it as text, a number, a list or a dict"
        raise StartFailed(message) from error


def _write_whole(descriptor: int, data: bytes) -> None:
    """Raises OSError if the pipe does not hold all of it."""
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.EMSGSIZE, "its settings are larger than a pipe holds")


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
    for launched in list(_lifelines):
        launched.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
