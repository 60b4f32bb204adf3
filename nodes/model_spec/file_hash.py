"""Hashes every byte of files, in pieces and with all cores; the hash depends on the bytes alone, not on the threads.

SHA-256: a core hashes 1.8 GB of it in a second with instructions that AMD has had since 2017, Intel's servers since
2021 and ARM since version 8, and 0.54 without; BLAKE2b 0.94 everywhere. Files are read, not mapped: one that somebody
cuts short would kill the process that has it mapped.
"""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self

import msgspec

from nodes.model_spec.small_files import open_file
from nodes.models.errors import ModelDamaged, ModelNotFound, WeightsChanged

_PIECE_BYTES: Final = 8 << 20
"""What one thread hashes at a time, in 6 ms. A gigabyte has 120: enough for all cores. Another size, another hash."""
_BUFFER_BYTES: Final = 1 << 18
"""Read and hashed before more is read: it stays in a core's cache."""
_MOST_THREADS: Final = 16
"""They hash 20 GB a second, more than disks and most memories give."""
_FORMAT: Final = b"kvmesh file 1"


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """By which a change of a file is noticed: whatever is written into it, or put in its place, changes one of these.

    `ctime_ns` is what nobody can set: `cp -p`, rsync and `touch` restore the other time.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @property
    def changed_ns(self) -> int:
        """When it was changed last; both times, for file systems that do not keep the one that cannot be set."""
        return max(self.mtime_ns, self.ctime_ns)


class FileHash(NamedTuple):
    """The hash of a file in one state, whose last change was `age_s` seconds ago when reading began."""

    state: FileState
    digest: bytes
    age_s: float


def state_of(path: str) -> FileState:
    """Raises ModelNotFound."""
    # Of an open file: a network's file system asks its server then, and otherwise says what it knew a minute ago.
    with closing(_opened(path)) as file:
        return _state(file)


class FileHasher:
    """Threads that hash one file after the other; as a context, which ends them.

    `told` is called with how many more bytes are done, roughly; `stop` has a call that is under way raise
    InterruptedError.
    """

    def __init__(self, told: Callable[[int], object] = lambda _: None) -> None:
        self._told = told
        self._is_stopped = False
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "hash")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """End early; from another thread."""
        self._is_stopped = True

    def hash(self, path: str) -> FileHash:
        """All bytes of a file. Raises WeightsChanged if it changes meanwhile, ModelNotFound, ModelDamaged."""
        with closing(_opened(path)) as file:
            state, began_ns = _state(file), time.time_ns()
            whole = hashlib.sha256(_FORMAT + state.size.to_bytes(8, "little"))
            begins = range(0, state.size, _PIECE_BYTES)
            try:
                for digest in self._threads.map(partial(self._piece, file.fileno(), state.size), begins):
                    whole.update(digest)
                    self._told(_PIECE_BYTES)
            except EOFError:
                raise _changed(path) from None
            except InterruptedError:
                raise
            except OSError as error:
                raise ModelDamaged(f"{path} cannot be read: {error.strerror}. Download it again.") from error
            # What is open may have been written into; at its path there may be another file by now.
            if not state == _state(file) == state_of(path):
                raise _changed(path)
        return FileHash(state, whole.digest(), (began_ns - state.changed_ns) / 1e9)

    def _piece(self, descriptor: int, size: int, begin: int) -> bytes:
        digest, end = hashlib.sha256(), min(begin + _PIECE_BYTES, size)
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, end - begin)))
        at = begin
        while at < end:
            if self._is_stopped:
                raise InterruptedError
            num_read = os.preadv(descriptor, [buffer[: end - at]], at)
            if not num_read:
                raise EOFError
            digest.update(buffer[:num_read])
            at += num_read
        return digest.digest()


def _opened(path: str) -> BinaryIO:
    try:
        return open_file(Path(path))
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}. Give a complete model.") from error


def _state(file: BinaryIO) -> FileState:
    found = os.fstat(file.fileno())
    return FileState(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def _changed(path: str) -> WeightsChanged:
    return WeightsChanged(
        f"{path} was changed while it was read, so nobody knows what would be served. Wait until it is written, then"
        " start again."
    )
