"""A store whose files are taken away while it is open: it is seen, nothing is found, they are opened anew."""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from kvstore.errors import StoreDenied, StoreForeign, StoreMissing
from kvstore.store import folder_files
from kvstore.store.directory import open_files
from kvstore.store.folder_files import FolderFiles
from kvstore.store.missing import LOST
from kvstore.store.operations import STALE, Read
from kvstore.store.page_store import PageStore
from kvstore.store.place import HEAD_BYTES, HEADER_BYTES, StoreIdentity
from tests.kvstore.store.faulty_files import FaultyFiles
from tests.kvstore.store.pages import blank, chain, content, memory
from tests.kvstore.store.test_page_store import HASHES, NAMES, PAGE, Steps

OURS = StoreIdentity(host="one", layout_digest=b"l" * 16, page_bytes=PAGE, numerics="torch, AVX2")
SIZE = HEADER_BYTES + 17 * (OURS.slot_bytes + HEAD_BYTES)
GONE = "the folder was removed"


@pytest.fixture
def steps() -> Steps:
    steps = Steps(FaultyFiles(16, PAGE))
    steps.run()
    return steps


def look(steps: Steps) -> None:
    steps.store.look()
    steps.run()


# what a store does


def test_pages_of_files_that_are_gone_are_lost_and_new_ones_are_stored(steps: Steps) -> None:
    steps.write(NAMES)
    steps.files.why_gone = GONE

    def made_anew() -> None:
        steps.files.seen["heads"][:] = bytes(16 * HEAD_BYTES)

    steps.files.again = made_anew
    steps.store.look()
    steps.lanes[2].step()
    steps.store.poll()
    assert (steps.store.why_off, steps.store.is_loaded, steps.stat("off"), steps.stat("stored")) == (GONE, False, 1, 0)
    assert steps.store.lookup(HASHES) == ([], [])
    assert steps.store.missing.whys(HASHES) == [LOST] * 8
    assert steps.store.begin_write(NAMES, memory(NAMES, PAGE)) is None
    assert not steps.store.must_wait(1), "nothing gathers in front of a store that may stay off"
    steps.run()
    assert (steps.store.why_off, steps.store.is_loaded, steps.stat("stored")) == ("", True, 0)
    steps.write(NAMES)
    assert steps.read(HASHES).outcomes == [""] * 8


def test_what_lies_there_again_is_found(steps: Steps) -> None:
    """A file system that was unmounted and is mounted again."""
    steps.write(NAMES)
    steps.files.why_gone = GONE
    look(steps)
    steps.run()
    assert steps.store.lookup(HASHES)[0]
    assert steps.read(HASHES).outcomes == [""] * 8
    steps.write(chain("b", 8))
    assert steps.read(HASHES).outcomes == [""] * 8


def test_a_slot_and_sequence_told_before_never_name_another_page(steps: Steps) -> None:
    """Another mesh's store in the place of ours: the same slots, and the same sequences on disk, of other pages."""
    other = Steps(FaultyFiles(16, PAGE))
    other.run()
    names = chain("other", 8)
    other.write(names)
    steps.write(NAMES)
    told = steps.store.lookup(HASHES)
    assert told == other.store.lookup([name.page_hash for name in names]), "it would be read as ours"
    steps.files.why_gone = GONE
    steps.files.again = lambda: steps.files.seen.update(other.files.seen)
    look(steps)
    steps.run()
    assert len(steps.store.lookup([name.page_hash for name in names])[0]) == 8
    read = steps.store.read(*told, blank(8, PAGE))
    assert read is not None
    steps.run()
    assert read.outcomes == [STALE] * 8


def test_files_are_opened_anew_when_nobody_uses_the_old_ones(steps: Steps) -> None:
    steps.write(NAMES)
    read = steps.store.read(*steps.store.lookup(HASHES), blank(8, PAGE))
    names = chain("b", 4)
    write = steps.store.begin_write(names, memory(names, PAGE))
    assert read is not None
    assert write is not None
    renewed: list[int] = []
    steps.files.again = lambda: renewed.append(1)
    steps.files.why_gone = GONE
    steps.store.look()
    steps.lanes[2].step()
    assert steps.store.poll() == []
    steps.store.renew()
    steps.lanes[2].close()
    assert not renewed, "a descriptor that is closed amid a read may be another file's by then"
    ended: list[object] = []
    while len(ended) < 3:
        assert not renewed
        for one in steps.run():
            ended.append(one)
            if one is write and not write.is_written:
                steps.store.commit(write, [True] * 4)
    steps.run()
    assert renewed == [1]
    assert read.outcomes == [STALE] * 8
    assert (write.is_stored, steps.stat("lost"), steps.store.missing.whys([names[0].page_hash])) == (
        [False] * 4, 4, [LOST],
    )  # fmt: skip


