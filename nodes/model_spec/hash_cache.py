"""Hashes of weight files that were read before: in this process, and in a file of the user's cache.

A hash counts only for a file in exactly the state in which it was read. The file (`$XDG_CACHE_HOME/kvmesh/weights`) is
believed only if nobody else could have written it, and begins with a hash of its own rest. Whatever is wrong with it,
or with its place (a home that is read-only, a disk that is full), costs that files are hashed again.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from nodes.model_spec.file_hash import FileHash, FileState

SETTLED_S: Final = 2.0
"""A file that changed less than so long before it was read may change again without a trace: times are as coarse as 2 s
(FAT), 1 s (ext3, some servers), or a tick of the kernel's clock, 10 ms at most."""
KEPT_S: Final = 60.0
"""For other processes a hash is kept only if the file had not changed for so long. Who writes through a mapping changes
a page that the kernel has noted as changed without another note, until the page is written back: after 35 s."""
_MOST_FILES: Final = 1024
"""The last ones; a model of 400 billion parameters has 200."""
_MOST_BYTES: Final = 8 << 20
"""More than so many files take, with the longest paths that a kernel opens: it would not be ours."""
_FORMAT: Final = b"kvmesh weights 1\n"
_HEAD_BYTES: Final = len(_FORMAT) + 65
"""With a SHA-256 in hexadecimal and the end of the line."""
_STALE_TEMPORARY_S: Final = 60.0
"""What a killed process has left; writing one takes milliseconds."""


class _Key(NamedTuple):
    """On a home that several hosts share, each has a file of its own at a path."""

    path: str
    device: int
    inode: int


class _Entry(NamedTuple):
    key: _Key
    state: FileState
    digest: bytes


_read_here: Final[dict[str, FileHash]] = {}
"""By path: a command that plans a mesh twice, in two processes of which one forks, reads once, whatever can be kept."""


def find_hashes(states: dict[str, FileState]) -> dict[str, bytes]:
    """The hashes of those files that are known in these states, by path."""
    found = {path: one.digest for path, one in _read_here.items() if one.state == states.get(path)}
    entries = _entries() if len(found) < len(states) else {}
    for path, state in states.items():
        entry = entries.get(_Key(path, state.device, state.inode))
        if entry is not None and entry.state == state:
            found.setdefault(path, entry.digest)
    return found


def keep_hashes(found: dict[str, FileHash]) -> None:
    """Keep what was just read, by path, as far as it can be told from what it may become."""
    _read_here.update({path: one for path, one in found.items() if one.age_s >= SETTLED_S})
    old = {path: one for path, one in found.items() if one.age_s >= KEPT_S}
    with contextlib.suppress(OSError):
        if old:
            _write(old)


def forget_hashes() -> None:
    """Forget what this process has read: for tests and benchmarks, to be as another one."""
    _read_here.clear()


def _folder() -> Path:
    """Raises OSError if this user has no place for a cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says its specification.
    place = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    if not place.is_absolute():
        raise FileNotFoundError
    return place / "kvmesh"


def _entries() -> dict[_Key, _Entry]:
    """What the file has, oldest first; empty if it is not ours, or damaged."""
    try:
        folder = _folder()
        if not _is_ours(os.lstat(folder), stat.S_ISDIR):
            return {}
        descriptor = os.open(folder / "weights", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not _is_ours(os.fstat(descriptor), stat.S_ISREG):
                return {}
            data = file.read(_MOST_BYTES + 1)
        body = data[_HEAD_BYTES:]
        if len(data) > _MOST_BYTES or data[:_HEAD_BYTES] != _head(body):
            return {}
        return {entry.key: entry for entry in msgspec.json.decode(body, type=list[_Entry])}
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}


def _is_ours(status: os.stat_result, kind: Callable[[int], bool]) -> bool:
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _head(body: bytes) -> bytes:
    return _FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _write(found: dict[str, FileHash]) -> None:
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(os.lstat(folder), stat.S_ISDIR):
        return
    entries = _entries()
    for path, (state, digest, _) in found.items():
        key = _Key(path, state.device, state.inode)
        entries.pop(key, None)
        entries[key] = _Entry(key, state, digest)
    body = msgspec.json.encode(list(entries.values())[-_MOST_FILES:])
    for left in folder.glob("weights.*"):
        if left.lstat().st_mtime < time.time() - _STALE_TEMPORARY_S:
            left.unlink(missing_ok=True)
    # Readers find the old file or the new one. Of two processes that write at once one is lost: it is read again then.
    descriptor, name = tempfile.mkstemp(prefix="weights.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(_head(body) + body)
        os.replace(name, folder / "weights")
    except OSError:
        os.unlink(name)
        raise
