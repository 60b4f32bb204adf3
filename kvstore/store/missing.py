"""Why pages are not in a store: what became of those that were there, or were to be. The last ones, in columns.

A page that is found nowhere here was never told to this process, or so long ago that it is forgotten. Pure.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.protocol import NOT_OPEN
from kvstore.store.chains import NO_SLOT, Chains
from kvstore.store.checksum import Words
from kvstore.store.heads import hash_words

EVICTED: Final = "evicted"
CORRUPT: Final = "corrupt"
UNSIGNED: Final = "unsigned"
UNREADABLE: Final = "unreadable"
QUEUE_FULL: Final = "queue_full"
CHANGED: Final = "changed"
WRITE_FAILED: Final = "write_failed"
READ_ONLY: Final = "read_only"
FLUSHED: Final = "flushed"
LOST: Final = "lost"
"""The store's files were taken away."""
_WHYS: Final = (
    "", EVICTED, CORRUPT, UNREADABLE, QUEUE_FULL, CHANGED, WRITE_FAILED, READ_ONLY, FLUSHED, NOT_OPEN, UNSIGNED,
    LOST,
)  # fmt: skip
REMEMBERED: Final = 1 << 16
"""A million tokens of prompts in pages of 16, in 2 MB; as a dictionary they would be 10."""


class MissingPages:
    """Pages by hash, each with the last thing that became of it; the oldest are forgotten."""

    def __init__(self, num_remembered: int = REMEMBERED) -> None:
        self._keys: Words = np.zeros((num_remembered, 2), np.uint64)
        self._whys = np.zeros(num_remembered, np.uint8)
        self._chains = Chains(self._keys)
        self._next = 0

    def add(self, keys: Words, why: str) -> None:
        """Remember pages, by hashes as words of shape (pages, 2). One that is known keeps its place in the order."""
        code = _WHYS.index(why)
        for first, second in keys.tolist():
            slot = self._chains.find_one((first, second))
            if slot == NO_SLOT:
                slot = self._next
                self._next = (slot + 1) % len(self._whys)
                if self._whys[slot]:
                    self._chains.remove(slot)
                self._keys[slot] = first, second
                self._chains.add(slot)
            self._whys[slot] = code

    def add_hashes(self, hashes: Sequence[bytes], why: str) -> None:
        # More than are remembered would only push each other out, and take a microsecond each.
        if hashes:
            self.add(hash_words(hashes[-len(self._whys) :]), why)

    def whys(self, hashes: Sequence[bytes]) -> list[str]:
        """For each hash why it is missing; empty if nothing is known of it."""
        slots = self._chains.find(hash_words(hashes))
        codes = np.where(slots == NO_SLOT, 0, self._whys[slots % len(self._whys)])
        return [_WHYS[code] for code in codes.tolist()]
