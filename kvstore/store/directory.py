"""The directory that an operator gives for pages, and the stores in it, each in a folder of its own.

    DIR/kv-<digest of the identity>/heads, pages

A store is of one host, layout, number of ranks and numerics, all of which are in its folder's name: pages of another
model are never found, and after an update that changes how numbers are computed none of the old ones are. It belongs to
this user alone (0700, 0600), since pages are people's text; and to one process, which holds the lock of `heads`.

The disk space is reserved when a store is opened, so that a full disk is an error then.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Final

from kvstore.errors import (
    StoreBusy,
    StoreDenied,
    StoreError,
    StoreExhaustedSpace,
    StoreForeign,
    StoreReadOnly,
    StoreUnlockable,
)
from kvstore.store.folder_files import FolderFiles
from kvstore.store.place import (
    FORMAT_VERSION,
    HEAD_BYTES,
    HEADER_BYTES,
    HEADS,
    MAGIC,
    PAGES,
    StoreIdentity,
    encode_header,
    find_stores,
    require_own,
    require_private,
)

_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DENYING: Final = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR})
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PRIVATE: Final = 0o700


def open_files(directory: str | Path, identity: StoreIdentity, size_bytes: int) -> FolderFiles:
    """The files of this identity's store, made if there are none, locked, of `size_bytes` and all of it reserved.

    A store of another size is made larger, or smaller by its last slots. Raises StoreError of every kind.
    """
    num_slots = identity.num_slots(size_bytes)
    root = Path(directory)
    require_own(root, is_ours=False)
    folder = root / identity.folder
    with contextlib.ExitStack() as held, _told(folder):
        _make_folder(folder)
        heads = _open_file(held, folder / HEADS)
        _lock(heads, folder)
        _take_header(heads, folder, identity)
        pages = _open_file(held, folder / PAGES)
        with _told_if_full(root, folder, identity, size_bytes):
            _resize(heads, HEADER_BYTES + num_slots * HEAD_BYTES)
            # One slot more: `SlabFiles` tries out there how the file can be written.
            _resize(pages, (num_slots + 1) * identity.slot_bytes)
            again = partial(open_files, directory, identity, size_bytes)
            files = FolderFiles(heads, pages, folder, num_slots, identity.page_bytes, identity.tp_size, again)
        held.pop_all()
        return files


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(_PRIVATE)
        # A umask may have taken bits away, and a directory with the setgid bit adds one.
        folder.chmod(_PRIVATE)
    require_own(folder, is_ours=True)


def _open_file(held: contextlib.ExitStack, path: Path) -> int:
    descriptor = os.open(path, _OPEN | os.O_CREAT, 0o600)
    held.callback(os.close, descriptor)
    require_private(path, os.fstat(descriptor))
    return descriptor


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusy(
            f"{folder} belongs to another KV agent that is alive: stop it, or give this one another directory"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        raise StoreUnlockable(
            f"the file system of {folder} has no locks ({error.strerror}), so two agents could write the same pages: "
            "name a directory on a local disk"
        ) from None


def _take_header(descriptor: int, folder: Path, identity: StoreIdentity) -> None:
    """Check whose store this is, or write down that it is ours. Raises StoreForeign."""
    expected = encode_header(identity)
    if len(expected) > HEADER_BYTES:
        raise StoreError(f"the names of this store have {len(expected)} bytes, and {HEADER_BYTES} fit: shorten them")
    found = os.pread(descriptor, HEADER_BYTES, 0)
    # Reserved but not written: whoever made it was stopped before it could hold anything.
    if not any(found):
        os.pwrite(descriptor, expected, 0)
        os.fdatasync(descriptor)
    elif found != expected:
        version = int.from_bytes(found[len(MAGIC) : len(MAGIC) + 4], "little")
        if found.startswith(MAGIC) and version != FORMAT_VERSION:
            what = f"is a store of format {version}, but this version reads format {FORMAT_VERSION}"
        else:
            what = "is not a store of KV pages, or its header is damaged"
        raise StoreForeign(f"{folder} {what}: remove it, or name another directory; the store then starts empty")


def _resize(descriptor: int, num_bytes: int) -> None:
    old = os.fstat(descriptor).st_size
    # What lies behind the last slot must not come back as pages when the store is made larger again.
    if old > num_bytes:
        os.ftruncate(descriptor, num_bytes)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        # What the failed call took still counts as used. A store that was there before stays as it was.
        os.ftruncate(descriptor, old)
        raise


@contextlib.contextmanager
def _told(folder: Path) -> Generator[None]:
    """What the operating system says about a store, as errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EROFS:
            raise StoreReadOnly(f"{folder} is on a read-only file system: mount it writable, or name another") from None
        if error.errno in _DENYING:
            raise StoreDenied(f"{folder} cannot be opened ({error.strerror}): see who owns it, or remove it") from None
        raise StoreError(f"{folder} cannot be used ({error.strerror}): see `dmesg`, or name another disk") from None


@contextlib.contextmanager
def _told_if_full(root: Path, folder: Path, identity: StoreIdentity, size_bytes: int) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        available = os.statvfs(root)
        others = ", ".join(f"{each.path} {each.num_bytes}" for each in find_stores(root) if each.path != folder)
        raise StoreExhaustedSpace(
            f"{root} has {available.f_bavail * available.f_frsize} bytes left, but the store takes {size_bytes}: give "
            f"it less (--kv-disk-size), or make room; other stores there: {others or 'none'}"
        ) from None
