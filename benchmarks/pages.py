"""What the pages of one request cost its scheduler, by the size of the pool: 900 pages from arrival to release.

The pool is full, so each request evicts what it needs. Prompts are drawn anew, so nothing is found in the cache; they
are advanced by steps of 512 tokens, and the events of each step are drained, as a scheduler does. CPU time, with the
page table and without. With `--baseline TREE` beside another checkout, in turns, each turn in a process of its own.

    python -m benchmarks.pages --baseline TREE
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path

from kvstore.cache.page_table import PageTable
from kvstore.cache.prefix_cache import PrefixCache

PAGE_SIZE = 16
REQUEST_PAGES = 900
STEP_TOKENS = 512
NUM_REQUESTS = 40
SIZES = (10_000, 100_000, 1_000_000)


def serve(cache: PrefixCache, prompt: "array[int]") -> None:
    """One request of one token of output, as far as its pages go."""
    held = cache.start(prompt)
    assert held.reserve(len(prompt))
    for start in range(0, len(prompt), STEP_TOKENS):
        held.advance(prompt[start : start + STEP_TOKENS])
        while cache.events.drain_message() is not None:
            pass
    held.release()


def measure(num_pages: int, *, has_table: bool) -> list[float]:
    """CPU milliseconds for each of `NUM_REQUESTS` requests on a full pool."""
    memory = bytearray(PageTable.num_bytes(num_pages, PAGE_SIZE)) if has_table else b""
    table = PageTable(memoryview(memory), num_pages, PAGE_SIZE) if has_table else None
    cache = PrefixCache(num_pages, PAGE_SIZE, group="m", epoch=1, table=table)
    draw = random.Random(1)
    num_fill = num_pages // REQUEST_PAGES + 1
    took: list[float] = []
    for _ in range(num_fill + NUM_REQUESTS):
        # As a sequence keeps its ids.
        prompt = array("i", draw.choices(range(32_000), k=REQUEST_PAGES * PAGE_SIZE))
        began = time.process_time()
        serve(cache, prompt)
        took.append(time.process_time() - began)
    return [1e3 * one for one in took[num_fill:]]


def measured(tree: Path, num_pages: int) -> list[list[float]]:
    """Milliseconds of requests with the table and without, of the `kvstore` in `tree`, in a process of its own."""
    # Without this file's own folder on the path (`-P`): the baseline's modules are to be found, not ours.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--only", str(num_pages)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, check=True, capture_output=True)
    return json.loads(done.stdout)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=SIZES)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps([measure(args.only, has_table=has_table) for has_table in (True, False)]))
        return
    trees = {"ours": Path(__file__).resolve().parents[1]}
    if args.baseline is not None:
        trees = {"baseline": args.baseline.resolve(), **trees}
    for num_pages in args.sizes:
        took: dict[str, list[list[list[float]]]] = {name: [] for name in trees}
        for _ in range(args.rounds):
            for name, tree in trees.items():
                took[name].append(measured(tree, num_pages))
        middle: dict[str, float] = {}
        best: dict[str, float] = {}
        for name, rounds in took.items():
            with_table, without = ([one for part in column for one in part] for column in zip(*rounds, strict=True))
            middle[name], best[name] = statistics.median(with_table), min(with_table)
            print(
                f"{num_pages:>9} pages  {name:<9} {middle[name]:5.1f} ms a request, best {best[name]:.1f}; "
                f"without a page table {statistics.median(without):.1f}, best {min(without):.1f}"
            )
        if args.baseline is not None:
            ratios = [found["ours"] / found["baseline"] for found in (middle, best)]
            # The best of them is what other work on the machine disturbs least.
            print(f"{num_pages:>9} pages  ratio {ratios[0]:.2f}, of the best {ratios[1]:.2f} (goal: 0.5)", flush=True)


if __name__ == "__main__":
    main()
