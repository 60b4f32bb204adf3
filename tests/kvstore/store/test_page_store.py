"""What becomes of pages that are read and written, whatever the disk does; the order of the lanes is the test's."""

import errno
import mmap
import random
import threading
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store import page_store
from kvstore.store.directory import open_files
from kvstore.store.index import PageName
from kvstore.store.interface import Listed
from kvstore.store.operations import CORRUPT, FAILED, MEMORY_GONE, STALE, Piece, Read, Write, pieces_of, together
from kvstore.store.page_store import PageStore, StoreLimits
from kvstore.store.place import StoreIdentity
from tests.kvstore.store.faulty_files import FaultyFiles, SteppedLane
from tests.kvstore.store.pages import blank, chain, content, memory
from tests.simulation.planting import around, first_caught, nothing

PAGE = 2048
NAMES = chain("a", 8)
HASHES = [name.page_hash for name in NAMES]


class Steps:
    """A store whose lanes run when `run` says so."""

    def __init__(self, files: FaultyFiles, limits: StoreLimits | None = None) -> None:
        self.files = files
        self.lanes = SteppedLane(), SteppedLane(), SteppedLane()
        self.num_woken = 0
        self.store = PageStore(files, PAGE, self.wake, limits or StoreLimits(piece_bytes=4 * PAGE), self.lanes)

    def wake(self) -> None:
        self.num_woken += 1

    def run(self) -> list[Read | Write]:
        while any(lane.waiting for lane in self.lanes):
            for lane in self.lanes:
                lane.close()
        return self.store.poll()

    def write(self, names: list[PageName]) -> Write:
        write = self.store.begin_write(names, memory(names, PAGE))
        assert write is not None
        assert self.run() == [write]
        self.store.commit(write, [True] * len(write.claims))
        assert self.run() == [write]
        return write

    def read(self, hashes: list[bytes]) -> Read:
        slots, sequences = self.store.lookup(hashes)
        read = self.store.read(slots, sequences, blank(len(slots), PAGE))
        assert read is not None
        assert self.run() == [read]
        for page_hash, page, outcome in zip(hashes, read.pages, read.outcomes, strict=False):
            assert outcome or bytes(page[0]) == content(page_hash, PAGE)
        return read

    def stat(self, name: str) -> float:
        return self.store.stats().get(name, 0.0)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(16, PAGE)


@pytest.fixture
def steps(files: FaultyFiles) -> Steps:
    steps = Steps(files)
    assert steps.run() == []
    return steps


def failing(name: str, code: int, *slots: int) -> Callable[[str, int], None]:
    """Calls of `name` fail, of these first slots or of all."""

    def fail(called: str, first: int) -> None:
        if called == name and (not slots or first in slots):
            raise OSError(code, f"error {code}")

    return fail


def test_everything_is_a_miss_until_the_heads_are_read(files: FaultyFiles) -> None:
    steps = Steps(files)
    store = steps.store
    assert not store.is_loaded
    assert store.lookup(HASHES) == ([], [])
    assert store.sequences([3]) == [0]
    assert store.begin_write(NAMES, memory(NAMES, PAGE)) is None
    read = store.read([3], [1], blank(1, PAGE))
    assert store.poll() == [read]
    assert read.outcomes == [STALE]
    assert (steps.stat("not stored, loading"), steps.stat("loaded"), steps.stat("read stale")) == (8, 0, 1)
    steps.run()
    assert (store.is_loaded, steps.stat("loaded"), steps.stat("free")) == (True, 1, 16)
    assert steps.num_woken > 0


def test_pages_are_found_from_their_commit_on_and_after_a_restart(files: FaultyFiles, steps: Steps) -> None:
    write = steps.store.begin_write(NAMES, memory(NAMES, PAGE))
    assert write is not None
    assert steps.run() == [write]
    assert steps.store.lookup(HASHES) == ([], []), "its heads are not written"
    steps.store.commit(write, [True] * 8)
    assert steps.store.lookup(HASHES) == ([], [])
    assert steps.run() == [write]
    assert all(write.is_stored)
    assert steps.read(HASHES).outcomes == [""] * 8
    again = Steps(files)
    again.run()
    assert again.read(HASHES).outcomes == [""] * 8
    assert (again.stat("stored"), again.stat("damaged heads"), again.stat("read")) == (8, 0, 8)


