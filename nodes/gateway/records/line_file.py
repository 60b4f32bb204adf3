"""A file of lines that one process appends to; full, it becomes its own predecessor, and the next one begins."""

import os
from pathlib import Path

from mesh.runtime.log_stream import lies_at


class LineFile:
    """Lines at `path`, `max_bytes` at most, and as many in the file before it (`.1`). Opened when there is a line.

    Not through the log of the actor: that is kept small by cutting it, and lines of requests would push out deaths.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._num_bytes = 0
        self._is_torn = False

    def write(self, line: bytes) -> None:
        """Append a whole line. Raises OSError, on a full disk for example; a later one may well be written again."""
        if self._descriptor >= 0 and not lies_at(self._path, self._descriptor):
            # Moved or removed by somebody else.
            self.close()
        if self._descriptor < 0:
            self._open()
        elif self._num_bytes + len(line) > self._max_bytes:
            self._turn()
        if self._is_torn:
            # Of the last line only a part was written: whoever reads skips that one, and not this one too.
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._num_bytes += written
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(f"only {written} of {len(line)} bytes were written to {self._path}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        self._num_bytes = os.fstat(self._descriptor).st_size
        # An incarnation that was killed may have left the half of a line.
        self._is_torn = self._num_bytes > 0

    def _turn(self) -> None:
        self.close()
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._open()
