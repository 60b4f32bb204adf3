"""Pages from another process over the `tcp` transport: `python -m benchmarks.tcp_transfer`.

64 MiB of pages over loopback, sent by a process of its own, with 1, 2 and 4 connections: in one run, and as 1,024 pages
of 64 KiB scattered at both ends. In turns with it in the same run: as many plain sockets, each with a thread at each
end (`sendall` and `recv_into` of its share, 2 MiB per call), and one memcpy. Medians of all rounds. Loopback copies
every byte twice in the kernel, on the cores of both ends.
"""

import argparse
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvstore.errors import DeviceUnavailable
from kvstore.pool.cuda.memory import DeviceMemory
from kvstore.pool.device import CPU
from kvstore.transfer.paired.link import Broken, Moved, PairLink, Ready
from kvstore.transfer.paired.tcp.link import TcpLinks, TcpSettings

MIB = 1 << 20
CALL_BYTES = 2 * MIB
PIECE_BYTES = 64 << 10


def no_devices() -> DeviceMemory:
    raise DeviceUnavailable("pages are in host memory here")


def parts_of(num_bytes: int, *, is_scattered: bool) -> list[tuple[int, int]]:
    """All bytes as one part, or as pieces in random order."""
    if not is_scattered:
        return [(0, num_bytes)]
    pieces = [(offset, min(PIECE_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, PIECE_BYTES)]
    return random.Random(1).sample(pieces, len(pieces))


def in_threads(work: Callable[[memoryview], None], pages: memoryview, num_streams: int) -> None:
    """Run `work` in a thread per connection, each with an equal share of the pages."""
    share = -(-len(pages) // num_streams)
    shares = [pages[offset : offset + share] for offset in range(0, len(pages), share)]
    threads = [threading.Thread(target=work, args=(one,)) for one in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send(port: int, pages: memoryview) -> None:
    """Send `pages` over a connection of its own."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for offset in range(0, len(pages), CALL_BYTES):
            connection.sendall(pages[offset : offset + CALL_BYTES])


def receive(server: socket.socket, pages: memoryview) -> None:
    """Receive `pages` over the next connection that arrives."""
    connection, _ = server.accept()
    with connection:
        done = 0
        while done < len(pages):
            done += connection.recv_into(pages[done : done + CALL_BYTES])


def until(link: PairLink, wanted: Ready | Moved) -> None:
    """Wait for `wanted`, looking once a millisecond as an agent's loop does."""
    while True:
        for news in link.news():
            if isinstance(news, Broken):
                raise SystemExit(news.message)
            if news == wanted:
                return
        time.sleep(0.001)


def be_source(num_bytes: int) -> None:
    """The other process: takes `pair UNIQUE_ID`, `move NUMBER SCATTERED` or `plain PORT NUM_STREAMS`, one per line."""
    pages = memoryview(bytearray(num_bytes))
    maker = TcpLinks(TcpSettings(), no_devices)
    link: PairLink | None = None
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "pair":
            link = maker.link(CPU, bytes.fromhex(rest[0]), 1)
            link.begin()
        elif word == "plain":
            in_threads(partial(send, int(rest[0])), pages, int(rest[1]))
        elif link is not None:
            link.move(int(rest[0]), pages, parts_of(num_bytes, is_scattered=rest[1] == "True"))


class Destination:
    """This process's side, and its commands to the other process."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        words = [sys.executable, "-m", "benchmarks.tcp_transfer", "--source", str(num_bytes)]
        self.source = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
        self.pages = memoryview(bytearray(num_bytes))
        self.other = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
        self.number = 0

    def tell(self, *words: object) -> None:
        """Send one line to the other process."""
        assert self.source.stdin is not None
        self.source.stdin.write(" ".join(map(str, words)) + "\n")
        self.source.stdin.flush()

    def pair(self, num_streams: int) -> tuple[TcpLinks, PairLink]:
        """Pair with the other process."""
        maker = TcpLinks(TcpSettings(num_streams=num_streams), no_devices)
        unique_id = maker.unique_id()
        link = maker.link(CPU, unique_id, 0)
        link.begin()
        self.tell("pair", unique_id.hex())
        until(link, Ready())
        return maker, link

    def pull(self, link: PairLink, *, is_scattered: bool) -> None:
        """One transfer."""
        self.number += 1
        link.move(self.number, self.pages, parts_of(self.num_bytes, is_scattered=is_scattered))
        self.tell("move", self.number, is_scattered)
        until(link, Moved(self.number))

    def plain(self, num_streams: int) -> None:
        """Send as many bytes over as many plain sockets."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.tell("plain", server.getsockname()[1], num_streams)
            in_threads(partial(receive, server), self.pages, num_streams)

    def memcpy(self) -> None:
        """Copy as many bytes in memory."""
        np.copyto(np.frombuffer(self.pages, np.uint8), self.other)


def medians_s(works: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each work, in turns, after one round that does not count."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        # In turns, so that other work on the machine affects all alike.
        for work, seconds in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--source", type=int, help="run as the source process, with this many bytes")
    arguments = parser.parse_args()
    if arguments.source:
        be_source(arguments.source)
        return
    here = Destination(arguments.mib * MIB)
    try:
        for num_streams in (1, 2, 4):
            maker, link = here.pair(num_streams)
            pulls = [partial(here.pull, link, is_scattered=is_scattered) for is_scattered in (False, True)]
            works = [partial(here.plain, num_streams), here.memcpy, *pulls]
            plain, copied, *pulled = medians_s(works, arguments.rounds)
            for is_scattered, taken in zip((False, True), pulled, strict=True):
                name = f"tcp, {num_streams} connections, {'scattered' if is_scattered else 'one run'}"
                print(
                    f"{name:36s} {here.num_bytes / taken / 1e9:6.2f} GB/s  {plain / taken:5.2f} of plain sockets "
                    f"({here.num_bytes / plain / 1e9:.2f} GB/s)  {copied / taken:5.2f} of memcpy"
                )
            link.stop()
            maker.close()
    finally:
        assert here.source.stdin is not None
        here.source.stdin.close()
        here.source.wait(20)


if __name__ == "__main__":
    main()
