"""Times the linear layers of one decode step alone, under several settings of the process's environment.

The settings take effect when torch is loaded, so each measurement is a process of its own; they are interleaved. The
floor is the time to read the weights once at the bandwidth probed in the same process.

    python -m benchmarks.linears [--rounds 6] [--threads 2]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Final

ROWS: Final = (1, 4, 16)
HIDDEN, INNER, QKV, VOCABULARY, LAYERS = 896, 4864, 1152, 151936, 24
SHAPES: Final = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)] * LAYERS + [
    (VOCABULARY, HIDDEN)
]
"""Qwen2.5-0.5B: out and in of each product of one step, in their order."""
SETTINGS: Final = {
    "small pages, spin 1,000": {"THP_MEM_ALLOC_ENABLE": "0", "GOMP_SPINCOUNT": "1000"},
    "huge pages, spin 1,000": {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "1000"},
    "huge pages, spin 5,000": {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "5000"},
    "huge pages, spin 20,000": {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "20000"},
}


def measure(num_threads: int) -> None:
    """In a process of its own: prints milliseconds for each of `ROWS`, and for reading the weights once."""
    import torch

    from benchmarks.bandwidth import read_gb_s
    from nodes.worker.ops.torch.products import PackedProduct

    torch.set_num_threads(num_threads)
    layers = [PackedProduct(torch.randn(rows, columns).bfloat16(), None) for rows, columns in SHAPES]
    found: list[float] = []
    for num_rows in ROWS:
        inputs = {width: torch.randn(num_rows, width).bfloat16() for width in (HIDDEN, INNER)}
        times: list[float] = []
        for _ in range(12):
            start = time.perf_counter()
            for layer, (_, columns) in zip(layers, SHAPES, strict=True):
                layer(inputs[columns])
            times.append(time.perf_counter() - start)
        found.append(statistics.median(times) * 1e3)
    floor = sum(rows * columns for rows, columns in SHAPES) * 2 / read_gb_s(num_threads) / 1e6
    print(*found, floor)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.threads)
    else:
        compare(args.rounds, args.threads)


def compare(num_rounds: int, num_threads: int) -> None:
    """Prints one line per setting."""
    found: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
    command = [sys.executable, "-m", "benchmarks.linears", "--measure", "--threads", str(num_threads)]
    for _ in range(num_rounds):
        for name, environment in SETTINGS.items():
            output = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
            found[name].append([float(word) for word in output.stdout.split()])
    print(f"{'ms at rows':26}" + "".join(f"{rows:>8}" for rows in ROWS) + "   floor")
    for name, runs in found.items():
        print(f"{name:26}" + "".join(f"{statistics.median(column):8.1f}" for column in zip(*runs, strict=True)))


if __name__ == "__main__":
    main()
