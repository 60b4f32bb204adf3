"""Times pages in a Mooncake Store, as agents put and get them, beside its own bare calls and `transfer_engine_bench`.

One host, loopback, tcp: a master and a process that gives memory to the pool are started, and end with this one. Pages
of 192 KiB (the 0.5B shape), prompts of 256 pages. `pages` is `InstalledPages` with `MooncakeStore`: copies out of and
into memory like a pool's, checksums, signatures, calls of 42 pages by threads. `put, get_batch` are the same calls of
Mooncake's client alone, one after the other. `transfer_engine_bench` moves pieces of 192 KiB, 42 at a time by two
threads, without a store. All take turns.

    python -m benchmarks.mooncake
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.mooncake.master import Master, binary, why_not_here
from kvstore.store.index import PageName
from kvstore.store.installed.calls import BoundedCalls
from kvstore.store.installed.identity import context_of
from kvstore.store.installed.installed_pages import THREADS, InstalledPages
from kvstore.store.installed.values import PageValues
from kvstore.store.mooncake import make
from kvstore.store.operations import Read, Write
from kvstore.store.place import StoreIdentity

PAGE: Final = 192 << 10
PROMPT_PAGES: Final = 256
CALL_PAGES: Final = 42
"""8 MiB, the most that one call of a store has."""
DEADLINE_S: Final = 20.0
IDENTITY: Final = StoreIdentity(host="", layout_digest=bytes(16), page_bytes=PAGE)
KEY: Final = b"a key of this benchmark: 32 bytes"


class Pages:
    """A store that is waited for."""

    def __init__(self) -> None:
        context = context_of(IDENTITY, DEADLINE_S, {}, KEY)
        self._woken = threading.Event()
        calls = BoundedCalls(THREADS, DEADLINE_S, time.monotonic, lambda *_: None, self._woken.set)
        self.pages = InstalledPages(make(context), PageValues(IDENTITY, KEY), PAGE, calls)

    def _ended(self) -> list[Read | Write]:
        while not (ended := self.pages.poll()):
            self._woken.wait()
            self._woken.clear()
        return ended

    def put(self, names: list[PageName], memory: list[memoryview]) -> float:
        """GB/s, from the pool's memory until all is kept."""
        begun = time.perf_counter()
        # As `PoolWrites` does: 64 pages at a time.
        for at in range(0, len(names), 64):
            write = self.pages.begin_write(names[at : at + 64], [[one] for one in memory[at : at + 64]])
            assert write is not None
            assert self._ended() == [write]
            self.pages.commit(write, [True] * len(write.claims))
            assert self._ended() == [write]
            assert all(write.is_stored), self.pages.last_failure
        return _rate(len(names), begun)

    def get(self, names: list[PageName], memory: list[memoryview]) -> float:
        """GB/s, from the question whether they are there until all are in the pool's memory, judged."""
        begun, found = time.perf_counter(), []
        self.pages.find([[name.page_hash for name in names]], found.extend)
        while not found:
            self.pages.poll()
            if not found:
                self._woken.wait()
                self._woken.clear()
        (stored,) = found
        assert len(stored.slots) == len(names)
        read = self.pages.read(stored.slots, stored.sequences, [[one] for one in memory])
        assert self._ended() == [read]
        assert read is not None
        assert not any(read.outcomes), self.pages.last_failure
        return _rate(len(names), begun)

    def forget(self, names: list[PageName]) -> None:
        """As an agent that has just started: it knows of none."""
        for name in names:
            self.pages._known.drop(name.page_hash)  # noqa: SLF001 - nothing else in this process does that


def _rate(num_pages: int, begun: float) -> float:
    return num_pages * PAGE / (time.perf_counter() - begun) / 1e9


def _bare(number: int, values: list[memoryview]) -> tuple[float, float]:
    """GB/s of put and of get, by a client of its own."""
    client = _client()
    keys = [f"bare-{number}-{index}" for index in range(len(values))]
    begun = time.perf_counter()
    assert not any(client.put(key, value) for key, value in zip(keys, values, strict=True))
    put, begun = _rate(len(keys), begun), time.perf_counter()
    for at in range(0, len(keys), CALL_PAGES):
        assert all(client.get_batch(keys[at : at + CALL_PAGES]))
    got = _rate(len(keys), begun)
    client.batch_remove(keys, True)
    client.close()
    return put, got


def _client() -> Any:
    return make(context_of(IDENTITY, DEADLINE_S, {}, KEY))._client  # noqa: SLF001 - the bare one is what is measured


@contextlib.contextmanager
def _target(folder: Path) -> Iterator[str]:
    """A `transfer_engine_bench` that is read from and written to; its address."""
    log = folder / "target.log"
    with log.open("wb") as output:
        command = [*_bench("target"), "--local_server_name=127.0.0.1"]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_telling())
    try:
        deadline = time.monotonic() + 20.0
        while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text(errors="replace"))):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        process.kill()
        process.wait()


def _bench(mode: str) -> list[str]:
    flags = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "buffer_size": 256 << 20, "mode": mode}
    return [binary("transfer_engine_bench"), *(f"--{name}={value}" for name, value in flags.items())]


def _telling() -> dict[str, str]:
    """Its figures are lines of information, which agents do not want in their logs."""
    return os.environ | {"MC_LOG_LEVEL": "INFO"}


def _engine(address: str, operation: str, seconds: int) -> float:
    """GB/s, as it says itself."""
    flags = {"segment_id": address, "operation": operation, "block_size": PAGE, "batch_size": CALL_PAGES}
    flags |= {"threads": 2, "duration": seconds, "local_server_name": "127.0.0.1"}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    command = [*_bench("initiator"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=_telling())
    found = re.search(r"throughput ([\d.]+) GB/s", done.stdout + done.stderr)
    assert found, done.stderr
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of transfer_engine_bench, each time")
    args = parser.parse_args()
    if why := why_not_here():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        master = Master(Path(name))
        master.start()
        stack.callback(master.kill)
        owner = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.mooncake.owner"],
            env=os.environ | {"MOONCAKE_CONFIG_PATH": str(master.settings("owner", 512 << 20))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(owner.kill)
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"0\n"
        os.environ["MOONCAKE_CONFIG_PATH"] = str(master.settings("client", 0))
        _measure(args.rounds, args.seconds, stack.enter_context(_target(Path(name))))


def _measure(rounds: int, seconds: int, target: str) -> None:
    pages = Pages()
    content = os.urandom(PAGE * PROMPT_PAGES)
    pool = memoryview(bytearray(content))
    memory = [pool[at : at + PAGE] for at in range(0, len(pool), PAGE)]
    print("GB/s            pages  bare  transfer_engine_bench  pages of it", flush=True)
    for number in range(rounds):
        parents = [os.urandom(16) for _ in memory]
        names = [PageName(os.urandom(16), parent) for parent in parents]
        put = pages.put(names, memory)
        pages.forget(names)
        pool[:] = bytes(len(pool))
        got = pages.get(names, memory)
        assert pool == content, "what comes back is what was put"
        pages.pages._store.remove([name.page_hash for name in names])  # noqa: SLF001 - room for the next round
        pages.forget(names)
        bare_put, bare_got = _bare(number, memory)
        for what, ours, bare, operation in (("put", put, bare_put, "write"), ("get", got, bare_got, "read")):
            engine = _engine(target, operation, seconds)
            print(f"round {number} {what}     {ours:5.2f} {bare:5.2f} {engine:22.2f} {ours / engine:12.2f}", flush=True)


if __name__ == "__main__":
    main()
