"""Stores that other distributions bring: found by their entry points, made, or refused with the reason."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import StoreUnmade
from kvstore.store.installed.identity import context_of
from kvstore.store.installed.plugins import InstalledStore, installed_stores, load_store
from tests.kvstore.store.installed import distribution
from tests.kvstore.store.installed.unruly import IDENTITY, VALUES, page_of, value_of

MODULE = """
def broken(context):
    raise OSError("no such server")

def nothing(context):
    return object()
"""
HASHES = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for folder in distribution.write_example(site):
        monkeypatch.syspath_prepend(folder)
    bad = tmp_path / "bad"
    distribution.write(bad, {"broken": "brought_store:broken", "nothing": "brought_store:nothing", "gone": "gone:x"})
    (bad / "brought_store.py").write_text(MODULE)
    monkeypatch.syspath_prepend(bad)
    for name in ("brought_store", "kvmesh_folder_store"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def made(**options: Any) -> InstalledStore:
    return load_store("folder", context_of(IDENTITY, 5.0, options))


def got(store: InstalledStore, hashes: list[bytes]) -> list[bytes | None]:
    buffers = [bytearray(VALUES.value_bytes) for _ in hashes]
    found = store.get(hashes, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) if is_there else None for buffer, is_there in zip(buffers, found, strict=True)]


def put(store: InstalledStore, hashes: list[bytes]) -> None:
    values = [memoryview(value_of(one, page_of(one))) for one in hashes]
    assert store.put(hashes, values) == [True] * len(hashes)


def test_the_example_keeps_pages_from_one_process_to_the_next(tmp_path: Path) -> None:
    # `mooncake` is our own, and there if this environment was set up since.
    assert sorted({*installed_stores(), "mooncake"}) == ["broken", "folder", "gone", "mooncake", "nothing"]
    put(made(path=tmp_path), HASHES[:3])
    store = made(path=str(tmp_path))
    assert store.contains(HASHES) == [True, True, True, False]
    assert got(store, HASHES) == [value_of(one, page_of(one)) for one in HASHES[:3]] + [None]
    store.remove([HASHES[0], HASHES[3]])
    assert store.contains(HASHES) == [False, True, True, False]
    store.close()
    [folder] = [path for path in tmp_path.iterdir() if path.name.startswith("kv-")]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {one.hex() for one in HASHES[1:3]}


def test_the_example_removes_what_was_used_least_recently(tmp_path: Path) -> None:
    store = made(path=tmp_path, max_pages=3)
    put(store, HASHES[:3])
    [folder] = [path for path in tmp_path.iterdir() if path.name.startswith("kv-")]
    for number, one in enumerate(HASHES[:3]):
        os.utime(folder / one.hex(), (number, number))
    assert got(store, HASHES[:1]) != [None]
    put(store, HASHES[3:])
    assert store.contains(HASHES) == [True, False, False, True]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "brought_store:broken raised OSError: no such server"),
        ("nothing", "returned object, which is not an InstalledStore"),
        ("gone", "gone:x raised ModuleNotFoundError"),
        (
            "foldr",
            r"no store foldr is installed \(entry points of kvmesh.stores: broken, .*, nothing\)",
        ),
        ("folder", "raised NotADirectoryError: /nowhere is no directory"),
    ],
)
def test_one_that_cannot_be_made_is_named_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(StoreUnmade, match=why) as refused:
        load_store(name, context_of(IDENTITY, 5.0, {"path": "/nowhere"}))
    assert refused.value.code == "store_unmade"
