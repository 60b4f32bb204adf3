"""Pages whose bytes follow from their hashes, so that whoever reads one can tell whether it is the right one."""

import hashlib
from collections.abc import Sequence

import numpy as np

from kvstore.store.index import PageName

ROOT = b"root".ljust(16, b"\0")


def page_hash(*names: object) -> bytes:
    return hashlib.blake2b(repr(names).encode(), digest_size=16).digest()


def chain(prefix: object, length: int, *, root: bytes = ROOT) -> list[PageName]:
    """The pages of one prompt; its first pages are those of a shorter one of the same prefix."""
    names: list[PageName] = []
    parent = root
    for number in range(length):
        names.append(PageName(page_hash(prefix, number, parent), parent))
        parent = names[-1].page_hash
    return names


def content(page: bytes, num_bytes: int) -> bytes:
    """No sector of it is like another one, nor like one of another page."""
    first, second = np.frombuffer(page, np.uint64)
    words = (np.arange(-(-num_bytes // 8), dtype=np.uint64) + first) * (second | np.uint64(1))
    return words.tobytes()[:num_bytes]


def memory(names: Sequence[PageName], num_bytes: int) -> list[list[memoryview]]:
    """The pages of `names` in memory, of one rank."""
    return [[memoryview(bytearray(content(name.page_hash, num_bytes)))] for name in names]


def blank(count: int, num_bytes: int) -> list[list[memoryview]]:
    return [[memoryview(bytearray(num_bytes))] for _ in range(count)]
