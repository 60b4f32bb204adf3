"""The file of responses: what is kept, for whom and how long, and what is said of a file that cannot be used."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nodes.gateway.surfaces.responses.store import ResponseStore, StoredResponse, StoreTooSmall, StoreUnusable

ENTRY = StoredResponse(b'{"id":"resp_1"}', b"[]")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite"


def noise(size: int) -> StoredResponse:
    return StoredResponse(b"", os.urandom(size))


def test_what_one_gateway_keeps_another_finds_until_it_is_deleted(path: Path) -> None:
    first, second = ResponseStore(path, 10**6), ResponseStore(path, 10**6)
    assert second.get("resp_1", "") is None
    first.put("resp_1", "", ENTRY)
    assert second.get("resp_1", "") == ENTRY
    assert second.delete("resp_1", "")
    assert first.get("resp_1", "") is None
    assert not first.delete("resp_1", "")


def test_an_entry_is_its_owners_alone(path: Path) -> None:
    store = ResponseStore(path, 10**6)
    store.put("resp_1", "ann", ENTRY)
    for other in ("bob", ""):
        assert store.get("resp_1", other) is None
        assert not store.delete("resp_1", other)
    assert store.get("resp_1", "ann") == ENTRY


def test_the_oldest_go_first(path: Path) -> None:
    store = ResponseStore(path, 10_000)
    for index in range(20):
        store.put(f"resp_{index}", "", noise(2000))
    kept = [index for index in range(20) if store.get(f"resp_{index}", "")]
    assert kept == [16, 17, 18, 19]
    # 10,000 bytes, and what SQLite takes besides.
    assert path.stat().st_size < 60_000


def test_one_that_never_fits_is_refused_and_costs_no_other(path: Path) -> None:
    store = ResponseStore(path, 1000)
    store.put("resp_1", "", ENTRY)
    with pytest.raises(StoreTooSmall):
        store.put("resp_2", "", noise(2000))
    assert store.get("resp_1", "") == ENTRY


def test_a_file_of_another_version_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match="version 7"):
        ResponseStore(path, 1000).put("resp_1", "", ENTRY)
    assert path.read_bytes() == before


def test_a_file_that_is_no_store(path: Path) -> None:
    path.write_bytes(b"not a database " * 100)
    with pytest.raises(StoreUnusable, match="not a database"):
        ResponseStore(path, 1000).get("resp_1", "")


def test_a_store_that_cannot_be_written_is_used_again_once_it_can(path: Path) -> None:
    store = ResponseStore(path, 10**6)
    store.put("resp_1", "", ENTRY)
    connection: Any = store._connection
    connection.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreUnusable, match="readonly"):
        store.put("resp_2", "", ENTRY)
    store.put("resp_2", "", ENTRY)
    assert store.get("resp_1", "") == ENTRY


def test_a_disk_that_is_full(path: Path) -> None:
    store = ResponseStore(path, 10**6)
    store.put("resp_1", "", ENTRY)
    connection: Any = store._connection
    connection.execute("PRAGMA max_page_count = 8")
    with pytest.raises(StoreUnusable, match="full"):
        store.put("resp_2", "", noise(100_000))
    assert store.get("resp_1", "") == ENTRY
    assert store.get("resp_2", "") is None


WRITER = """
import sys
from pathlib import Path
from nodes.gateway.surfaces.responses.store import ResponseStore, StoredResponse
store = ResponseStore(Path(sys.argv[1]), 10**6)
for index in range(10**6):
    store.put(f"resp_{index}", "", StoredResponse(b"x" * 5000, b"y"))
    print(index, flush=True)
"""


def test_a_writer_that_is_killed_leaves_what_it_has_written(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                writer.kill()
                break
    store = ResponseStore(path, 10**6)
    assert all(store.get(f"resp_{index}", "") for index in range(21))
    store.put("mine", "", ENTRY)
