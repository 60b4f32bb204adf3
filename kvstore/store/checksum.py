"""Checksums: of a page's bytes, and of the heads that name pages.

A page's is CRC-32 beside a folded sum of its words, 64 bits in all. CRC-32 alone finds every burst of up to 32 bits and
every two flipped bits in a page, but lets one in 2**32 pages of garbage pass; a failing disk may hand out as many. Two
kinds of arithmetic fail for unlike reasons, so garbage passes both with a chance of 2**-64. Not a sum with weights
alone, which is three times as fast: bit 63 flipped in two words leaves it as it is, as a stuck data line would.

Neither is a defence against somebody who writes the file on purpose; its mode is (0600).
"""

from collections.abc import Sequence
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_WORD_BYTES: Final = 8
"""Of numpy's widest integer, in which a sum goes at the speed of memory."""
_FOLD: Final = 2**32 - 5
"""The largest prime below 2**32: the remainder depends on all 64 bits of a sum."""
_MIX: Final = tuple(np.uint64(number) for number in (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31))


def page_checksum(parts: Sequence[memoryview]) -> int:
    """64 bits over a page, given as its parts (one for each rank) in order. Releases the GIL for most of its time."""
    crc, total = 0, 0
    for part in parts:
        crc = crc32(part, crc)
        # The few bytes behind the last whole word are left to the CRC.
        words = np.frombuffer(part, np.uint64, len(part) // _WORD_BYTES)
        total += int(words.sum())
    return crc << 32 | total % 2**64 % _FOLD


def row_checksums(rows: Words, seeds: Words) -> Words:
    """One 64-bit checksum for each row of words, shape (rows, words), and its seed, shape (rows,).

    Rows are short and a store has a million of them: all are mixed at once, a third of what CRC-32 of each takes.
    """
    mixed = seeds.copy()
    for column in rows.T:
        mixed = _mix(mixed ^ column)
    return mixed


def _mix(words: Words) -> Words:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection in which each bit changes half of all bits."""
    first, by, second, again, last = _MIX
    words = (words ^ words >> first) * by
    words = (words ^ words >> second) * again
    return words ^ words >> last
