"""A store on failing files, whose threads are steps drawn from a seed; every page that it gives is compared.

`run_kills` ends processes at any write: nothing that was stored may be lost then, nor may anything be torn.
`run_power_cuts` loses writes, turns bits over and makes the disk fail: pages may be missing then, but none be wrong.
"""

import errno
import random
from collections.abc import Callable

from kvstore.store.index import PageName
from kvstore.store.operations import CORRUPT, FAILED, STALE, Read, Write
from kvstore.store.page_store import PageStore, StoreLimits
from tests.kvstore.store.faulty_files import SECTOR, FaultyFiles, Killed, SteppedLane
from tests.kvstore.store.pages import blank, chain, content, memory

PAGE = 4 * SECTOR
LIMITS = StoreLimits(piece_bytes=3 * PAGE, reading_bytes=24 * PAGE, writing_bytes=24 * PAGE)


class World:
    """One store after another on one set of files."""

    def __init__(self, seed: int, *, is_gentle: bool) -> None:
        self.draw = random.Random(seed)
        self.is_gentle = is_gentle
        self.slow = self.draw.randrange(3)
        self.files = FaultyFiles(self.draw.choice((3, 6, 12, 30)), PAGE, self.draw)
        self.names: dict[bytes, PageName] = {}
        self.num_right = 0
        self.files.fail = self.fail
        self.num_failing = 0
        # Pages that were stored when the store was flushed, and have not been given to it since.
        self.flushed: set[bytes] = set()
        self.is_flush_over = True
        self.open()

    def open(self) -> None:
        self.lanes = SteppedLane(self.draw), SteppedLane(self.draw), SteppedLane()
        self.store = PageStore(self.files, PAGE, lambda: None, LIMITS, self.lanes)
        self.reads: list[tuple[list[bytes], Read]] = []
        self.writes: list[tuple[Write, list[bool]]] = []
        self.stored: set[bytes] = set()
        self.kill(self.finish)

    def fail(self, name: str, first: int) -> None:
        if self.num_failing and name != "read_heads":
            self.num_failing -= 1
            raise OSError(self.draw.choice((errno.EIO, errno.ENOSPC, errno.EROFS)), "it fails")

    # what its owner does

    def prompt(self) -> list[PageName]:
        names = chain(self.draw.randrange(6), self.draw.randint(1, 12))
        self.names.update((name.page_hash, name) for name in names)
        return names

    def begin_write(self) -> None:
        names = self.prompt()[self.draw.choice((0, 0, 0, 2)) :]
        self.flushed -= {name.page_hash for name in names}
        pages = memory(names, PAGE)
        write = self.store.begin_write(names, pages)
        if write is None:
            return
        good = [True] * len(write.claims)
        if self.draw.random() < 0.3:
            # The pool's page is used for something else while it is on its way.
            changed = self.draw.randrange(len(good))
            good[changed] = False
            view = write.pages[changed][0]
            view[:] = content(bytes(range(16)), PAGE)
        self.writes.append((write, good))

    def begin_read(self) -> None:
        hashes = [name.page_hash for name in self.prompt()]
        slots, sequences = self.store.lookup(hashes)
        read = self.store.read(slots, sequences, blank(len(slots), PAGE))
        if read is not None:
            self.reads.append((hashes, read))

    def flush(self) -> None:
        # Seldom: with more of it hardly anything was ever stored.
        if not self.draw.randrange(20):
            self.flushed |= self.stored | {claim.name.page_hash for write, _ in self.writes for claim in write.claims}
            self.stored.clear()
            self.is_flush_over = False
            self.store.flush()
            assert not any(self.store.lookup([page])[0] for page in self.names)

    def step(self) -> None:
        lanes = [lane for lane in self.lanes if lane.waiting]
        # One lane lags behind the others, so that slots are given away under what was asked of them.
        if lanes:
            lane = self.draw.choice(lanes)
            if lane is not self.lanes[self.slow] or not self.draw.randrange(6):
                lane.step()

    def poll(self) -> None:
        for ended in self.store.poll():
            if isinstance(ended, Read):
                self.check_read(*next(one for one in self.reads if one[1] is ended))
            elif ended.is_written:
                self.writes.remove(next(one for one in self.writes if one[0] is ended))
                stored = zip(ended.claims, ended.is_stored, strict=True)
                self.stored |= {claim.name.page_hash for claim, is_stored in stored if is_stored}
            else:
                self.store.commit(*next(one for one in self.writes if one[0] is ended))
        if not self.store.num_flushing and not self.is_flush_over:
            self.is_flush_over = not self.store.why_not_flushed

    def check_read(self, hashes: list[bytes], read: Read) -> None:
        self.reads.remove((hashes, read))
        for number, outcome in enumerate(read.outcomes):
            if not outcome:
                self.num_right += 1
                assert bytes(read.pages[number][0]) == content(hashes[number], PAGE), "a wrong page is served"
            elif self.is_gentle:
                assert outcome == STALE, f"after kills alone no page is {outcome}"
            assert outcome in ("", STALE, CORRUPT, FAILED)

    def finish(self) -> None:
        """Everything that was begun ends."""
        while (
            any(lane.waiting for lane in self.lanes) or self.reads or self.writes
            or not self.store.is_loaded or self.store.num_flushing
        ):  # fmt: skip
            self.step()
            self.poll()

    def read_all(self) -> None:
        """Whatever is stored is read."""
        for page in list(self.names):
            slots, sequences = self.store.lookup([page])
            read = self.store.read(slots, sequences, blank(len(slots), PAGE))
            assert read is not None
            self.reads.append(([page], read))
            self.finish()

    # what happens to it

    def kill(self, work: Callable[[], None]) -> None:
        """`work`, in which the process may be killed: then another one opens the files."""
        try:
            work()
        except Killed:
            self.files.kill_in = None
            self.end_process()

    def end_process(self) -> None:
        before = self.held()
        # Of a flush that has not ended, pages may be back.
        flushed = self.flushed if self.is_flush_over else set[bytes]()
        self.flushed, self.is_flush_over = set(), True
        self.open()
        if self.is_gentle:
            assert not flushed & self.held(), "flushed pages are back"
            lost = before - self.held()
            assert not lost, f"{len(lost)} stored pages are lost"
            assert not self.store.num_damaged_heads

    def held(self) -> set[bytes]:
        """Pages that were told to be stored and have not been evicted; of a new process, all that it finds."""
        return {page for page in self.stored or self.names if self.store.lookup([page])[0]}

    def cut_power(self) -> None:
        self.files.cut_power()
        self.end_process()

    def break_something(self) -> None:
        # Seldom: with more of it hardly anything was ever stored.
        match self.draw.randrange(8):
            case 0:
                self.num_failing = self.draw.randint(1, 4)
            case 1:
                self.flip_bits()

    def flip_bits(self) -> None:
        name = self.draw.choice(("heads", "pages"))
        for _ in range(self.draw.randint(1, 5)):
            self.files.flip(name, self.draw.randrange(len(self.files.seen[name])))


def run(seed: int, *, is_gentle: bool, is_flushed: bool = False) -> World:
    world = World(seed, is_gentle=is_gentle)
    acts: list[Callable[[], None]] = [world.begin_write, world.begin_write, world.begin_read, world.begin_read]
    acts += [world.flush] * is_flushed + [world.step] * 30 + [world.poll] * 8
    if not is_gentle:
        acts += [world.break_something, world.files.write_back]
    for _ in range(12 if is_gentle else 5):
        if is_gentle:
            world.files.kill_in = world.draw.randint(0, 24)
        for _ in range(world.draw.randint(10, 80) * (1 if is_gentle else 3)):
            world.kill(world.draw.choice(acts))
        if not is_gentle:
            world.cut_power()
    world.files.kill_in = None
    world.num_failing = 0
    world.finish()
    world.read_all()
    return world


def run_kills(seed: int) -> World:
    return run(seed, is_gentle=True)


def run_flushes(seed: int) -> World:
    """Kills, and flushes before, amid and after writes."""
    return run(seed, is_gentle=True, is_flushed=True)


def run_power_cuts(seed: int) -> World:
    return run(seed, is_gentle=False)
