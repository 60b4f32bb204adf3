"""What looking into a mesh costs it: the record of a call with its line, a note in a trace ring, and CPU for a token.

CPU is that of all actors of a mesh of `echo`, for 256 streamed requests of 64 tokens by 64 clients; with `--baseline
TREE` beside a mesh of another checkout, in turns.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

from benchmarks.ring import body
from benchmarks.server import actors, ask, cpu_seconds, mesh
from mesh.address import Address
from mesh.runtime.trace_ring import map_ring
from nodes.gateway.config import GatewayConfig
from nodes.gateway.records.account import RequestAccount
from nodes.gateway.request_names import RequestNames
from nodes.gateway.requests.sample_log import SampleLog
from nodes.request import Stages

NUM_TOKENS, NUM_CLIENTS, NUM_REQUESTS, NUM_WARM = 64, 64, 256, 192
TURNS = 6
"""Of one pair of meshes, each of a second or two: the machine is then the same for neighbours, and starts cost more."""
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
        account.read(track, names)
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


Spent = dict[str, float]
"""Microseconds of CPU for a token, by role."""


def spent(port: int, pids: dict[int, str], number: int) -> Spent:
    """CPU of the actors for one turn; its prompts begin with numbers from `number` on."""
    before_s = {pid: cpu_seconds(pid) for pid in pids}
    asyncio.run(ask(port, NUM_CLIENTS, NUM_REQUESTS, lambda one: body(NUM_TOKENS, number + one)))
    found: Spent = {}
    for pid, role in pids.items():
        took_s = cpu_seconds(pid) - before_s[pid]
        found[role] = found.get(role, 0.0) + took_s / (NUM_REQUESTS * NUM_TOKENS) * 1e6
    return found


def turns(trees: dict[str, Path | None], num: int) -> dict[str, list[Spent]]:
    """What each tree's mesh spends in so many turns, all meshes being up, each time in another order.

    By turns in and against one order, whoever stood at its ends had two turns one after the other, and seemed dear.
    """
    found = {name: list[Spent]() for name in trees}
    with ExitStack() as stack:
        meshes = dict[str, tuple[int, dict[int, str]]]()
        for name, tree in trees.items():
            port, mesh_name = stack.enter_context(mesh("--model", "echo", "--max-running", "256", tree=tree))
            pids = {actor["pid"]: actor["role"] for actor in actors(mesh_name, tree) if actor["pid"]}
            # The first requests of a mesh make its links and fill its caches.
            asyncio.run(ask(port, NUM_CLIENTS, NUM_WARM, lambda one: body(NUM_TOKENS, one)))
            meshes[name] = port, pids
        for turn in range(num):
            for name in random.sample(list(meshes), len(meshes)):
                found[name].append(spent(*meshes[name], 1000 * (turn + 1)))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=4, help="turns; each four have meshes of their own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"record of a call {record_us(Path(folder) / 'requests'):.1f} us, ", end="")
        print(f"note {note_us(Path(folder) / 'trace'):.2f} us", flush=True)
    trees: dict[str, Path | None] = {"ours": None} | ({"baseline": args.baseline} if args.baseline else {})
    found = {name: list[Spent]() for name in trees}
    for done in range(0, args.pairs, TURNS):
        # Of two meshes of one tree the one that was started first took 6 % more, whatever the order of their turns.
        trees = dict(reversed(trees.items()))
        for name, values in turns(trees, min(TURNS, args.pairs - done)).items():
            found[name] += values
            told = " ".join(f"{sum(value.values()):.1f}" for value in values)
            print(f"turns {done + 1} to {done + len(values)}, {name}: {told} us", flush=True)
    for name, values in found.items():
        whole = [sum(value.values()) for value in values]
        roles = {role: statistics.median(value.get(role, 0.0) for value in values) for role in sorted(values[0])}
        print(f"{name:<9} {statistics.median(whole):.1f} us of CPU for a token, {min(whole):.1f} to {max(whole):.1f}:")
        print("          " + ", ".join(f"{role} {us:.1f}" for role, us in roles.items()), flush=True)
    if args.baseline is not None and args.pairs > 1:
        pairs = zip(found["ours"], found["baseline"], strict=True)
        ratios = [sum(ours.values()) / sum(theirs.values()) for ours, theirs in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"ratio {middle:.3f}, middle half {low:.3f} to {high:.3f} ({args.pairs} pairs; goal: 1.02)")


if __name__ == "__main__":
    main()
