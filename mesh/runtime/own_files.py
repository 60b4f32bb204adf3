"""Files of this user: read whole if they are plain and nobody else's, replaced at once, looked at cheaply."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding a damaged file raises: bytes that are not UTF-8 raise a ValueError."""

_MAX_BYTES: Final = 1 << 24
"""Files of a run directory have less than 1 KB, a manifest of 1,000 processes 100 KB; a huge one must not take all
memory."""


class NotPlain(OSError):
    """A pipe, a device or the like, which might never end."""


class NotPrivate(OSError):
    """Another user owns the file, or may read or change what only its owner may; says what to do."""


def read_file(path: Path, max_bytes: int = _MAX_BYTES, *, is_secret: bool = False, follows: bool = False) -> bytes:
    """The content of a plain file of this user, `max_bytes` of it at most; of a link's target if it `follows`.

    Raises NotPlain, NotPrivate (also if it `is_secret` and others may read it), or another OSError.
    """
    # Without O_NONBLOCK a pipe would be waited for.
    flags = os.O_NONBLOCK if follows else os.O_NONBLOCK | os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        # Checked on the descriptor, not on the path, which may refer to another file a moment later.
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotPlain(f"{path} is not a regular file")
        require_own(path, status, is_secret=is_secret)
        return file.read(max_bytes)


def require_own(path: Path, status: os.stat_result, *, is_secret: bool = True) -> None:
    """Raise NotPrivate for what another user owns, or, if it `is_secret`, may read or change."""
    if status.st_uid != os.getuid():
        raise NotPrivate(f"{path} belongs to user {status.st_uid}: make this user its owner")
    if is_secret and stat.S_IMODE(status.st_mode) & 0o077:
        raise NotPrivate(f"{path} may be read or changed by other users: chmod go-rwx {path}")


class WatchedFile:
    """Tells when a file is another than at the last look. One that is not there is another at each look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None

    def has_changed(self) -> bool:
        """Whether it was replaced or changed since the last call, or this is the first. Costs a `stat`."""
        before, self._seen = self._seen, None
        with contextlib.suppress(OSError):
            status = self.path.stat()
            # The change time, too: a `chmod` leaves the others as they are.
            self._seen = status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
        return self._seen is None or self._seen != before

    def forget(self) -> None:
        """Have the next look find it changed: it could not be read."""
        self._seen = None


def replace_file(path: Path, content: bytes) -> bool:
    """Replace a file's content. Atomic: readers see the old content or the new.

    If there is no room for a second file, the old one is overwritten and the result is False: for a moment readers may
    see neither. Raises OSError if the old one has no room either; it is then unchanged.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_over(path, content):
            raise
        return False
    return True


def _write_over(path: Path, content: bytes) -> bool:
    """Overwrite the blocks that a file already has, which works on a full disk; False if they are too few."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_blocks * 512 < len(content):
            return False
        os.pwrite(descriptor, content, 0)
        os.truncate(descriptor, len(content))
        # Touched again now that it is complete, so that a reader that has seen it half written reads it again.
        os.utime(descriptor)
        return True
    finally:
        os.close(descriptor)
