"""Decode and prefill of the worker's runner as fractions of the device's limits, measured in the same run.

    python -m benchmarks.gpu.steps [--models random:qwen3-0.6b,random:qwen3-8b]

Steps run ahead of each other as in a worker (depth 2, CUDA graphs, FlashInfer); tokens are drawn greedily. Batch 1, 32
and 256 at a context of 1,024; prompts of 1,024 and 4,096 tokens in chunks of `--chunk`.
"""

import argparse
import time

from benchmarks.gpu.figures import of_limit, say
from benchmarks.gpu.loaded import GREEDY, Loaded, decode_steps, load, prefill_steps, run_ahead, unload
from benchmarks.gpu.roofline import Roofline, measure

DECODE_GOALS = {("random:qwen3-8b", 1): 0.8, ("random:qwen3-8b", 32): 0.65, ("random:qwen3-8b", 256): 0.65}
PREFILL_GOALS = {"random:qwen3-8b": 0.5}
WARM_STEPS = 4


def decode(loaded: Loaded, batch: int, context: int, num_steps: int) -> float:
    """Tokens/s."""
    steps = decode_steps(loaded.layout, batch, context, num_steps + WARM_STEPS, GREEDY)
    start = time.perf_counter()
    for number, _ in enumerate(run_ahead(loaded.runner, steps), 1):
        if number == WARM_STEPS:
            start = time.perf_counter()
    return batch * num_steps / (time.perf_counter() - start)


def prefill(loaded: Loaded, num_tokens: int, chunk: int, repeats: int) -> float:
    """Tokens/s, the best of `repeats`."""
    best = float("inf")
    for _ in range(repeats + 1):
        steps = prefill_steps(loaded.layout, num_tokens, chunk)
        start = time.perf_counter()
        for _ in run_ahead(loaded.runner, steps):
            pass
        best = min(best, time.perf_counter() - start)
    return num_tokens / best


def run(model: str, args: argparse.Namespace, limits: Roofline) -> None:
    batches, prompts = args.batches, args.prompts
    room = max([batch * (args.context + args.steps) for batch in batches] + prompts)
    start = time.perf_counter()
    options = {"attention": args.attention, "deterministic": args.deterministic}
    loaded = load(model, room + 16 * max(batches), max(args.chunk, *batches), args.device, **options)
    name = model.removeprefix("random:") + (", deterministic" if args.deterministic else "")
    print(f"{model} loaded in {time.perf_counter() - start:.1f} s: {loaded.runner.numerics}", flush=True)
    for batch in batches:
        found = decode(loaded, batch, args.context, args.steps)
        limit = limits.decode_tokens_s(loaded.spec, batch, args.context)
        goal = DECODE_GOALS.get((model, batch))
        text = f"{goal:.2f}" if goal else "800 tok/s" if (model, batch) == ("random:qwen3-0.6b", 1) else ""
        say(f"{name} decode, batch {batch}", f"{found:,.0f} tok/s", of_limit(found, limit, "reading", "tok/s"), text)
    for num_tokens in prompts:
        found = prefill(loaded, num_tokens, args.chunk, 5)
        limit = limits.prefill_tokens_s(loaded.spec, num_tokens)
        goal = PREFILL_GOALS.get(model)
        beside = of_limit(found, limit, "multiplying", "tok/s")
        say(f"{name} prefill of {num_tokens}", f"{found:,.0f} tok/s", beside, f"{goal:.2f}" if goal else "")
    unload(loaded)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="random:qwen3-0.6b,random:qwen3-8b")
    parser.add_argument("--batches", type=numbers, default="1,32,256")
    parser.add_argument("--prompts", type=numbers, default="1024,4096")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="as workers with that setting")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="measure the limits on small data, to try it on the CPU")
    args = parser.parse_args()
    limits = measure(args.device, 1 << 24, 256) if args.small else measure(args.device)
    say("copy in device memory", f"{limits.bytes_s / 1e9:,.0f} GB/s")
    say("bf16 product", f"{limits.flop_s / 1e12:,.1f} TFLOP/s")
    for model in args.models.split(","):
        run(model, args, limits)


if __name__ == "__main__":
    main()
