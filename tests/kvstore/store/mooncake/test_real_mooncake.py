"""The real Mooncake Store behind our plug-in: what the pool of the tests claims, seen at the real one.

In processes of their own, since Mooncake reads its waits from the environment once, and its threads stay.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.mooncake.master import Master, why_not_here
from kvstore.store.installed.identity import context_of
from kvstore.store.mooncake import PAUSE_S, MooncakeStore, PoolFailed, make
from tests.kvstore.store.installed.unruly import IDENTITY, VALUES, page_of, value_of

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(180)]

DEADLINE_S = 5.0
KEY = b"k" * 32
HASHES = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    if why := why_not_here():
        pytest.skip(why)
    made = Master(tmp_path)
    made.start()
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def store(master: Master, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeStore]:
    """A client that gives nothing to the pool."""
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(master.settings("client", 0)))
    made = make(context_of(IDENTITY, DEADLINE_S, {}, KEY))
    yield made
    made.close()


@pytest.fixture
def owner(master: Master) -> Iterator[subprocess.Popen[str]]:
    """Another process that gives memory to it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.mooncake.owner"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"MOONCAKE_CONFIG_PATH": str(master.settings("owner"))},
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def put(store: MooncakeStore, hashes: list[bytes]) -> list[bool]:
    return store.put(hashes, [memoryview(value_of(one, page_of(one))).toreadonly() for one in hashes])


def got(store: MooncakeStore, hashes: list[bytes]) -> list[bytes | None]:
    buffers = [bytearray(VALUES.value_bytes) for _ in hashes]
    found = store.get(hashes, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) if is_there else None for buffer, is_there in zip(buffers, found, strict=True)]


def fails(ask: Callable[[], object]) -> float:
    """How many seconds it takes to say that the pool does not do it."""
    begun = time.monotonic()
    with pytest.raises(PoolFailed):
        ask()
    return time.monotonic() - begun


@pytest.mark.usefixtures("owner")
def test_pages_are_put_got_removed_and_put_again(store: MooncakeStore) -> None:
    assert put(store, HASHES[:3]) == [True] * 3
    assert store.contains(HASHES) == [True, True, True, False]
    assert got(store, HASHES) == [*(value_of(one, page_of(one)) for one in HASHES[:3]), None]
    # It was got a moment ago, so without force Mooncake would keep it, and with it whatever is wrong about it.
    store.remove(HASHES[:1])
    assert store.contains(HASHES[:2]) == [False, True]
    assert put(store, HASHES[:1]) == [True]
    assert got(store, HASHES[:1]) == [value_of(HASHES[0], page_of(HASHES[0]))]


@pytest.mark.usefixtures("owner")
def test_a_master_that_is_killed_is_told_from_a_missing_page_and_found_again(
    store: MooncakeStore, master: Master
) -> None:
    put(store, HASHES)
    master.kill()
    # Connecting again takes Mooncake 4.3 s; then it is not tried for a while.
    assert fails(lambda: got(store, HASHES)) < 2 * DEADLINE_S
    for ask in (lambda: store.contains(HASHES), lambda: got(store, HASHES), lambda: put(store, HASHES)):
        assert fails(ask) < 0.5
    master.start()
    deadline = time.monotonic() + PAUSE_S + 30.0
    while True:
        try:
            assert store.contains(HASHES) == [False] * 4, "it knows of nothing"
            # Room is there again when the owner has said what it gives.
            assert put(store, HASHES) == [True] * 4
            break
        except PoolFailed:
            assert time.monotonic() < deadline, "it is not found again"
            time.sleep(0.5)
    assert got(store, HASHES) == [value_of(one, page_of(one)) for one in HASHES]


@pytest.mark.usefixtures("owner")
def test_a_master_that_hangs_costs_no_call(store: MooncakeStore, master: Master) -> None:
    put(store, HASHES)
    with master.paused():
        assert fails(lambda: store.contains(HASHES)) < DEADLINE_S, "given up by Mooncake, not by us"
        assert fails(lambda: got(store, HASHES)) < 0.5
    time.sleep(PAUSE_S)
    assert got(store, HASHES) == [value_of(one, page_of(one)) for one in HASHES]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_gone_costs_its_pages(
    store: MooncakeStore, owner: subprocess.Popen[str], how: signal.Signals
) -> None:
    put(store, HASHES)
    owner.send_signal(how)
    assert store.contains(HASHES) == [True] * 4, "the master has not noticed"
    assert fails(lambda: got(store, HASHES)) < DEADLINE_S, "given up by Mooncake, not by us"


def test_no_page_is_empty_or_of_another_length(store: MooncakeStore, owner: subprocess.Popen[str]) -> None:
    assert owner.stdin is not None
    assert owner.stdout is not None
    namespace = context_of(IDENTITY, DEADLINE_S, {}, KEY).namespace
    owner.stdin.write(f"{namespace}/{HASHES[0].hex()} {VALUES.value_bytes // 2}\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "0\n"
    (value,) = got(store, HASHES[:1])
    assert value is not None
    assert VALUES.open(HASHES[0], value) is None, "and so it is removed"
    owner.stdin.write(f"{namespace}/{HASHES[1].hex()} 0\n")
    owner.stdin.flush()
    assert int(owner.stdout.readline()) < 0, "this release refuses empty values"
