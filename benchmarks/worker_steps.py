"""Times steps of a worker on the CPU against what the machine can do: no mesh, no HTTP, one process.

A decode step cannot be shorter than reading the weights once, nor a prefill shorter than its multiplications at the
speed of one big product; both limits are measured in the same run, around each row. Kernels are compared in turns.

    python -m benchmarks.worker_steps [--model random:qwen2.5-0.5b] [--dtype auto] [--threads 2]
                                      [--kernels auto/int8,auto,torch]

`KERNELS/int8` runs those kernels on int8 weights; the limit is then that of the smaller number of bytes.
"""

import argparse
import os
import statistics
import time
from array import array
from typing import NamedTuple

from benchmarks.bandwidth import read_gb_s
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from nodes.model_spec import ModelSpec, resolve_model
from nodes.model_spec.weight_index import expected_shapes
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.environment import prepare_environment
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep, Runner

PAGE_SIZE = 16
GREEDY = Sampling(temperature=0.0)
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def parameters(spec: ModelSpec) -> tuple[int, int]:
    """Numbers of weights that a step reads, and that it multiplies each token with (no table look-up, no head)."""
    sizes: dict[str, int] = {}
    for name, (rows, *columns) in expected_shapes(spec).items():
        sizes[name] = rows * (columns[0] if columns else 1)
    table = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", table)
    return sum(sizes.values()) + head, sum(sizes.values())


def decode_step(batch: int, context: int) -> RunnableStep:
    """One token for each of `batch` sequences, each at position `context - 1`."""
    pages_each = -(-context // PAGE_SIZE)
    one, offsets = OpenSequence(Open(0, 0, 1, GREEDY)), range(batch)
    page_offsets = [i * pages_each for i in offsets]
    rows = Rows([one] * batch, [context - 1] * batch, [1] * batch, offsets, page_offsets)
    return RunnableStep(1, rows, array("i", range(300, 300 + batch)), array("i", range(1, 1 + batch * pages_each)))


def prefill_step(num_tokens: int) -> RunnableStep:
    """A whole prompt, its first token drawn."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    rows = Rows([OpenSequence(Open(0, 0, num_tokens, GREEDY))], [0], [num_tokens], [0], [0])
    return RunnableStep(1, rows, array("i", range(300, 300 + num_tokens)), array("i", range(1, 1 + num_pages)))


class Measured(NamedTuple):
    """A runner with certain kernels, the number of torch threads it should have, and the bytes of one weight."""

    name: str
    runner: Runner
    torch_threads: int
    item_bytes: int

    def seconds(self, step: RunnableStep, budget_s: float) -> list[float]:
        """Times of single steps, after one that warms up."""
        import torch

        torch.set_num_threads(self.torch_threads)
        self.runner.run(step)
        times: list[float] = []
        while sum(times) < budget_s or len(times) < 2:
            start = time.perf_counter()
            self.runner.run(step)
            times.append(time.perf_counter() - start)
        return times


def compare(measured: list[Measured], step: RunnableStep, budget_s: float, rounds: int) -> list[list[float]]:
    """Times of each of `measured`, in turns, so that other work on the machine affects all of them alike."""
    times: list[list[float]] = [[] for _ in measured]
    for _ in range(rounds):
        for one, of_one in zip(measured, times, strict=True):
            of_one += one.seconds(step, budget_s / rounds)
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
    parser.add_argument("--kernels", default="auto/int8,auto,torch", help="kernels to compare, run in turn")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds measured per row count and kernel")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    prepare_environment()
    spec = resolve_model(args.model)
    layout = spec.kv_layout(args.dtype, PAGE_SIZE)
    batches, prompts = ([int(n) for n in text.split(",") if n] for text in (args.batches, args.prompts))
    pages = 1 + max(
        [b * layout.num_pages_for(args.context) for b in batches] + [layout.num_pages_for(n) for n in prompts]
    )
    pool = HeapHost().create("bench", PoolInfo(group="bench", num_pages=pages, layout=layout, incarnation=1))
    measured = [load(name, spec, args, pool) for name in args.kernels.split(",")]
    read, multiplied = parameters(spec)
    for batch in batches:
        before = read_gb_s(args.threads)
        times = compare(measured, decode_step(batch, args.context), args.seconds, args.rounds)
        bandwidth = max(before, read_gb_s(args.threads))
        print(f"decode, batch {batch}, context {args.context}; memory {bandwidth:.0f} GB/s")
        report(measured, times, [read * one.item_bytes / bandwidth / 1e9 for one in measured], batch)
    for num_tokens in prompts:
        before = product_gflops(layout.dtype, args.threads)
        times = compare(measured, prefill_step(num_tokens), args.seconds, args.rounds)
        gflops = max(before, product_gflops(layout.dtype, args.threads))
        print(f"prefill {num_tokens}; one big product of torch {gflops:.0f} GFLOP/s")
        report(measured, times, [2 * multiplied * num_tokens / gflops / 1e9] * len(measured), num_tokens)


def load(name: str, spec: ModelSpec, args: argparse.Namespace, pool: PagePool) -> Measured:
    import torch

    from nodes.worker.executor.runners import make_runner

    kernels, _, quantization = name.partition("/")
    spec = spec.quantized(quantization or "none")  # type: ignore[arg-type]
    config = WorkerConfig(
        group="bench",
        model=args.model,
        agent="",
        dtype=args.dtype,
        num_threads=args.threads,
        kernels=kernels,  # type: ignore[arg-type]
    )
    start = time.perf_counter()
    runner = make_runner(spec, config, pool)
    print(f"{spec.name}, {args.threads} threads, loaded in {time.perf_counter() - start:.1f} s: {runner.numerics}")
    item_bytes = 1 if quantization else ITEM_BYTES[pool.layout.dtype]
    return Measured(name, runner, torch.get_num_threads(), item_bytes)


def report(measured: list[Measured], times: list[list[float]], floors: list[float], num_tokens: int) -> None:
    """One line each: median, best, floor, and how many times as fast as the last one it is."""
    against = statistics.median(times[-1])
    for one, of_one, floor in zip(measured, times, floors, strict=True):
        median = statistics.median(of_one)
        print(
            f"  {one.name:12} {median * 1e3:8.2f} ms (best {min(of_one) * 1e3:.2f}, {len(of_one)} steps)"
            f"  {num_tokens / median:8.1f} tokens/s  floor {floor * 1e3:.2f} ms = {floor / median:.0%}"
            f"  {against / median:.2f} times {measured[-1].name}"
        )


if __name__ == "__main__":
    main()