def test_a_store_is_listed_in_parts(files: FaultyFiles, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    names = NAMES[:5]
    steps.write(names)
    monkeypatch.setattr(page_store, "_LISTED_SLOTS", 2)
    listed, slot, since = list[bytes](), 0, -1
    while True:
        part = steps.store.listed(slot, since)
        assert len(part.hashes) <= 2 * 16
        listed += [part.hashes[at : at + 16] for at in range(0, len(part.hashes), 16)]
        slot, since = part.next_slot, part.used_after
        if not slot:
            break
    assert sorted(listed) == sorted(name.page_hash for name in names)
    assert steps.store.listed(files.num_slots, 0) == steps.store.listed(-1, 0) == Listed(b"")


def test_only_pages_that_are_not_there_are_written(steps: Steps) -> None:
    steps.write(NAMES[2:4])
    write = steps.write(NAMES)
    assert sorted(write.positions) == [0, 1, 4, 5, 6, 7]
    assert [NAMES[position] for position in write.positions] == [claim.name for claim in write.claims]
    assert steps.store.begin_write(NAMES, memory(NAMES, PAGE)) is None
    assert steps.read(HASHES).outcomes == [""] * 8


def test_pages_of_two_prompts_that_come_in_turns_lie_and_are_written_in_runs(steps: Steps) -> None:
    one, two = chain("one", 4), chain("two", 4)
    names = [name for pair in zip(one, two, strict=True) for name in pair]
    write = steps.write(names)
    slots = [claim.slot for claim in write.claims]
    assert slots == sorted(slots)
    for prompt in (one, two):
        first, *others = [claim.slot for claim in write.claims if claim.name in prompt]
        assert others == [first + 1, first + 2, first + 3]
    assert len(pieces_of(write, range(8), slots, 8)) == 2
    assert steps.read([name.page_hash for name in two]).outcomes == [""] * 4


@given(st.lists(st.integers(1, 9)), st.integers(1, 8))
def test_short_pieces_are_a_turn_together(lengths: list[int], most: int) -> None:
    write = Write([], [], [])
    pieces = [Piece(write, slot, 0, length) for slot, length in enumerate(lengths)]
    turns = list(together(pieces, most))
    assert [piece for some in turns for piece in some] == pieces
    for some, follower in zip_longest(turns, turns[1:]):
        total = sum(piece.num_pages for piece in some)
        assert total <= most or len(some) == 1
        assert follower is None or total + follower[0].num_pages > most, "it would have had room"


def test_who_polls_is_woken_once_for_all_that_ended(steps: Steps) -> None:
    for prompt in ("b", "c"):
        before = steps.num_woken
        names = chain(prompt, 8)
        write = steps.store.begin_write(names, memory(names, PAGE))
        # Two pieces.
        assert steps.run() == [write]
        assert steps.num_woken == before + 1


def test_pages_that_changed_meanwhile_are_not_stored_and_their_slots_are_free(files: FaultyFiles, steps: Steps) -> None:
    write = steps.store.begin_write(NAMES, memory(NAMES, PAGE))
    assert write is not None
    steps.run()
    steps.store.commit(write, [number != 2 for number in range(8)])
    steps.run()
    assert write.is_stored == [True, True, False, True, True, True, True, True]
    assert len(steps.store.lookup(HASHES)[0]) == 2
    assert (steps.stat("changed meanwhile"), steps.stat("free")) == (1, 9)
    again = Steps(files)
    again.run()
    assert again.read(HASHES[:3]).outcomes == ["", ""]
    steps.write(NAMES[2:3])
    assert steps.read(HASHES).outcomes == [""] * 8
    nothing = steps.store.begin_write(chain("b", 2), memory(chain("b", 2), PAGE))
    assert nothing is not None
    steps.run()
    steps.store.commit(nothing, [False, False])
    assert steps.store.poll() == [nothing]


def test_a_slot_that_is_given_away_under_a_read_makes_it_stale(steps: Steps) -> None:
    steps.write(NAMES)
    slots, sequences = steps.store.lookup(HASHES)
    assert steps.store.sequences(slots) == sequences
    read = steps.store.read(slots, sequences, blank(8, PAGE))
    assert read is not None
    for prompt in range(4):
        names = chain(prompt, 4)
        write = steps.store.begin_write(names, memory(names, PAGE))
        assert write is not None
        steps.lanes[1].close()
        steps.lanes[2].close()
        steps.store.poll()
        steps.store.commit(write, [True] * 4)
        steps.lanes[2].close()
        steps.store.poll()
    lost = [now != then for now, then in zip(steps.store.sequences(slots), sequences, strict=True)]
    assert any(lost)
    assert steps.run() == [read]
    assert [outcome == STALE for outcome in read.outcomes] == lost
    assert steps.stat("read corrupt") == 0
    assert steps.stat("stored") == 16, "what is in those slots now is not forgotten"
    # Asked for once more, nothing is even read.
    again = steps.store.read(slots, sequences, blank(8, PAGE))
    assert again is not None
    assert again.num_bytes == (8 - sum(lost)) * PAGE


def test_a_page_that_the_disk_has_changed_is_forgotten_for_good(files: FaultyFiles, steps: Steps) -> None:
    steps.write(NAMES)
    slots, _ = steps.store.lookup(HASHES)
    files.flip("pages", slots[3] * PAGE + 77)
    assert steps.read(HASHES).outcomes == ["", "", "", CORRUPT, "", "", "", ""]
    steps.run()
    for each in (steps, Steps(files)):
        each.run()
        assert each.read(HASHES).outcomes == [""] * 3
        assert (each.stat("stored"), each.stat("free")) == (7, 9)
    steps.write(NAMES[3:4])
    assert steps.read(HASHES).outcomes == [""] * 8


def test_a_sector_that_cannot_be_read_costs_one_page_and_its_slot(files: FaultyFiles, steps: Steps) -> None:
    steps.write(NAMES)
    slots, _ = steps.store.lookup(HASHES)
    # The piece of four pages fails as a whole, and one of them when each is tried.
    files.fail = failing("read_pages", errno.EIO, slots[0], slots[1])
    outcomes = steps.read(HASHES).outcomes
    assert outcomes == [FAILED, FAILED, "", "", "", "", "", ""]
    assert (steps.stat("retired"), steps.store.last_failure) == (2, "error 5")
    files.fail = failing("write_pages", 99, slots[0], slots[1])
    steps.write(NAMES[:2])
    assert steps.read(HASHES).outcomes == [""] * 8


def test_pools_that_are_closed_under_a_read_or_a_write_cost_nothing(steps: Steps) -> None:
    steps.write(NAMES)
    slots, sequences = steps.store.lookup(HASHES)
    read = steps.store.read(slots, sequences, blank(8, PAGE))
    late = steps.store.read(slots, sequences, blank(8, PAGE))
    assert read is not None
    assert late is not None
    read.pages[5][0].release()
    for _ in range(4):
        steps.lanes[0].step()
    late.pages[1][0].release()
    assert steps.run() == [read, late]
    assert read.outcomes == [""] * 5 + [MEMORY_GONE] + [""] * 2
    assert late.outcomes == ["", MEMORY_GONE, *[""] * 6]
    names = chain("b", 4)
    for lane in (1, 2):
        write = steps.store.begin_write(names, memory(names, PAGE))
        assert write is not None
        if lane == 2:
            steps.lanes[1].close()
        write.pages[0][0].release()
        assert steps.run() == [write]
        steps.store.commit(write, [True] * 4)
        assert steps.store.poll() == [write]
        assert not any(write.is_stored)
        assert "memory is gone" in steps.store.last_failure
    assert (steps.stat("retired"), steps.stat("free"), steps.stat("stored")) == (0, 8, 8)


@pytest.mark.parametrize("at", ["write_heads", "write_pages"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_is_only_read_from(files: FaultyFiles, steps: Steps, at: str, code: int) -> None:
    steps.write(NAMES)
    files.fail = failing(at, code)
    for prompt in range(20):
        names = chain(prompt, 1)
        write = steps.store.begin_write(names, memory(names, PAGE))
        if write is None:
            break
        assert steps.run() == [write]
        steps.store.commit(write, [True])
        assert steps.run() == [write]
        assert write.is_stored == [False]
    assert prompt == 8
    assert steps.store.why_read_only == f"8 writes in a row failed, the last one because: error {code}"
    assert (steps.stat("write failed"), steps.stat("not stored, read only"), steps.stat("retired")) == (8, 1, 8)
    assert steps.read(HASHES).outcomes == [""] * 8
    files.fail = failing("", 0)
    again = Steps(files)
    again.run()
    assert again.store.why_read_only == ""
    again.write(chain("b", 2))


def test_a_write_that_succeeds_ends_the_count_of_failures(files: FaultyFiles, steps: Steps) -> None:
    for prompt in range(14):
        files.fail = failing("write_pages" if prompt % 7 else "", errno.EIO)
        names = chain(prompt, 1)
        write = steps.store.begin_write(names, memory(names, PAGE))
        assert write is not None
        steps.run()
        steps.store.commit(write, [True])
        steps.run()
    assert steps.store.why_read_only == ""


def test_a_head_that_cannot_be_written_or_zeroed_is_told(files: FaultyFiles, steps: Steps) -> None:
    write = steps.store.begin_write(NAMES, memory(NAMES, PAGE))
    assert write is not None
    steps.run()
    files.fail = failing("write_heads", errno.EIO)
    steps.store.commit(write, [True] * 8)
    assert steps.run() == [write]
    assert not any(write.is_stored)
    files.fail = failing("", 0)
    steps.write(NAMES)
    files.flip("pages", steps.store.lookup(HASHES)[0][0] * PAGE)
    files.fail = failing("write_heads", errno.ENOSPC)
    assert steps.read(HASHES).outcomes[0] == CORRUPT
    steps.run()
    assert steps.store.last_failure == "error 28"


def test_heads_that_cannot_be_read_make_an_empty_store(files: FaultyFiles, steps: Steps) -> None:
    steps.write(NAMES)
    files.fail = failing("read_heads", errno.EIO)
    again = Steps(files)
    again.run()
    assert (again.store.is_loaded, again.stat("stored")) == (True, 0)
    assert again.store.last_failure == "its heads could not be read: error 5"


def test_what_waits_has_a_limit_in_each_direction(files: FaultyFiles) -> None:
    steps = Steps(files, StoreLimits(reading_bytes=10 * PAGE, writing_bytes=10 * PAGE))
    steps.run()
    first = steps.store.begin_write(NAMES, memory(NAMES, PAGE))
    assert first is not None
    more = chain("b", 4)
    assert steps.store.begin_write(more, memory(more, PAGE)) is None
    assert (steps.stat("not stored, busy"), steps.stat("writing bytes")) == (4, 8 * PAGE)
    steps.run()
    steps.store.commit(first, [True] * 8)
    assert steps.store.begin_write(more, memory(more, PAGE)) is None, "its heads are not written"
    steps.run()
    steps.write(more)
    slots, sequences = steps.store.lookup(HASHES)
    reads = [steps.store.read(slots, sequences, blank(8, PAGE)) for _ in range(2)]
    assert reads[0] is not None
    assert reads[1] is None
    assert steps.run() == [reads[0]]
    # One that is larger than the limit by itself is taken if nothing else is on its way.
    small = Steps(files, StoreLimits(reading_bytes=PAGE, writing_bytes=PAGE))
    small.run()
    assert small.read(HASHES).outcomes == [""] * 8


def test_flushed_pages_are_misses_at_once_and_after_a_restart(files: FaultyFiles, steps: Steps) -> None:
    steps.write(NAMES[:3])
    slots, sequences = steps.store.lookup(HASHES[:3])
    read = steps.store.read(slots, sequences, blank(3, PAGE))
    begun = steps.store.begin_write(NAMES[:6], memory(NAMES[:6], PAGE))
    assert begun is not None
    assert steps.store.flush() == 3
    assert (steps.store.lookup(HASHES), steps.store.num_flushing) == (([], []), 1)
    assert set(steps.run()) == {read, begun}
    assert read is not None
    assert read.outcomes == [STALE] * 3
    steps.store.commit(begun, [True] * 3)
    assert steps.run() == [begun]
    assert not any(begun.is_stored)
    assert (steps.store.num_flushing, steps.store.why_not_flushed, steps.stat("flushed")) == (0, "", 3)
    assert (steps.stat("free"), steps.stat("claimed"), steps.stat("stored")) == (16, 0, 0)
    steps.write(NAMES[:2])
    again = Steps(files)
    again.run()
    assert again.read(HASHES).outcomes == ["", ""], "what was stored later is there"


def test_a_flush_whose_heads_are_on_their_way_takes_them_back(files: FaultyFiles, steps: Steps) -> None:
    write = steps.store.begin_write(NAMES, memory(NAMES, PAGE))
    assert write is not None
    steps.run()
    steps.store.commit(write, [True] * 8)
    assert steps.store.flush() == 0
    assert steps.run() == [write]
    assert not any(write.is_stored)
    again = Steps(files)
    again.run()
    assert (steps.stat("free"), again.stat("stored")) == (16, 0)


def test_a_disk_that_does_not_take_the_zeroes_is_told(files: FaultyFiles, steps: Steps) -> None:
    steps.write(NAMES[:3])
    files.fail = failing("write_heads", errno.EIO)
    assert steps.store.flush() == 3
    steps.run()
    assert (steps.store.num_flushing, steps.store.why_not_flushed) == (0, f"error {errno.EIO}")
    files.fail = failing("nothing", errno.EIO)
    steps.store.flush()
    steps.run()
    assert not steps.store.why_not_flushed


def test_a_page_of_another_size_is_refused(steps: Steps) -> None:
    steps.write(NAMES)
    with pytest.raises(ValueError, match="has 2048 bytes, over all ranks"):
        steps.store.begin_write(chain("b", 1), memory(chain("b", 1), PAGE - 8))
    slots, sequences = steps.store.lookup(HASHES)
    with pytest.raises(ValueError, match="has 2048 bytes"):
        steps.store.read(slots, sequences, blank(8, PAGE + 8))
    with pytest.raises(ValueError, match="not all in a store of 16"):
        steps.store.read([16], [1], blank(1, PAGE))


def test_a_run_is_one_call_and_a_gap_begins_another(files: FaultyFiles, steps: Steps) -> None:
    calls: list[tuple[str, int]] = []
    files.fail = lambda name, first: calls.append((name, first))
    steps.write(NAMES)
    # Zeros and data for each four pages, then all heads.
    assert [name for name, _ in calls] == ["write_heads", "write_pages"] * 2 + ["write_heads"]
    calls.clear()
    slots, sequences = steps.store.lookup(HASHES)
    read = steps.store.read(slots[:2] + slots[3:], sequences[:2] + sequences[3:], blank(7, PAGE))
    steps.run()
    assert [first for _, first in calls] == [slots[0], slots[3], slots[7]]
    assert read is not None
    assert read.outcomes == [""] * 7


def test_a_bug_that_is_planted_into_forgetting_is_seen(files: FaultyFiles) -> None:
    def check(_: int) -> None:
        steps = Steps(files)
        steps.run()
        test_a_page_that_the_disk_has_changed_is_forgotten_for_good(files, steps)

    assert first_caught([around(PageStore, "_zero_head", nothing)], check, most=1)


# real threads, real files


class Threads:
    """A store as an agent has it."""

    def __init__(self, directory: Path, page_bytes: int, tp_size: int) -> None:
        identity = StoreIdentity(host="h", layout_digest=b"l" * 16, page_bytes=page_bytes, tp_size=tp_size)
        files = open_files(directory, identity, 8192 + 40 * (identity.slot_bytes + 64) + identity.slot_bytes)
        self.woken = threading.Event()
        self.store = PageStore(files, page_bytes * tp_size, self.woken.set, StoreLimits(piece_bytes=64 << 10))
        while not self.store.is_loaded:
            self.wait()

    def wait(self) -> list[Read | Write]:
        assert self.woken.wait(30)
        self.woken.clear()
        return self.store.poll()

    def until(self, wanted: Read | Write) -> None:
        while wanted not in self.wait():
            pass


@pytest.mark.parametrize(("page_bytes", "tp_size"), [(40960, 1), (8192, 2), (6000, 1)])
def test_threads_store_and_restore_into_pools(tmp_path: Path, page_bytes: int, tp_size: int) -> None:
    tmp_path.chmod(0o700)
    draw = random.Random(1)
    prompts = [chain(prompt, draw.randint(1, 12)) for prompt in range(6)]
    running = Threads(tmp_path, page_bytes, tp_size)
    for names in prompts:
        pages = pool_pages(len(names), page_bytes, tp_size)
        for name, page in zip(names, pages, strict=True):
            whole = content(name.page_hash, page_bytes * tp_size)
            for rank, view in enumerate(page):
                view[:] = whole[rank * page_bytes :][:page_bytes]
        write = running.store.begin_write(names, pages)
        assert write is not None
        running.until(write)
        running.store.commit(write, [True] * len(names))
        running.until(write)
    running.store.close()
    running = Threads(tmp_path, page_bytes, tp_size)
    num_found = 0
    for names in prompts:
        hashes = [name.page_hash for name in names]
        slots, sequences = running.store.lookup(hashes)
        pages = pool_pages(len(slots), page_bytes, tp_size)
        read = running.store.read(slots, sequences, pages)
        assert read is not None
        running.until(read)
        assert not any(read.outcomes)
        for page_hash, page in zip(hashes, pages, strict=False):
            assert b"".join(page) == content(page_hash, page_bytes * tp_size)
        num_found += len(slots)
    assert num_found == min(40, sum(map(len, prompts)))
    running.store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]


def pool_pages(count: int, page_bytes: int, tp_size: int) -> list[list[memoryview]]:
    pools = [memoryview(mmap.mmap(-1, max(1, count * page_bytes))) for _ in range(tp_size)]
    return [[pool[page * page_bytes :][:page_bytes] for pool in pools] for page in range(count)]
