"""What CURVE costs a step frame, compared with plain tcp in the same run: `python -m benchmarks.encryption`.

Two processes on loopback, the far sides ROUTERs that echo, the near sides DEALERs; blocking, so that nothing but ZeroMQ
is measured. Slices of round trips alternate between the two, and so does which of them goes first; each pair of slices
gives one ratio, and their median is shown with the 10th and 90th percentile.
"""

import os
import statistics
import subprocess
import sys
import time
from typing import Final

import zmq

SIZES: Final = (600, 2_500, 10_000, 60_000)
"""Bytes of a step of 8 sequences, of 32, of 128, and of one with prompts in it."""
SLICE: Final = 200
NUM_PAIRS: Final = 40


def echo() -> None:
    """The far side: bind a plain and a CURVE port, print them and the public key, and echo for ever."""
    context = zmq.Context()
    public_key, secret_key = zmq.curve_keypair()
    poller, ports = zmq.Poller(), list[str]()
    for is_encrypted in (False, True):
        socket = context.socket(zmq.ROUTER)
        if is_encrypted:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        ports.append(str(socket.bind_to_random_port("tcp://127.0.0.1")))
        poller.register(socket, zmq.POLLIN)
    print(*ports, public_key.decode(), flush=True)
    while True:
        for socket, _ in poller.poll():
            socket.send_multipart(socket.recv_multipart())


def dial(port: str, server_key: str) -> "zmq.Socket[bytes]":
    """A DEALER, encrypted if the listener's key is given."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if server_key:
        public_key, secret_key = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def round_trip(socket: "zmq.Socket[bytes]", parts: list[bytes]) -> float:
    """Mean seconds per round trip in a slice."""
    start = time.perf_counter()
    for _ in range(SLICE):
        socket.send_multipart(parts)
        socket.recv_multipart()
    return (time.perf_counter() - start) / SLICE


def measure(plain: "zmq.Socket[bytes]", encrypted: "zmq.Socket[bytes]", size: int) -> tuple[float, float, list[float]]:
    """Median seconds of plain and of CURVE, and the ratio of every pair."""
    parts = [b"h" * 40, os.urandom(size - 40)]
    pairs: list[tuple[float, float]] = []
    for number in range(NUM_PAIRS + 1):
        if number % 2:
            first = round_trip(plain, parts)
            pairs.append((first, round_trip(encrypted, parts)))
        else:
            second = round_trip(encrypted, parts)
            pairs.append((round_trip(plain, parts), second))
    del pairs[0]  # both sides are cold
    by_plain, by_curve = zip(*pairs, strict=True)
    ratios = sorted(curve / clear for clear, curve in pairs)
    return statistics.median(by_plain), statistics.median(by_curve), ratios


def main() -> None:
    """Print one line per size."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.encryption", "echo"], stdout=subprocess.PIPE, text=True
    ) as far:
        try:
            assert far.stdout is not None
            plain_port, curve_port, server_key = far.stdout.readline().split()
            with dial(plain_port, "") as plain, dial(curve_port, server_key) as encrypted:
                print(f"Round trip over tcp on loopback, {NUM_PAIRS} pairs of slices of {SLICE}")
                for size in SIZES:
                    clear, curve, ratios = measure(plain, encrypted, size)
                    low, middle, high = (ratios[len(ratios) * tenth // 10] for tenth in (1, 5, 9))
                    print(
                        f"  {size:6d} B   plain {clear * 1e6:5.0f} us   CURVE {curve * 1e6:5.0f} us   "
                        f"{middle:.2f} of plain ({low:.2f} to {high:.2f})"
                    )
        finally:
            far.kill()


if __name__ == "__main__":
    echo() if sys.argv[1:] == ["echo"] else main()
