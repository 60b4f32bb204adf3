"""Kills, power cuts and failing disks from seeds, and bugs planted into the store that they must show."""

from typing import Any

import pytest

from kvstore.store import heads as heads_module
from kvstore.store import page_store as page_store_module
from kvstore.store.free_slots import FreeSlots
from kvstore.store.heads import Head, are_sound, decode_heads, encode_heads
from kvstore.store.page_store import PageStore
from tests.kvstore.store.world import run_flushes, run_kills, run_power_cuts
from tests.simulation.planting import Patches, around, first_caught, nothing

NUM_SEEDS = 25


@pytest.mark.parametrize("run", [run_kills, run_power_cuts, run_flushes])
def test_no_page_is_wrong(run: Any) -> None:
    num_right = sum(run(seed).num_right for seed in range(NUM_SEEDS))
    assert num_right > 10 * NUM_SEEDS, "hardly a page was read"


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_kills, run_power_cuts, run_flushes])
def test_no_page_is_wrong_in_many_seeds(run: Any) -> None:
    for seed in range(NUM_SEEDS, 2000):
        run(seed)


def heads_count(seed: int) -> None:
    """Where they were written, and as they were."""
    whole = bytearray(encode_heads(3, [Head(b"h" * 16, b"p" * 16, 1, 2)]))
    assert are_sound(decode_heads(whole), 3).all()
    assert not are_sound(decode_heads(whole), 4).any()
    whole[seed % 64] ^= 1
    assert not are_sound(decode_heads(whole), 3).any()


def _without_zeroing(attempt: Any, work: Any) -> Any:
    is_zeroing = work.func.__name__ == "write_heads" and not any(work.args[1])
    return None if is_zeroing else attempt(work)


def _right_whatever_it_is(check: Any, self: PageStore, piece: Any, failure: Any) -> None:
    piece.owner.outcomes[piece.at : piece.at + piece.num_pages] = [""] * piece.num_pages
    self._end(piece, failure)


def _head_first(write: Any, self: PageStore, piece: Any) -> None:
    tell, self._tell = self._tell, nothing
    self._write_heads(piece)
    self._tell = tell
    page_store_module._attempt(lambda: self._files.write_pages(piece.slot, piece.pages))
    self._end(piece)


def _told_before_it_is(commit: Any, self: PageStore, write: Any, is_good: Any) -> None:
    commit(self, write, is_good)
    for claim, checksum, is_kept in zip(write.claims, write.checksums, is_good, strict=True):
        if is_kept and claim.name.page_hash in self._index._claimed:
            self._index.publish(claim, checksum)


def _whatever_was_asked(settle: Any, self: PageStore, piece: Any, read: Any) -> None:
    self.sequences = lambda slots: [read.sequences[number] for number in piece.range]
    settle(self, piece, read)
    del self.sequences


def _free_though_taken(take: Any, self: FreeSlots, slot: int) -> bool:
    is_free = take(self, slot)
    if is_free:
        self.give_back(slot)
    return is_free


def _but_what_is_being_written(flush: Any, self: PageStore) -> int:
    self._underway.clear()
    return flush(self)


PLANTED: dict[str, tuple[Any, Patches]] = {
    "the old head is not zeroed": (run_kills, [around(page_store_module, "_attempt", _without_zeroing)]),
    "the head is written before the data": (run_kills, [around(PageStore, "_write", _head_first)]),
    "a page is told to be stored before its head is": (run_kills, [around(PageStore, "commit", _told_before_it_is)]),
    "checksums are not compared": (run_power_cuts, [around(PageStore, "_check", _right_whatever_it_is)]),
    "pages that changed meanwhile are stored": (
        run_kills,
        [around(PageStore, "commit", lambda commit, self, write, good: commit(self, write, [True] * len(good)))],
    ),
    "sequences are not compared after a read": (run_kills, [around(PageStore, "_settle_read", _whatever_was_asked)]),
    "a head counts in any slot": (
        heads_count,
        [around(heads_module, "_seals", lambda seals, rows, first: seals(rows, 0))],
    ),
    "a head that is damaged counts": (
        heads_count,
        [around(heads_module, "_seals", lambda seals, rows, first: rows[:, 7])],
    ),
    "heads are not zeroed by a flush": (
        run_flushes,
        [around(PageStore, "_zero_all_heads", lambda _, self: self._tell(lambda: self._flushed(None)))],
    ),
    "what is being written outlives a flush": (run_flushes, [around(PageStore, "flush", _but_what_is_being_written)]),
    "a slot is given to two pages": (run_kills, [around(FreeSlots, "take", _free_though_taken)]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    run, patches = PLANTED[name]
    assert first_caught(patches, run, most=NUM_SEEDS)
