"""What looking into a mesh costs it: the record of a call with its line, a note in a trace ring, and CPU for a token.

CPU is that of all actors of a mesh of `echo`, for 768 streamed requests of 64 tokens by 64 clients; with `--baseline
TREE` beside another checkout, in turns.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

from benchmarks.ring import body
from benchmarks.server import actors, ask, cpu_seconds, mesh
from mesh.address import Address
from mesh.runtime.trace_ring import map_ring
from nodes.gateway.config import GatewayConfig
from nodes.gateway.records.sample_log import SampleLog
from nodes.gateway.request_account import RequestAccount
from nodes.gateway.request_names import RequestNames
from nodes.request import Stages

NUM_TOKENS, NUM_CLIENTS, NUM_REQUESTS, NUM_WARM = 64, 64, 768, 128
NAME = "chatcmpl-8dbe5ab94150440f95ea737c3da4abf0"


def record_us(folder: Path, num: int = 20_000) -> float:
    """Microseconds for one call of one sample, from its head to its line; of a burst few have a line."""
    ctx = Mock()
    ctx.address, ctx.describe.return_value.host = Address("gateway-0", 1), "host"
    account = RequestAccount(ctx, GatewayConfig(model_name="m", context_length=100, request_log_folder=str(folder)))
    generation = Mock(samples_per_prompt=1)
    start = time.perf_counter()
    for number in range(num):
        now = number / 1000
        ctx.now = lambda now=now: now
        names = RequestNames(f"{NAME}{number}", path="/v1/completions")
        track = account.begin(names, now)
        track.read(now, names)
        track.prepared(now, 0.001)
        sample_id = f"{names.ours}-0"
        generation.request_ids = [sample_id]
        track.opened(generation)
        log = SampleLog(now)
        log.submitted(0, "scheduler-decode-0", "scheduler-prefill-0", "detokenizer-0", now)
        log.accepted(now, 1)
        log.staged(Stages(0.1, 0.0, 0.1, 0.0), now)
        log.first_token(now)
        counts = {"prompt_tokens": 64, "cached_tokens": 0, "output_tokens": NUM_TOKENS}
        track.ended(sample_id, log.record(sample_id, **counts, last_token=now, ended=now, finish="stop"))
        account.end(track, 200, "")
    return (time.perf_counter() - start) / num * 1e6


def note_us(folder: Path, num: int = 200_000) -> float:
    """Microseconds for one note of a request."""
    ring = map_ring(folder, Address("scheduler-decode-0", 1), time.monotonic)
    start = time.perf_counter()
    for number in range(num):
        ring.note(1, NAME, number, number)
    return (time.perf_counter() - start) / num * 1e6


def token_us(tree: Path | None) -> float:
    """Microseconds of CPU of all actors for a token."""
    with mesh("--model", "echo", "--max-running", "256", tree=tree) as (port, name):
        pids = [actor["pid"] for actor in actors(name, tree) if actor["pid"]]
        # The first requests of a mesh make its links and fill its caches.
        asyncio.run(ask(port, NUM_CLIENTS, NUM_WARM, lambda number: body(NUM_TOKENS, number)))
        before_s = sum(map(cpu_seconds, pids))
        asyncio.run(ask(port, NUM_CLIENTS, NUM_REQUESTS, lambda number: body(NUM_TOKENS, 1000 + number)))
        return (sum(map(cpu_seconds, pids)) - before_s) / (NUM_REQUESTS * NUM_TOKENS) * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=4, help="turns, with --baseline; without, meshes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"record of a call {record_us(Path(folder) / 'requests'):.1f} us, ", end="")
        print(f"note {note_us(Path(folder) / 'trace'):.2f} us", flush=True)
    found: dict[str, list[float]] = {"ours": [], "baseline": []}
    for _ in range(args.pairs):
        if args.baseline is not None:
            found["baseline"].append(token_us(args.baseline))
        found["ours"].append(token_us(None))
    for name, values in found.items():
        if values:
            middle, most = statistics.median(values), max(values)
            print(f"{name:<9} {middle:.1f} us of CPU for a token, {min(values):.1f} to {most:.1f}")
    if args.baseline is not None and args.pairs > 1:
        ratios = [ours / theirs for ours, theirs in zip(found["ours"], found["baseline"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"ratio {middle:.2f}, middle half {low:.2f} to {high:.2f} ({args.pairs} pairs; goal: 1.02)")


if __name__ == "__main__":
    main()
