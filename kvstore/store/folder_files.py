"""A store's files that know their folder: whether they are still what lies there, and how they are opened anew.

A folder may be removed, replaced or laid open to others while its files are open, and a file system unmounted. What is
read and written then is right, but nobody finds it after a restart, and the space is not free until it is closed.
"""

import os
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from kvstore.errors import StoreError, StoreMissing
from kvstore.store.files import SlabFiles
from kvstore.store.place import HEAD_BYTES, HEADER_BYTES, HEADS, PAGES, require_own, require_private


class FolderFiles(SlabFiles):
    """`SlabFiles` of the files in `folder`; `again` opens them, or makes them, once these are closed."""

    def __init__(
        self,
        heads: int,
        pages: int,
        folder: Path,
        num_slots: int,
        page_bytes: int,
        tp_size: int,
        again: Callable[[], SlabFiles],
    ) -> None:
        super().__init__(heads, pages, str(folder / PAGES), num_slots, page_bytes, tp_size)
        self._folder = folder
        self._again = again
        self._mounted_at = _mount_of(folder)

    @override
    def look(self) -> str:
        # Of pages one slot more, where it is tried out how they can be written.
        wanted = ((self.num_slots + 1) * self.slot_bytes, HEADER_BYTES + self.num_slots * HEAD_BYTES)
        try:
            require_own(self._folder.parent, is_ours=False)
            require_own(self._folder, is_ours=True)
            for name, descriptor, num_bytes in zip((PAGES, HEADS), self.descriptors, wanted, strict=True):
                path = self._folder / name
                there, held = path.lstat(), os.fstat(descriptor)
                if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
                    return f"{path} is another file than the one that is open"
                if held.st_size < num_bytes:
                    return f"{path} has {held.st_size} bytes left of {num_bytes}"
                require_private(path, held)
        except StoreError as error:
            return error.message
        except OSError as error:
            return f"{self._folder} cannot be looked at ({error.strerror})"
        return ""

    @override
    def renew(self) -> None:
        try:
            # Before they are opened: their lock may be the one that is asked for then, and their space is missing.
            self.let_go()
            now = _mount_of(self._folder)
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be opened anew ({error.strerror}): see `dmesg`") from None
        if now != self._mounted_at:
            # Not made there: it would fill a disk that nobody has named.
            raise StoreMissing(
                f"{self._folder} was on the file system at {self._mounted_at}, and would be on that at {now}: mount it "
                "again, or start this host's KV agent again"
            )
        self.take_over(self._again())


def _mount_of(path: Path) -> Path:
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path
