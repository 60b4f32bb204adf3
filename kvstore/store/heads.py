"""The 64 bytes that say what a slot of a store holds.

    offset  bytes  field, little-endian
    0       16     chained hash of the page
    16      16     its parent's hash
    32      8      sequence: unique in the store and rising, 0 in a slot that holds nothing
    40      8      checksum of the page's data (`checksum.page_checksum`)
    48      8      0
    56      8      seal: checksum of all that is before it, and of the slot's number

A head is zeroed before its slot is written and written after it, so a process that is killed leaves no head, or one
whose data is whole. A power cut may keep any of these writes and lose the others: then the data's checksum tells. The
slot's number is sealed in, so a head that a disk has put elsewhere counts nowhere. Pure.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.store.checksum import Words, row_checksums
from kvstore.store.place import HEAD_BYTES

HEAD_WORDS: Final = HEAD_BYTES // 8
HASH_WORDS: Final = slice(0, 2)
PARENT_WORDS: Final = slice(2, 4)
SEQUENCE_WORD: Final = 4
CHECKSUM_WORD: Final = 5
_SEAL_WORD: Final = 7
_KEY: Final = struct.Struct("=QQ")


class Head(NamedTuple):
    """What a slot holds: `checksum` is of its data. Hashes have 16 bytes."""

    page_hash: bytes
    parent_hash: bytes
    sequence: int
    checksum: int


def encode_heads(first: int, heads: Sequence[Head]) -> bytes:
    """The heads of slots `first` and following, sealed."""
    rows = np.zeros((len(heads), HEAD_WORDS), np.uint64)
    rows[:, HASH_WORDS] = hash_words([head.page_hash for head in heads])
    rows[:, PARENT_WORDS] = hash_words([head.parent_hash for head in heads])
    rows[:, SEQUENCE_WORD] = [head.sequence for head in heads]
    rows[:, CHECKSUM_WORD] = [head.checksum for head in heads]
    seal(rows, first)
    return rows.tobytes()


def seal(rows: Words, first: int) -> None:
    """Seal the heads of slots `first` and following, shape (slots, 8)."""
    rows[:, _SEAL_WORD] = _seals(rows, first)


def decode_heads(data: bytes | bytearray | memoryview) -> Words:
    """Heads as words, shape (slots, 8); a part of a head at the end is left out."""
    count = len(data) // HEAD_BYTES
    return np.frombuffer(data, np.uint64, count * HEAD_WORDS).reshape(count, HEAD_WORDS)


def are_sound(rows: Words, first: int) -> "npt.NDArray[np.bool_]":
    """Which of the heads of slots `first` and following are whole, and of a slot that holds something."""
    return (rows[:, SEQUENCE_WORD] > 0) & (rows[:, _SEAL_WORD] == _seals(rows, first))


def hash_words(hashes: Sequence[bytes]) -> Words:
    """Hashes of 16 bytes as words, shape (hashes, 2)."""
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(len(hashes), 2)


def hash_key(page_hash: bytes) -> tuple[int, int]:
    """One hash as its two words."""
    first, second = _KEY.unpack(page_hash)
    return first, second


def _seals(rows: Words, first: int) -> Words:
    slots = np.arange(first, first + len(rows), dtype=np.uint64)
    return row_checksums(rows[:, :_SEAL_WORD], slots)
