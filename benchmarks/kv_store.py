"""Times the store of pages on disk beside `dd`, and how long a store of a million pages takes to open.

Pages of three models (192 KiB, 360 KiB, 40 KiB) are stored and restored as an agent does it: heads, checksums and all,
from and into memory that is aligned as a pool's is. `dd` moves as many bytes of another file past the kernel's cache,
in pieces of eight pages. All take turns. The index is opened with its heads out of the kernel's cache.

    python -m benchmarks.kv_store DIR
"""

import argparse
import mmap
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.store.directory import open_files
from kvstore.store.heads import HEAD_BYTES, HEAD_WORDS, SEQUENCE_WORD, are_sound, seal
from kvstore.store.index import PageName
from kvstore.store.operations import Read, Write
from kvstore.store.page_store import PageStore
from kvstore.store.place import StoreIdentity

KIB: Final = 1024
PAGES: Final = {"0.5B shape": 192 * KIB, "SmolLM2": 360 * KIB, "tiny": 40 * KIB}
ROUND_BYTES: Final = 256 << 20
PROMPT_PAGES: Final = 256
RUN: Final = 8
MANY: Final = 1_000_000
READ_GOAL, OPEN_GOAL_S, MEMORY_GOAL = 0.8, 1.0, 100


class Opened:
    """A store that is waited for."""

    def __init__(self, directory: Path, page_bytes: int, num_slots: int) -> None:
        identity = StoreIdentity(host="benchmark", layout_digest=bytes(16), page_bytes=page_bytes)
        self.woken = threading.Event()
        size = 4096 + identity.slot_bytes + num_slots * (identity.slot_bytes + HEAD_BYTES)
        self.folder = directory / identity.folder
        self.store = PageStore(open_files(directory, identity, size), page_bytes, self.woken.set)
        while not self.store.is_loaded:
            self.poll()

    def poll(self) -> list[Read | Write]:
        self.woken.wait()
        self.woken.clear()
        return self.store.poll()

    def finish(self, wanted: Read | Write | None) -> None:
        assert wanted is not None
        while wanted not in self.poll():
            pass

    def remove(self) -> None:
        self.store.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


class Pages:
    """Pages of a size in memory, and names for them that are new in each round."""

    def __init__(self, page_bytes: int) -> None:
        self.count = ROUND_BYTES // page_bytes // RUN * RUN
        self.num_bytes = self.count * page_bytes
        self.page_bytes = page_bytes
        self.memory = memoryview(mmap.mmap(-1, self.num_bytes))
        self.words = np.frombuffer(self.memory, np.uint64)
        self.words[:] = np.random.default_rng(1).integers(2**63, size=len(self.words), dtype=np.uint64)
        self.pages = [[self.memory[at * page_bytes :][:page_bytes]] for at in range(self.count)]
        self.names: list[PageName] = []

    def rename(self) -> None:
        hashes = [os.urandom(16) for _ in range(self.count + 1)]
        self.names = [PageName(after, before) for before, after in pairwise(hashes)]

    def prompts(self) -> range:
        return range(0, self.count, PROMPT_PAGES)


def write(opened: Opened, pages: Pages) -> float:
    """Seconds until all of `pages` are found; prompts are begun as fast as the store takes them."""
    pages.rename()
    prompts = deque(pages.prompts())
    num_left = len(prompts)
    began = time.perf_counter()
    while num_left:
        while prompts and not opened.store.must_wait(PROMPT_PAGES):
            prompt = slice(first := prompts.popleft(), first + PROMPT_PAGES)
            assert opened.store.begin_write(pages.names[prompt], pages.pages[prompt]) is not None
        for ended in opened.poll():
            assert isinstance(ended, Write)
            if ended.is_written:
                assert all(ended.is_stored)
                num_left -= 1
            else:
                opened.store.commit(ended, [True] * len(ended.claims))
    return time.perf_counter() - began


def read(opened: Opened, pages: Pages) -> float:
    """Seconds until all of `pages` are in memory and checked, prompt after prompt."""
    before = int(pages.words.sum())
    pages.words[:] = 0
    began = time.perf_counter()
    for first in pages.prompts():
        prompt = slice(first, first + PROMPT_PAGES)
        found = opened.store.lookup([name.page_hash for name in pages.names[prompt]])
        begun = opened.store.read(*found, pages.pages[prompt])
        opened.finish(begun)
        assert begun is not None
        assert not any(begun.outcomes)
        assert len(found[0]) == len(pages.pages[prompt])
    took = time.perf_counter() - began
    assert int(pages.words.sum()) == before
    return took


