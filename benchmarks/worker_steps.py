"""Times steps of the torch worker beside what the machine can do: no mesh, no HTTP, one process.

A decode step cannot be shorter than reading the weights once, a prefill not shorter than its multiplications at the
speed of one big product; both limits are measured in the same run, around each row.

    python -m benchmarks.worker_steps [--model random:qwen2.5-0.5b] [--dtype auto] [--threads 2]
"""

import argparse
import os
import statistics
import time
from array import array

from benchmarks.bandwidth import read_gb_s
from kvstore.page_pool import HeapHost, PoolInfo
from nodes.model_spec import ModelSpec, resolve_model
from nodes.model_spec.weight_index import expected_shapes
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.environment import prepare_environment
from nodes.worker.step import RunnableRow, RunnableStep, Runner

PAGE_SIZE = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def parameters(spec: ModelSpec) -> tuple[int, int]:
    """Weights that a step reads, and those that it multiplies each token with (no table look-up, no head)."""
    sizes: dict[str, int] = {}
    for name, (rows, *columns) in expected_shapes(spec).items():
        sizes[name] = rows * (columns[0] if columns else 1)
    table = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", table)
    return sum(sizes.values()) + head, sum(sizes.values())


def decode_step(batch: int, context: int) -> RunnableStep:
    """One token for each of `batch` sequences, each at position `context - 1`."""
    pages_each = -(-context // PAGE_SIZE)
    rows = [
        RunnableRow(i, context - 1, 1, 1, i, i * pages_each, pages_each, Sampling(temperature=0.0))
        for i in range(batch)
    ]
    return RunnableStep(1, rows, array("i", range(300, 300 + batch)), array("i", range(1, 1 + batch * pages_each)))


def prefill_step(num_tokens: int) -> RunnableStep:
    """A whole prompt, its first token drawn."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    row = RunnableRow(0, 0, num_tokens, num_tokens, 0, 0, num_pages, Sampling(temperature=0.0))
    return RunnableStep(1, [row], array("i", range(300, 300 + num_tokens)), array("i", range(1, 1 + num_pages)))


def seconds(runner: Runner, step: RunnableStep, budget_s: float) -> list[float]:
    """Times of single steps, after two that warm up."""
    for _ in range(2):
        runner.run(step)
    times: list[float] = []
    while sum(times) < budget_s or len(times) < 3:
        start = time.perf_counter()
        runner.run(step)
        times.append(time.perf_counter() - start)
    return times


def product_gflops(dtype: str, threads: int) -> float:
    """Best of ten products of two 1024 x 1024 matrices."""
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(1024, 1024).to(getattr(torch, dtype)) for _ in range(2))
    best = min(_timed(lambda: a @ b) for _ in range(10))
    return 2 * 1024**3 / best / 1e9


def _timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured per row")
    args = parser.parse_args()
    prepare_environment()
    from nodes.worker.runners import make_runner

    spec = resolve_model(args.model)
    layout = spec.kv_layout(args.dtype, PAGE_SIZE)
    batches, prompts = ([int(n) for n in text.split(",") if n] for text in (args.batches, args.prompts))
    pages = 1 + max(
        [b * layout.num_pages_for(args.context) for b in batches] + [layout.num_pages_for(n) for n in prompts]
    )
    pool = HeapHost().create("bench", PoolInfo(group="bench", num_pages=pages, layout=layout, incarnation=1))
    config = WorkerConfig(group="bench", model=args.model, agent="", dtype=args.dtype, num_threads=args.threads)
    start = time.perf_counter()
    runner = make_runner(spec, config, pool)
    print(f"{spec.name} {layout.dtype}, {args.threads} threads, loaded in {time.perf_counter() - start:.1f} s")
    print(f"numerics {runner.numerics}")
    read, multiplied = parameters(spec)
    for batch in batches:
        before = read_gb_s(args.threads)
        times = seconds(runner, decode_step(batch, args.context), args.seconds)
        bandwidth = max(before, read_gb_s(args.threads))
        report(
            f"decode, batch {batch}, context {args.context}", times, read * ITEM_BYTES[layout.dtype] / bandwidth / 1e9
        )
        print(f"      {batch / statistics.median(times):7.1f} tokens/s    memory {bandwidth:.0f} GB/s")
    for num_tokens in prompts:
        before = product_gflops(layout.dtype, args.threads)
        times = seconds(runner, prefill_step(num_tokens), args.seconds)
        gflops = max(before, product_gflops(layout.dtype, args.threads))
        report(f"prefill {num_tokens}", times, 2 * multiplied * num_tokens / gflops / 1e9)
        print(f"      {num_tokens / statistics.median(times):7.1f} tokens/s    one big product {gflops:.0f} GFLOP/s")


def report(name: str, times: list[float], floor: float) -> None:
    """One line: median and best beside the floor."""
    median, best = statistics.median(times), min(times)
    print(
        f"{name:32} {median * 1e3:8.1f} ms (best {best * 1e3:.1f}, {len(times)} steps)"
        f"    floor {floor * 1e3:.1f} ms = {floor / median:.0%}"
    )


if __name__ == "__main__":
    main()
