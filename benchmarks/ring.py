"""Output tokens/s of the whole ring with `echo`: what everything but the model costs.

All roles as processes, HTTP streaming, closed loop with 1, 16, 64 and 256 clients; measured in turns with one process
that streams the same number of events with no mesh behind it. With `--extras 44` also with that many bytes beside each
token, in turns: logprobs, from the worker through every hop into the client's events.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.server import ask, get, mesh
from cli.bench.summary import Summary
from mesh.testing.ports import free_port

PROMPT = "the quick brown fox jumps over the lazy dog and runs away "


def body(num_tokens: int, number: int) -> dict[str, Any]:
    """Every prompt differs from its first word on, so that no prefix cache helps."""
    prompt = f"{number:06d} {PROMPT * 2}"
    return {"model": "echo", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}


def reading(num_bytes: int) -> dict[str, Any]:
    """Fields that have a worker say so many bytes of each token: 8, and 8 for each likely one, 4 for a named one."""
    num_top, rest = divmod(num_bytes - 8, 8)
    if rest not in (0, 4) or not 0 <= num_top <= 20:
        raise SystemExit(f"--extras {num_bytes}: 8 to 172 bytes in fours")
    return {"logprobs": num_top} | ({"logprob_token_ids": [1]} if rest else {})


async def measure(ports: dict[str, int], args: argparse.Namespace) -> None:
    """Prints one line per server and level, medians over the repeats, which alternate between the servers."""
    print("server   clients     tok/s  TTFT p50 ms ITL p50 ms  ITL p99 ms  ratio")
    for concurrency in args.concurrency:
        num_requests = max(4, args.waves * concurrency)
        results = {name: list[Summary]() for name in ports}
        for repeat in range(args.repeats):
            for name, port in ports.items():
                base = repeat * 100_000 + concurrency * 1000
                # Other prompts than those of the plain requests, which are in the cache by then.
                fields, first = (reading(args.extras), base + 500_000) if name == "extras" else ({}, base)
                level = await ask(
                    port,
                    concurrency,
                    num_requests,
                    lambda n, first=first, fields=fields: body(args.tokens, first + n) | fields,
                )
                results[name].append(level)
        direct = statistics.median(level.tokens_per_s for level in results["direct"])
        for name, levels in results.items():
            middle = sorted(levels, key=lambda level: level.tokens_per_s)[len(levels) // 2]
            print(
                f"{name:<8} {concurrency:>7} {middle.tokens_per_s:>9.0f} {middle.ttft.p50:>12.1f} "
                f"{middle.itl.p50:>11.2f} {middle.itl.p99:>11.2f} {middle.tokens_per_s / direct:>6.2f}",
                flush=True,
            )
        if args.extras:
            pairs = zip(results["extras"], results["mesh"], strict=True)
            ratios = sorted(extras.tokens_per_s / plain.tokens_per_s for extras, plain in pairs)
            print(
                f"{args.extras} bytes beside each token: {statistics.median(ratios):.2f} of plain, median of "
                f"{len(ratios)} turns ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mixed", action="store_true", help="one group for both phases instead of prefill and decode")
    parser.add_argument("--extras", type=int, default=0, metavar="BYTES", help="also with so many beside each token")
    args = parser.parse_args()
    shape = ("--mixed", "1") if args.mixed else ("--prefill", "1", "--decode", "1")
    port = free_port()
    direct = subprocess.Popen([sys.executable, "-m", "benchmarks.direct_stream", str(port)])
    try:
        with mesh("--model", "echo", "--max-running", "256", *shape) as (mesh_port, _):
            while True:
                try:
                    get(f"http://127.0.0.1:{port}/", 1.0)
                    break
                except OSError:
                    time.sleep(0.05)
            ports = {"direct": port, "mesh": mesh_port} | ({"extras": mesh_port} if args.extras else {})
            asyncio.run(measure(ports, args))
    finally:
        direct.terminate()
        direct.wait()


if __name__ == "__main__":
    main()
