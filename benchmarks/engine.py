"""Output tokens/s, TTFT and ITL of a Qwen2.5-0.5B-shaped bfloat16 model with random weights on CPU.

Prompt 128, output 64, with 1, 4 and 16 concurrent requests, and the floor that memory bandwidth sets: the time to read
the weights once, with the bandwidth probed in the same run before each level. With `--pairs`, the same model with int8
weights is measured in turns with it, with the first number of `--concurrency` as the number of clients.
"""

import argparse
import asyncio
import random
import statistics
from typing import Any

from benchmarks.bandwidth import read_gb_s
from benchmarks.server import ask, mesh

WEIGHT_BYTES = {"random:qwen2.5-0.5b": 988_000_000}


def body(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """New random token ids for each request: no prefix is shared."""
    draw = random.Random(number)
    prompt = [draw.randrange(1000, 100_000) for _ in range(args.prompt_tokens)]
    return {"model": args.model, "prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 0}


async def measure(port: int, args: argparse.Namespace) -> None:
    """Prints a line per level."""
    num_bytes = WEIGHT_BYTES.get(args.model, 0)
    await ask(port, 1, 1, lambda n: body(args, 10_000_000 + n))
    print("conc    tok/s  TTFT p50 ms  ITL p50 ms  TPOT p50 ms   GB/s  floor ms  floor/TPOT")
    for concurrency in args.concurrency:
        bandwidth = read_gb_s()
        number = concurrency * 1000
        level = await ask(port, concurrency, max(4, 2 * concurrency), lambda n, number=number: body(args, number + n))
        floor_ms = num_bytes / bandwidth / 1e6
        print(
            f"{concurrency:>4} {level.tokens_per_s:>8.1f} {level.ttft.p50:>12.0f} {level.itl.p50:>11.1f} "
            f"{level.tpot.p50:>12.1f} {bandwidth:>6.1f} {floor_ms:>9.1f} {floor_ms / level.tpot.p50:>10.0%}",
            flush=True,
        )


async def measure_int8(plain: int, rounded: int, args: argparse.Namespace) -> None:
    """Prints TPOT of both meshes, and how many times as good int8 is, for each pair of runs."""
    clients: int = args.concurrency[0]
    ratios: list[float] = []
    for number in range(args.pairs + 1):
        tpots: list[float] = []
        for port in (plain, rounded):
            start = 1_000 * number
            level = await ask(port, clients, 2 * clients, lambda n, start=start: body(args, start + n))
            tpots.append(level.tpot.p50)
        if number:  # The first requests of a mesh are answered more slowly.
            ratios.append(tpots[0] / tpots[1])
            print(f"bfloat16 {tpots[0]:.1f} ms, int8 {tpots[1]:.1f} ms: {ratios[-1]:.2f} times", flush=True)
    print(f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) at {clients} clients")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--disaggregated", action="store_true", help="one prefill and one decode worker, one thread each"
    )
    parser.add_argument("--pairs", type=int, default=0, help="number of paired runs with int8 weights")
    args = parser.parse_args()
    shape = ("--prefill", "1", "--decode", "1") if args.disaggregated else ("--mixed", "1")
    with mesh("--model", args.model, "--context-length", "1024", *shape) as (port, _):
        if not args.pairs:
            asyncio.run(measure(port, args))
            return
        with mesh("--model", args.model, "--context-length", "1024", "--quantize", "int8", *shape) as (rounded, _):
            asyncio.run(measure_int8(port, rounded, args))


if __name__ == "__main__":
    main()
