"""Disks of simulated meshes: slow, refusing calls, losing writes, turning bits over, back as they were days ago.

One outlives the agents that open it. Its threads are timers of the agent's process, and a write is a point at which
that process may die. `require_right` then says what may lie there, whatever it went through.
"""

import asyncio
import errno
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from kvstore.hashing import chain_hashes, page_hash, root_hash
from kvstore.store.checksum import page_checksum
from kvstore.store.files import Page
from kvstore.store.heads import Head, are_sound, decode_heads, encode_heads
from kvstore.store.place import HEAD_BYTES, StoreIdentity
from mesh.testing.processes import RUNNING_PROCESS
from nodes.gateway.fields.cache_scope import scope_of
from tests.kvstore.store.faulty_files import FaultyFiles, Killed, SteppedLane

PAGE_SIZE = 16
TROUBLES = ("refuses", "turns bits", "loses writes", "comes back old")
MOST_COPIES = 4


class DiskLane(SteppedLane):
    """Each piece of work takes a while, and is not done if the process dies before; `orders`: any may be the next."""

    def __init__(self, draw: random.Random, most_s: float, *, orders: bool = False) -> None:
        super().__init__(draw if orders else None)
        self._dice, self.most_s = draw, most_s

    @override
    def submit(self, work: Callable[[], None]) -> None:
        super().submit(work)
        asyncio.get_running_loop().call_later(self._dice.uniform(0.0, self.most_s), self._step)

    def _step(self) -> None:
        # All were done when the store was closed.
        if self.waiting:
            self.step()


class BadFiles(FaultyFiles):
    """Files of one store. `troubles` are of `TROUBLES`; each call meets one at `rate`. `counts` says how often.

    `refuses`: a call fails. `turns bits`: a page that is read has one bit turned over, for good. `loses writes`: after
    an agent's death some sectors of what was not written back are as before. `comes back old`: after it, the files are
    those of an earlier moment, or one of them is.
    """

    def __init__(
        self,
        num_slots: int,
        page_bytes: int,
        draw: random.Random,
        troubles: Iterable[str],
        rate: float,
        counts: Counter[str],
    ) -> None:
        super().__init__(num_slots, page_bytes, draw)
        self.fail = self._refuse
        self.troubles = frozenset(troubles)
        self.rate = rate
        self.counts = counts
        # Whether something may lie there that only a checksum tells from what was written.
        self.is_damaged = False
        self._copies: list[dict[str, bytes]] = []

    def come_back(self) -> None:
        """An agent has died, and another one opens the files."""
        if "loses writes" in self.troubles and self._draw.random() < 0.7:
            self.counts["disk: power cuts"] += 1
            self.is_damaged = True
            self.cut_power()
        if "comes back old" in self.troubles and self._copies and self._draw.random() < 0.7:
            self.counts["disk: came back old"] += 1
            old = self._draw.choice(self._copies)
            names = self._draw.choice((["heads", "pages"], ["heads", "pages"], ["heads"], ["pages"]))
            self.is_damaged |= len(names) < 2
            self.seen.update((name, bytearray(old[name])) for name in names)
            self.write_back()

    def keep_copy(self) -> None:
        """It may come back as it is now."""
        self._copies.append({name: bytes(content) for name, content in self.seen.items()})

    def clear(self) -> None:
        """Nothing is stored."""
        self.seen = {name: bytearray(len(content)) for name, content in self.seen.items()}

    def end(self) -> None:
        """Nothing fails any more."""
        self.troubles = frozenset()

    @override
    def read_pages(self, first: int, pages: Sequence[Page]) -> None:
        if self._strikes("turns bits"):
            self.is_damaged = True
            slot = first + self._draw.randrange(len(pages))
            self.flip("pages", slot * self.page_bytes + self._draw.randrange(self.page_bytes))
        super().read_pages(first, pages)

    @override
    def _write(self, name: str, start: int, data: bytes) -> None:
        process = RUNNING_PROCESS.get()
        if process is not None and process.is_last_point():
            self.kill_in = 0
        try:
            super()._write(name, start, data)
        except Killed:
            assert process is not None
            self.kill_in = None
            self.counts["disk: died in a write"] += 1
            process.die()
        if self._draw.random() < 0.1:
            self.write_back()
        if len(self._copies) < MOST_COPIES and self._draw.random() < 0.2:
            self.keep_copy()

    def _refuse(self, name: str, first: int) -> None:
        if self._strikes("refuses"):
            raise OSError(errno.EIO, "it fails")

    def _strikes(self, trouble: str) -> bool:
        if trouble not in self.troubles or self._draw.random() >= self.rate:
            return False
        self.counts[f"disk: {trouble}"] += 1
        return True


def fill(
    files: FaultyFiles, identity: StoreIdentity, prompts: Iterable[tuple[Sequence[int], str]], shift: int = 0
) -> set[bytes]:
    """An earlier mesh has left the full pages of these prompts and salts there, as far as there is room.

    With a `shift` each token id in them is by so much more than it should be. Returns the pages' hashes.
    """
    heads = decode_heads(bytes(files.seen["heads"]))
    slot = int((heads.any(axis=1)).sum())
    stored: set[bytes] = set()
    for tokens, salt in prompts:
        parent = root_hash(scope_of(salt or None, None))
        for index, name in enumerate(chain_hashes(parent, tokens, PAGE_SIZE)):
            if slot == files.num_slots:
                return stored
            if name not in stored:
                first = index * PAGE_SIZE
                words = array("I", [token + shift for token in tokens[first : first + PAGE_SIZE]])
                words.extend(range(first, first + PAGE_SIZE))
                whole = words.tobytes() * identity.tp_size
                head = Head(name, parent, slot + 1, page_checksum([memoryview(whole)]))
                files.seen["pages"][slot * files.page_bytes : (slot + 1) * files.page_bytes] = whole
                files.seen["heads"][slot * HEAD_BYTES : (slot + 1) * HEAD_BYTES] = encode_heads(slot, [head])
                stored.add(name)
                slot += 1
            parent = name
    files.write_back()
    return stored


def require_right(identity: StoreIdentity, files: BadFiles, wrong: set[bytes] = frozenset()) -> int:  # type: ignore[assignment]
    """How many pages lie there. Each holds the tokens that its hash names, at one multiple of a page, at all ranks.

    Of a disk that was damaged, each whose checksum is right. Pages of the hashes `wrong` are not looked at.
    """
    rows = decode_heads(bytes(files.seen["heads"]))
    num_stored = 0
    for slot, is_sound in enumerate(are_sound(rows, 0)):
        head = bytes(files.seen["heads"][slot * HEAD_BYTES : (slot + 1) * HEAD_BYTES])
        whole = bytes(files.seen["pages"][slot * files.page_bytes : (slot + 1) * files.page_bytes])
        if files.is_damaged and not (is_sound and page_checksum([memoryview(whole)]) == int(rows[slot, 5])):
            continue
        assert is_sound or not any(head), f"the head of slot {slot} is torn"
        if not any(head) or head[:16] in wrong:
            continue
        num_stored += 1
        for rank in range(identity.tp_size):
            words = array("I", whole[rank * identity.page_bytes : (rank + 1) * identity.page_bytes])
            tokens, positions = words[:PAGE_SIZE], words[PAGE_SIZE:]
            assert page_hash(head[16:32], tokens.tobytes()) == head[:16], f"slot {slot} has another page's bytes"
            first = positions[0]
            assert first % PAGE_SIZE == 0
            assert list(positions) == list(range(first, first + PAGE_SIZE)), f"slot {slot} is a mixture"
    return num_stored
