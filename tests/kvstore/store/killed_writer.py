"""Processes that store pages as fast as they can, each killed at some moment; the next one opens what they left.

    python -m tests.kvstore.store.killed_writer DIR SEED KILLS [BUG...]

Prints what was found as JSON; with bugs, it ends once one shows. A process of its own: it forks, which a test's process
with its threads must not.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvstore.store import page_store as page_store_module
from kvstore.store.directory import open_files
from kvstore.store.files import SlabFiles
from kvstore.store.page_store import PageStore, StoreLimits
from kvstore.store.place import StoreIdentity
from tests.kvstore.store.pages import blank, chain, content, memory

PAGE = 40960
IDENTITY = StoreIdentity(host="h", layout_digest=b"l" * 16, page_bytes=PAGE)
SIZE = 4096 + 49 * (PAGE + 64)
LIMITS = StoreLimits(piece_bytes=2 * PAGE)
PROMPTS = 12
PROMPT_PAGES = 12
HASH_BYTES = 16


class Opened:
    """A store, and its events one after another."""

    def __init__(self, directory: Path) -> None:
        self.woken = threading.Event()
        self.store = PageStore(open_files(directory, IDENTITY, SIZE), PAGE, self.woken.set, LIMITS)
        while not self.store.is_loaded:
            self.wait()

    def wait(self) -> None:
        # Long enough for any disk; what never comes is an error, and not a test that hangs.
        assert self.woken.wait(30)
        self.woken.clear()
        self.ended = self.store.poll()

    def until(self, wanted: Any) -> None:
        self.wait()
        while wanted not in self.ended:
            self.wait()


def write_for_ever(directory: Path, seed: int, told: int) -> None:
    """Writes the hash of each page that is stored into the pipe `told`, after that."""
    opened, draw = Opened(directory), random.Random(seed)
    while True:
        names = chain(draw.randrange(PROMPTS), draw.randint(1, PROMPT_PAGES))
        write = opened.store.begin_write(names, memory(names, PAGE))
        if write is None:
            opened.store.lookup([name.page_hash for name in names])
            continue
        opened.until(write)
        opened.store.commit(write, [True] * len(write.claims))
        opened.until(write)
        os.write(told, b"".join(claim.name.page_hash for claim in write.claims))


def kill_one(directory: Path, seed: int, num_hashes: int, after_s: float) -> list[bytes]:
    """Kills a writer `after_s` after it has told of `num_hashes` pages; returns what it told until it was dead."""
    reading, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            write_for_ever(directory, seed, told)
        finally:
            os._exit(1)
    os.close(told)
    heard = b""
    while len(heard) < num_hashes * HASH_BYTES and (more := os.read(reading, 1 << 16)):
        heard += more
    # It goes on meanwhile: killed at once, it would always be where a write begins.
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the writer ended by itself"
    while more := os.read(reading, 1 << 16):
        heard += more
    os.close(reading)
    return [heard[at : at + HASH_BYTES] for at in range(0, len(heard), HASH_BYTES)]


def verify(directory: Path, told: list[bytes], outcomes: Counter[str]) -> None:
    opened = Opened(directory)
    outcomes["damaged heads"] += opened.store.num_damaged_heads
    # The last one told was used last, so nothing has taken its place but what was being written.
    outcomes["lost"] += not opened.store.lookup(told[-1:])[0]
    for prompt in range(PROMPTS):
        for name in chain(prompt, PROMPT_PAGES):
            slots, sequences = opened.store.lookup([name.page_hash])
            if not slots:
                continue
            read = opened.store.read(slots, sequences, blank(1, PAGE))
            assert read is not None
            opened.until(read)
            outcome = read.outcomes[0]
            if not outcome:
                outcome = "right" if bytes(read.pages[0][0]) == content(name.page_hash, PAGE) else "WRONG"
            outcomes[outcome] += 1
    opened.store.close()


def without_zeroing() -> None:
    real = SlabFiles.write_heads

    def write_heads(self: SlabFiles, first: int, data: bytes) -> None:
        if any(data):
            real(self, first, data)

    SlabFiles.write_heads = write_heads


def without_checksums() -> None:
    page_store_module.page_checksum = lambda page: 1


BUGS = {"without zeroing": without_zeroing, "without checksums": without_checksums}


def main(directory: str, seed: str, kills: str, *bugs: str) -> None:
    for bug in bugs:
        BUGS[bug]()
    draw = random.Random(int(seed))
    outcomes: Counter[str] = Counter()
    for number in range(int(kills)):
        told = kill_one(Path(directory), draw.randrange(2**32), draw.randint(1, 40), draw.uniform(0, 0.02))
        # In a child, too: a process that has had threads is not forked again.
        child = os.fork()
        if not child:
            found: Counter[str] = Counter()
            verify(Path(directory), told, found)
            (Path(directory) / f"found.{number}").write_text(json.dumps(found))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        outcomes.update(json.loads((Path(directory) / f"found.{number}").read_text()))
        # A bug shows only where a kill hits between two writes, a third of the time.
        if bugs and (outcomes["corrupt"] or outcomes["WRONG"]):
            break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