def test_files_that_cannot_be_opened_are_tried_when_asked(steps: Steps) -> None:
    steps.write(NAMES)
    steps.files.why_gone = GONE
    reasons = ["make this directory first", "it belongs to another"]

    def refuse() -> None:
        raise StoreMissing(reasons[0])

    steps.files.again = refuse
    look(steps)
    steps.run()
    assert steps.store.why_off == reasons.pop(0)
    look(steps)
    assert not steps.run(), "what is off is not looked at"
    steps.store.renew()
    steps.run()
    assert steps.store.why_off == reasons[0]
    steps.files.again = lambda: None
    steps.store.renew()
    steps.store.renew()
    steps.run()
    assert steps.store.why_off == ""
    assert steps.read(HASHES).outcomes == [""] * 8


def test_a_disk_that_was_full_is_written_again_once_it_takes_pages(steps: Steps) -> None:
    steps.write(NAMES)

    def full(call: str, _first: int) -> None:
        if call.startswith("write"):
            raise OSError(errno.ENOSPC, "no space left")

    steps.files.fail = full
    for prompt in range(8):
        names = chain(prompt, 1)
        write = steps.store.begin_write(names, memory(names, PAGE))
        assert write is not None
        steps.run()
        steps.store.commit(write, [True])
        steps.run()
    assert "no space left" in steps.store.why_read_only
    look(steps)
    assert (steps.store.why_off, steps.stat("retired")) == ("", 8), "what it has is read all the same"
    assert steps.read(HASHES).outcomes == [""] * 8
    steps.files.fail = lambda _call, _first: None
    look(steps)
    steps.run()
    assert (steps.store.why_read_only, steps.store.why_off, steps.stat("retired")) == ("", "", 0)
    steps.write(chain("c", 8))
    assert steps.read(HASHES).outcomes == [""] * 8


def test_whenever_files_are_taken_away_no_page_is_wrong() -> None:
    assert sum(map(right_pages, range(30))) > 100


def right_pages(seed: int) -> int:
    """Reads and writes in any order around it; what lies there afterwards is nothing, the same, or another store."""
    draw = random.Random(seed)
    other = Steps(FaultyFiles(16, PAGE))
    other.run()
    other.write(chain("other", 12))
    steps = Steps(FaultyFiles(16, PAGE))
    steps.run()
    reads: dict[object, list[bytes]] = {}
    num_read = 0

    def settle() -> None:
        nonlocal num_read
        for one in steps.store.poll():
            if isinstance(one, Read):
                for page_hash, page, outcome in zip(reads.pop(one), one.pages, one.outcomes, strict=True):
                    assert outcome or bytes(page[0]) == content(page_hash, PAGE)
                    num_read += not outcome
            elif not one.is_written:
                steps.store.commit(one, [True] * len(one.claims))

    def write() -> None:
        names = chain(draw.randrange(4), draw.randint(1, 6))
        steps.store.begin_write(names, memory(names, PAGE))

    offers: list[tuple[list[bytes], list[int], list[int]]] = [([], [], [])]

    def offer() -> None:
        hashes = [name.page_hash for name in chain(draw.choice((0, 1, 2, 3, "other")), 6)]
        slots, sequences = steps.store.lookup(hashes)
        offers.append((hashes[: len(slots)], slots, sequences))

    def read() -> None:
        hashes, slots, sequences = draw.choice(offers)
        one = steps.store.read(slots, sequences, blank(len(slots), PAGE))
        if one is not None:
            reads[one] = hashes

    def take_away() -> None:
        steps.files.why_gone = GONE
        fresh = {"heads": bytes(16 * HEAD_BYTES), "pages": bytes(16 * PAGE)}
        now = draw.choice((fresh, other.files.seen, steps.files.seen))
        copied = {name: bytearray(data) for name, data in now.items()}
        steps.files.again = lambda: steps.files.seen.update(copied)

    def step() -> None:
        lanes = [lane for lane in steps.lanes if lane.waiting]
        if lanes:
            draw.choice(lanes).step()

    acts = [write, write, offer, offer, read, read, read, *[step] * 20, *[settle] * 8]
    for _ in range(6):
        for _ in range(draw.randint(20, 120)):
            draw.choice(acts)()
        take_away()
        steps.store.look()
    while any(lane.waiting for lane in steps.lanes) or reads:
        step()
        settle()
    return num_read


# what is seen of a folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir(0o700)
    tmp_path.chmod(0o700)
    return tmp_path / "disk"


@pytest.fixture
def opened(root: Path) -> Iterator[FolderFiles]:
    files = open_files(root, OURS, SIZE)
    yield files
    files.let_go()


def _replaced(folder: Path) -> None:
    data = (folder / "pages").read_bytes()
    (folder / "pages").unlink()
    (folder / "pages").write_bytes(data)
    (folder / "pages").chmod(0o600)


