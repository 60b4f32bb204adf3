"""A writer in another process, read while it writes and after kill -9 at any moment."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.cache.allocator import PageState
from kvstore.cache.page_table import EntryRun, PageEntry
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import PoolInfo, ShmHost
from tests.kvstore.cache.pages import entries_of

INFO = PoolInfo(
    group="g", num_pages=8, layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16), incarnation=1
)

NUM_WRITTEN = 7

# Every field of an entry follows from its generation, so an entry mixed of two can be told. Every second time all pages
# are written as a run, in turns as columns and entry by entry.
WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[3])
from kvstore.pool.page_pool import ShmHost
from kvstore.cache import page_table
from tests.kvstore.cache.test_page_table_processes import NUM_WRITTEN, entry, run
pool = ShmHost(sys.argv[1]).open(sys.argv[1] + "/kv-g", writable=True)
table = pool.table()
print("ready", flush=True)
for number in itertools.count(int(sys.argv[2])):
    if number % 2:
        page_table._COLUMNS_FROM = 1 if number % 4 == 1 else 1 + NUM_WRITTEN
        table.write_run(range(1, 1 + NUM_WRITTEN), run(number))
    else:
        for generation in range(number * NUM_WRITTEN, (number + 1) * NUM_WRITTEN):
            table.write(1 + generation % NUM_WRITTEN, entry(generation))
"""


def stamp(generation: int) -> bytes:
    return generation.to_bytes(16, "little")


def entry(generation: int) -> PageEntry:
    number = generation // NUM_WRITTEN
    return PageEntry(
        generation=generation,
        owner_epoch=number * 3,
        page_hash=stamp(generation),
        parent_hash=stamp(generation - 1),
        tokens=stamp(generation)[:4] * (16 if number % 2 else generation % 17),
        is_first=generation % NUM_WRITTEN == 0,
    )


def run(number: int) -> EntryRun:
    """The entries of all generations of `number`."""
    generations = range(number * NUM_WRITTEN, (number + 1) * NUM_WRITTEN)
    return EntryRun(
        states=[PageState.FREE] * NUM_WRITTEN,
        generations=generations,
        owner_epoch=number * 3,
        page_hashes=[stamp(one) for one in generations],
        parent=stamp(generations[0] - 1),
        tokens=b"".join(stamp(one)[:4] * 16 for one in generations),
        is_first=True,
    )


def test_a_run_has_the_entries_of_its_generations() -> None:
    assert entries_of(run(5)) == [entry(one) for one in range(35, 42)]


@pytest.mark.process
def test_no_reader_ever_sees_half_an_entry(tmp_path: Path) -> None:
    host = ShmHost(tmp_path)
    owner = host.create("kv-g", INFO)
    table = host.open(owner.path, writable=False).table()
    chance = random.Random(5)
    newest = 0
    num_reads = 0
    for start in range(1, 6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(start * 10**9), str(Path(__file__).parents[3])]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout
        with writer.stdout as ready:
            assert ready.readline() == b"ready\n"
        until = time.monotonic() + chance.uniform(0.02, 0.2)
        seen = [0] * 8
        while time.monotonic() < until:
            for page in range(1, 8):
                found = table.read(page)
                assert isinstance(found, PageEntry)
                assert not found.generation or found == entry(found.generation)
                assert found.generation >= seen[page], "no entry comes back"
                seen[page] = found.generation
                num_reads += 1
        writer.kill()
        writer.wait()
        final = [table.read(page) for page in range(1, 8)]
        assert all(isinstance(one, PageEntry) and (not one.generation or one == entry(one.generation)) for one in final)
        last = max(one.generation for one in final if isinstance(one, PageEntry))
        assert last > newest
        newest = last
    assert num_reads > 100
    owner.close()
