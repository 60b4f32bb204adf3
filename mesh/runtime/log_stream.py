"""Where a log is written: it may fail, and the file may be moved or removed by somebody else."""

import contextlib
import fcntl
import os
import stat
from typing import Final, TextIO

_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_STANDARD: Final = (1, 2)
"""Output of libraries and crashes, which goes where the log goes."""


class LogStream:
    """Writes to a log that may fail: a full disk or a vanished reader must not stop an actor.

    A file that was opened for appending is made anew at its path, with the next line, once it no longer lies there:
    logrotate moves it, and cleaners of /tmp remove what is old. What was written to it since would be found by nobody,
    nor would its size be bounded.
    """

    def __init__(self, target: TextIO) -> None:
        self.target = target
        self._path = _path_of(target)

    def write(self, text: str) -> int:
        try:
            if self._path and not lies_at(self._path, self.target.fileno()):
                self._make_anew()
            return self.target.write(text)
        except (OSError, ValueError):
            return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.target.flush()

    def _make_anew(self) -> None:
        # Where there is no folder any more, lines go on to where nobody finds them: better than none for a debugger.
        with contextlib.suppress(OSError):
            new = os.open(self._path, _FLAGS, 0o600)
            try:
                self.target.flush()
                old = os.fstat(self.target.fileno())
                for one in {*_STANDARD, self.target.fileno()}:
                    with contextlib.suppress(OSError):
                        if os.path.samestat(os.fstat(one), old):
                            os.dup2(new, one, inheritable=one in _STANDARD)
            finally:
                os.close(new)


def lies_at(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Whether an open file is the one at `path`; true where that cannot be said. Raises OSError for a closed file."""
    opened = os.fstat(descriptor)
    try:
        return os.path.samestat(os.stat(path), opened)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _path_of(target: TextIO) -> str:
    """Of a file that is appended to; else empty: what a shell opened otherwise is its own affair."""
    try:
        descriptor = target.fileno()
        is_appended = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        if not is_appended or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return path if lies_at(path, descriptor) else ""
    except (OSError, ValueError):
        return ""