def _others(folder: Path) -> None:
    folder.rename(folder.with_name("old"))
    open_files(folder.parent, OURS, SIZE).close()


TAKEN = {
    "the directory is removed": (lambda folder: shutil.rmtree(folder.parent), "make this directory first"),
    "the folder is removed": (shutil.rmtree, "cannot be used for KV pages"),
    "heads are removed": (lambda folder: (folder / "heads").unlink(), "No such file"),
    "pages are replaced": (_replaced, "another file than the one that is open"),
    "another store in its place": (_others, "another file than the one that is open"),
    "pages are cut short": (lambda folder: os.truncate(folder / "pages", 4096), "4096 bytes left"),
    "heads are cut short": (lambda folder: os.truncate(folder / "heads", 0), "0 bytes left"),
    "others may look into the folder": (lambda folder: folder.chmod(0o755), "drwxr-xr-x"),
    "others may read pages": (lambda folder: (folder / "pages").chmod(0o644), "-rw-r--r--"),
    "others may write the directory": (lambda folder: folder.parent.chmod(0o777), "drwxrwxrwx"),
}


@pytest.mark.parametrize(("take", "told"), TAKEN.values(), ids=list(TAKEN))
def test_what_happens_to_a_folder_is_seen(
    root: Path, opened: FolderFiles, take: Callable[[Path], None], told: str
) -> None:
    assert opened.look() == ""
    take(root / OURS.folder)
    assert told in opened.look()


@pytest.mark.parametrize("take", ["the folder is removed", "another store in its place", "pages are cut short"])
def test_files_are_made_or_opened_anew(root: Path, opened: FolderFiles, take: str) -> None:
    TAKEN[take][0](root / OURS.folder)
    opened.renew()
    assert opened.look() == ""
    pages = memory(NAMES[:1], PAGE)
    opened.write_pages(3, pages)
    opened.write_heads(3, b"h" * HEAD_BYTES)
    read = blank(1, PAGE)
    opened.read_pages(3, read)
    assert bytes(read[0][0]) == bytes(pages[0][0])
    opened.close()
    assert (root / OURS.folder / "heads").read_bytes()[HEADER_BYTES:][3 * HEAD_BYTES :][
        :HEAD_BYTES
    ] == b"h" * HEAD_BYTES


def test_what_cannot_be_opened_anew_has_nothing_open(root: Path, opened: FolderFiles) -> None:
    heads = root / OURS.folder / "heads"
    heads.write_bytes(b"somebody's".ljust(HEADER_BYTES, b"!"))
    with pytest.raises(StoreForeign):
        opened.renew()
    with pytest.raises(OSError, match="Bad file descriptor"):
        opened.read_heads(0, 1)
    heads.unlink()
    (root / OURS.folder).chmod(0o755)
    with pytest.raises(StoreDenied):
        opened.renew()
    (root / OURS.folder).chmod(0o700)
    opened.renew()
    assert opened.look() == ""


def test_it_is_not_made_on_the_file_system_beneath(root: Path, opened: FolderFiles) -> None:
    """What was mounted there is not any more: the disk beneath is none that anybody has named."""
    shutil.rmtree(root / OURS.folder)
    with (
        patch.object(folder_files, "_mount_of", lambda _path: Path("/")),
        patch.object(opened, "_mounted_at", root),
        pytest.raises(StoreMissing, match=f"was on the file system at {root}, and would be on that at /: mount it"),
    ):
        opened.renew()
    assert not (root / OURS.folder).exists()


def test_no_descriptor_is_left(root: Path) -> None:
    files = open_files(root, OURS, SIZE)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        shutil.rmtree(root / OURS.folder)
        files.renew()
        assert len(os.listdir("/proc/self/fd")) == before
    files.close()
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3


def test_threads_and_files(root: Path) -> None:
    """A folder that is removed under a store with threads of its own."""
    woken = threading.Event()
    store = PageStore(open_files(root, OURS, SIZE), PAGE, woken.set)

    def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert woken.wait(20.0)
            woken.clear()
            for one in store.poll():
                if not isinstance(one, Read) and not one.is_written:
                    store.commit(one, [True] * len(one.claims))

    until(lambda: store.is_loaded)
    for _ in range(2):
        assert store.begin_write(NAMES, memory(NAMES, PAGE)) is not None
        until(lambda: store.stats()["stored"] == 8)
        shutil.rmtree(root / OURS.folder)
        store.look()
        until(lambda: store.stats()["stored"] == 0)
        assert "cannot be used for KV pages" in store.why_off
        until(lambda: store.is_loaded)
    store.close()
    assert (root / OURS.folder / "pages").stat().st_size == 17 * OURS.slot_bytes
