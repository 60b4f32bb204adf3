"""A writer in another process, read while it writes and after kill -9 at any moment."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.cache.page_table import PageEntry
from kvstore.layout import KVLayout
from kvstore.pool.page_pool import PoolInfo, ShmHost

INFO = PoolInfo(
    group="g", num_pages=8, layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16), incarnation=1
)

# Every field of an entry follows from its generation, so an entry mixed of two can be told.
WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[3])
from kvstore.pool.page_pool import ShmHost
from tests.kvstore.cache.test_page_table_processes import entry
pool = ShmHost(sys.argv[1]).open(sys.argv[1] + "/kv-g", writable=True)
table = pool.table()
print("ready", flush=True)
for generation in itertools.count(int(sys.argv[2])):
    table.write(1 + generation % 7, entry(generation))
"""


def entry(generation: int) -> PageEntry:
    stamp = generation.to_bytes(16, "little")
    return PageEntry(
        generation=generation,
        owner_epoch=generation * 3,
        page_hash=stamp,
        parent_hash=stamp[::-1],
        tokens=stamp[:4] * (generation % 17),
        is_first=bool(generation & 1),
    )


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
                assert found == entry(found.generation) or not found.generation
                assert found.generation >= seen[page], "no entry comes back"
                seen[page] = found.generation
                num_reads += 1
        writer.kill()
        writer.wait()
        final = [table.read(page) for page in range(1, 8)]
        assert all(isinstance(one, PageEntry) and one == entry(one.generation) for one in final)
        last = max(one.generation for one in final if isinstance(one, PageEntry))
        assert last > newest
        newest = last
    assert num_reads > 100
    owner.close()