def dd(pages: Pages, *arguments: str) -> float:
    """Seconds that `dd` says it took for the bytes of a round."""
    block = RUN * pages.page_bytes
    command = ["dd", *arguments, f"bs={block}", f"count={pages.num_bytes // block}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}).stderr
    (took,) = re.findall(r"copied, ([0-9.e-]+) s", said)
    return float(took)


def measure(directory: Path, name: str, page_bytes: int, rounds: int) -> float:
    """Prints rates of each round in GB/s; returns the share of `dd` that reads had, by medians."""
    pages = Pages(page_bytes)
    beside = directory / "beside"
    with beside.open("wb") as file:
        file.write(pages.memory)
        file.flush()
        os.fdatasync(file.fileno())
    # As many slots as are written in two rounds, so that later ones evict.
    opened = Opened(directory, page_bytes, 2 * pages.count)
    took: dict[str, list[float]] = {"write": [], "dd write": [], "read": [], "dd read": []}
    for round_number in range(rounds + 2):
        results = {
            "write": write(opened, pages),
            "dd write": dd(pages, "if=/dev/zero", f"of={beside}", "oflag=direct", "conv=notrunc"),
            "read": read(opened, pages),
            "dd read": dd(pages, f"if={beside}", "of=/dev/null", "iflag=direct"),
        }
        # The first two rounds write blocks for the first time, which file systems note down.
        if round_number >= 2:
            for what, seconds in results.items():
                took[what].append(seconds)
    why = opened.store.why_buffered
    opened.remove()
    beside.unlink()
    print(
        f"{name}, pages of {page_bytes // KIB} KiB, {pages.count} of them, prompts of {PROMPT_PAGES}; {why or 'direct'}"
    )
    for what, seconds in took.items():
        print(f"  {what:9}" + "".join(f"{pages.num_bytes / each / 1e9:7.2f}" for each in seconds) + " GB/s")
    shares = {
        what: [there / here for here, there in zip(took[what], took[f"dd {what}"], strict=True)]
        for what in ("read", "write")
    }
    for what, each in shares.items():
        print(f"  {what} of dd: " + ", ".join(f"{share:.2f}" for share in each), flush=True)
    return statistics.median(shares["read"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure_opening(directory: Path, rounds: int) -> tuple[float, float]:
    """Median seconds to open a store with a million pages, and bytes of memory for each."""
    opened = Opened(directory, 4096, MANY)
    folder = opened.folder
    rows = np.zeros((MANY, HEAD_WORDS), np.uint64)
    rows[:, :4] = np.random.default_rng(1).integers(2**63, size=(MANY, 4), dtype=np.uint64)
    # Prompts of 64 pages, one page after another.
    follow = np.arange(MANY) % 64 > 0
    rows[follow, 2:4] = rows[np.nonzero(follow)[0] - 1, :2]
    rows[:, SEQUENCE_WORD] = np.arange(1, MANY + 1)
    seal(rows, 0)
    assert are_sound(rows, 0).all()
    opened.store.close()
    heads = os.open(folder / "heads", os.O_RDWR)
    os.pwrite(heads, rows.tobytes(), 4096)
    del rows
    seconds: list[float] = []
    cpu: list[float] = []
    grown: list[float] = []
    for _ in range(rounds):
        os.fdatasync(heads)
        os.posix_fadvise(heads, 0, 0, os.POSIX_FADV_DONTNEED)
        # A process of its own: what this one has freed would be taken again, and not be seen.
        command = [sys.executable, "-m", "benchmarks.kv_store", str(directory), "--open-only"]
        took, its_cpu, num_bytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        seconds.append(float(took))
        cpu.append(float(its_cpu))
        grown.append(float(num_bytes) / MANY)
    os.close(heads)
    Opened(directory, 4096, MANY).remove()
    print(
        f"{MANY} pages open in "
        + ", ".join(f"{each:.2f}" for each in seconds)
        + " s, CPU time "
        + ", ".join(f"{each:.2f}" for each in cpu)
    )
    print("  memory grew by " + ", ".join(f"{each:.0f}" for each in grown) + " bytes a page")
    return statistics.median(seconds), statistics.median(grown)


def open_only(directory: Path) -> None:
    """Prints the seconds that opening took, of the clock and of CPU, and the bytes by which this process has grown."""
    before, began, cpu = resident_bytes(), time.perf_counter(), time.process_time()
    opened = Opened(directory, 4096, MANY)
    took = time.perf_counter() - began
    print(took, time.process_time() - cpu, resident_bytes() - before)
    assert opened.store.stats()["stored"] == MANY
    opened.store.close()


def main() -> None:
    """Prints every round; exits with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the disk to measure; 5 GB are used and removed again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--open-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open_only:
        open_only(arguments.directory)
        return
    met: list[bool] = []
    for name, page_bytes in PAGES.items():
        share = measure(arguments.directory, name, page_bytes, arguments.rounds)
        met.append(share >= READ_GOAL)
        print(f"  goal, verified reads at least {READ_GOAL} of dd: {'met' if met[-1] else 'MISSED'}, {share:.2f}")
    seconds, num_bytes = measure_opening(arguments.directory, arguments.rounds)
    met += [seconds <= OPEN_GOAL_S, num_bytes <= MEMORY_GOAL]
    print(f"  goals, {OPEN_GOAL_S} s and {MEMORY_GOAL} bytes: {'met' if all(met[-2:]) else 'MISSED'}")
    raise SystemExit(not all(met))


if __name__ == "__main__":
    main()
