"""Pages pulled over `cuda_ipc` from another process's pool, against a plain copy on the device of as many bytes.

    python -m benchmarks.gpu.transfer

4,096 tokens of KV of each shape: 256 pages, 448 and 576 MiB. The source's process is spawned and makes its pool as a
kv_agent does; this process makes the destination's and copies poll by poll, as an agent's loop does. Pages lie in one
run, or scattered as after hours of use; scattered pages are copied by one kernel (`gather`), or by one call each
(`memcpy`). Last, pieces of 16 KiB, as small models have them.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.gpu.figures import say
from benchmarks.gpu.roofline import copy_seconds
from kvstore.layout import KVLayout
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.mapping import handle_of
from kvstore.pool.page_pool import PagePool, PoolInfo, ShmHost
from kvstore.transfer.base import Peer, Transfer
from kvstore.transfer.mapped.cuda_ipc import CudaIpcTransport
from kvstore.transfer.plan import Descriptor, coalesce, page_descriptors
from nodes.model_spec import resolve_model

GOAL = 0.8
NUM_TOKENS = 4096
PIECE_BYTES = 16 << 10
NUM_PIECES = 4096
MODELS = ("random:qwen3-0.6b", "random:qwen3-8b")


def be_source(directory: Path, model: str, device: str) -> None:
    """The other process: makes a pool, prints its path, and keeps it until stdin ends."""
    layout = resolve_model(model).kv_layout()
    info = PoolInfo(group="p", num_pages=1 + layout.num_pages_for(NUM_TOKENS), layout=layout, incarnation=1)
    pool = CudaHost(ShmHost(directory)).create("kv-p", info_on(info, device))
    print(pool.path, flush=True)
    sys.stdin.read()
    pool.close()


def info_on(info: PoolInfo, device: str) -> PoolInfo:
    return msgspec.structs.replace(info, device=device)


def pull(transport: CudaIpcTransport, pool: PagePool, peer: Peer, parts: list[Descriptor]) -> tuple[float, float]:
    """Seconds of one transfer, and of its longest poll."""
    start = time.perf_counter()
    transport.post(Transfer(pool, peer, parts, float("inf")))
    longest = 0.0
    while transport.num_posted:
        begin = time.perf_counter()
        for ended in transport.poll(0.0):
            if ended.error is not None:
                raise ended.error
        longest = max(longest, time.perf_counter() - begin)
    return time.perf_counter() - start, longest


def run(model: str, layout: KVLayout, directory: Path, path: str, device: str) -> None:
    host = CudaHost(ShmHost(directory))
    num_pages = layout.num_pages_for(NUM_TOKENS)
    info = PoolInfo(group="d", num_pages=1 + num_pages, layout=layout, incarnation=1)
    pool = host.create("kv-d", info_on(info, device))
    pages = list(range(1, 1 + num_pages))
    scattered = random.Random(1).sample(pages, num_pages)
    num_bytes = num_pages * layout.page_bytes
    plain = copy_seconds(device, num_bytes)
    small = [Descriptor(at, at, PIECE_BYTES) for at in range(0, 2 * PIECE_BYTES * NUM_PIECES, 2 * PIECE_BYTES)]
    orders = {
        "in one run": page_descriptors(coalesce(pages, pages), layout.page_bytes),
        "scattered": page_descriptors(coalesce(pages, scattered), layout.page_bytes),
        f"{NUM_PIECES} pieces of 16 KiB": small,
    }
    for name, gather_from in (("gather", 2), ("memcpy", 0)):
        transport = CudaIpcTransport(host, gather_from=gather_from)
        transport.register(pool)
        peer = transport.connect(msgspec.structs.replace(handle_of(pool), group="p", path=path))
        for order, parts in orders.items():
            size = sum(part.num_bytes for part in parts)
            limit = plain if size == num_bytes else copy_seconds(device, size)
            pull(transport, pool, peer, parts)
            taken = [pull(transport, pool, peer, parts) for _ in range(20)]
            median = statistics.median(seconds for seconds, _ in taken)
            say(
                f"{model.removeprefix('random:')}, {size >> 20} MiB {order}, {name}",
                f"{size / median / 1e9:,.0f} GB/s, {median * 1e3:.2f} ms",
                f"{limit / median:.2f} of a plain copy ({size / limit / 1e9:,.0f} GB/s)",
                f"{GOAL:.2f}",
            )
            print(f"    longest poll {max(longest for _, longest in taken) * 1e3:.2f} ms", flush=True)
        transport.close()
    pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--source", nargs=2, metavar=("DIRECTORY", "MODEL"), help="run as the source process")
    args = parser.parse_args()
    if args.source:
        be_source(Path(args.source[0]), args.source[1], args.device)
        return
    for model in MODELS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            words = ["-m", "benchmarks.gpu.transfer", "--device", args.device, "--source", directory, model]
            # Spawned: a fork of a process that has used CUDA cannot use it.
            source = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
            )
            assert source.stdin is not None
            assert source.stdout is not None
            try:
                path = source.stdout.readline().strip()
                if not path:
                    sys.exit("the source process ended early")
                run(model, resolve_model(model).kv_layout(), Path(directory), path, args.device)
            finally:
                source.stdin.close()
                try:
                    source.wait(20)
                except subprocess.TimeoutExpired:
                    source.kill()
                    source.wait()


if __name__ == "__main__":
    main()
