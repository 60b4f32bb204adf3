"""Keeps KV pages as files of a folder, one file for each page: a store that another package brings to kvmesh.

    [kv.store]
    name = "folder"
    [kv.store.options]
    path = "/srv/kv-pages"      # an existing directory, on a network file system for several hosts
    max_pages = 100000          # the ones read or written least recently are removed beyond that

Files are as private as the folder is: KV pages are people's text.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.store.installed.plugins import InstalledStore, StoreContext


class FolderStore(InstalledStore):
    """Any number of processes may use one folder at once."""

    def __init__(self, context: StoreContext) -> None:
        root = Path(context.options["path"])
        if not root.is_dir():
            raise NotADirectoryError(f"{root} is no directory: make it, or correct `path` in [kv.store.options]")
        # A folder for each way of computing: under one hash, pages of two of them have other bits.
        self._folder = root / context.namespace
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._max_pages = int(context.options.get("max_pages", 100_000))
        self._num_pages = sum(1 for _ in os.scandir(self._folder))
        self._numbers = itertools.count()
        self._pruning = threading.Lock()

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        return [self._path(page_hash).exists() for page_hash in hashes]

    def get(self, hashes: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return [self._read(self._path(page_hash), buffer) for page_hash, buffer in zip(hashes, buffers, strict=True)]

    def put(self, hashes: Sequence[bytes], values: Sequence[memoryview]) -> list[bool]:
        for page_hash, value in zip(hashes, values, strict=True):
            # Whoever reads meanwhile finds all of it or nothing. Two processes never write one file.
            unfinished = self._folder / f"new-{os.getpid()}-{next(self._numbers)}"
            unfinished.write_bytes(value)
            unfinished.rename(self._path(page_hash))
        self._num_pages += len(hashes)
        if self._num_pages > self._max_pages:
            self._prune()
        return [True] * len(hashes)

    def remove(self, hashes: Sequence[bytes]) -> None:
        for page_hash in hashes:
            self._path(page_hash).unlink(missing_ok=True)

    def _path(self, page_hash: bytes) -> Path:
        return self._folder / page_hash.hex()

    def _read(self, path: Path, buffer: memoryview) -> bool:
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            # A file that was cut short is found by its checksum.
            file.readinto(buffer)
            os.utime(path)
            return True
        return False

    def _prune(self) -> None:
        """Remove a tenth, so that the folder is not listed for each page."""
        # Another process may remove the same files; then it is done in its place.
        with self._pruning, contextlib.suppress(FileNotFoundError):
            by_age = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in by_age[: len(by_age) - self._max_pages * 9 // 10]:
                path.unlink(missing_ok=True)
            self._num_pages = min(len(by_age), self._max_pages * 9 // 10)
