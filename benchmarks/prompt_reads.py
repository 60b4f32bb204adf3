"""What reading a prompt (`prompt_logprobs`, `echo`) costs a worker on the CPU, beside a plain prefill of it.

One process, no mesh. A turn prefills the prompt in chunks, does so again and reads it, and multiplies the head with as
many rows of random numbers, all rows of a chunk in one call: nothing that has every logit can be faster. Medians of
turns; the goal is a plain prefill plus 1.5 times that product.

    python -m benchmarks.prompt_reads [--model random:qwen3-0.6b] [--tokens 2048] [--chunk 256] [--top 1] [--threads 2]
"""

import argparse
import os
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

from benchmarks.worker_steps import GREEDY, PAGE_SIZE, load
from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.asks import DrawnModel, asked, open_asks
from nodes.asks.prompt_logprobs import PromptLogprobs
from nodes.model_spec import ModelSpec, resolve_model
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.environment import prepare_environment
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep


def prefill(ids: list[int], chunk: int, sampling: Sampling) -> list[RunnableStep]:
    """Steps that prefill a prompt on the first pages; the last one draws."""
    opened = open_asks(sampling.asks, DrawnModel(1 << 20))
    one = OpenSequence(Open(0, 0, len(ids), sampling, token_ids=ids), *opened)
    steps: list[RunnableStep] = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        pages = array("i", range(1, 1 + -(-(start + len(part)) // PAGE_SIZE)))
        draws = [int(start + len(part) == len(ids))]
        steps.append(RunnableStep(1, Rows([one], [start], [len(part)], [0], [0], draws=draws), array("i", part), pages))
    return steps


def head_product(spec: ModelSpec, dtype: str, num_rows: int, chunk: int) -> Callable[[], None]:
    """The head, of random weights, times `num_rows` rows, by the native kernels, which have their threads already."""
    import torch

    from nodes.worker.ops.native.builds import choose_library
    from nodes.worker.ops.native.packed_weight import PackedWeight, row_bytes

    library = choose_library().build
    if library is None:
        raise SystemExit("there are no native kernels on this CPU, whose head this measures")
    head = PackedWeight(library, (torch.randn(spec.vocab_size, spec.hidden_size).to(getattr(torch, dtype)),))
    wide = row_bytes(library, head.torch_dtype) == torch.float32.itemsize
    rows = torch.randn(chunk, spec.hidden_size).to(torch.float32 if wide else head.torch_dtype)
    logits = torch.empty(chunk, spec.vocab_size, dtype=rows.dtype)
    linear = library.functions.kvmesh_linear
    pointers = (rows.data_ptr(), head.at, None, None, logits.data_ptr())

    def multiply() -> None:
        # `rows` and `logits` are named here so that their memory lives as long as this function.
        assert len(rows) == len(logits) == chunk
        for begin in range(0, num_rows, chunk):
            linear(head.dtype, head.is_int8, 0, *pointers, min(chunk, num_rows - begin), head.width, head.depth)

    return multiply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step; what workers on the CPU take")
    parser.add_argument("--top", type=int, default=1, help="likeliest tokens to read beside the prompt's own")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    prepare_environment()
    spec = resolve_model(args.model)
    layout = spec.kv_layout(args.dtype, PAGE_SIZE)
    num_pages = 1 + layout.num_pages_for(args.tokens)
    pool = HeapHost().create("bench", PoolInfo(group="bench", num_pages=num_pages, layout=layout, incarnation=1))
    runner = load("auto", spec, args, pool).runner
    ids = [(7 * at * at + 3 * at) % spec.vocab_size for at in range(args.tokens)]
    plain = prefill(ids, args.chunk, GREEDY)
    reading = prefill(ids, args.chunk, Sampling(temperature=0.0, asks=asked([PromptLogprobs(args.top)])))
    run: Any = runner.run
    ways = {
        "plain": lambda: [run(step) for step in plain],
        "read": lambda: [run(step) for step in reading],
        "head": head_product(spec, layout.dtype, args.tokens - 1, args.chunk),
    }
    assert sum(len(run(step).prompt_extras[0]) for step in reading) == (args.tokens - 1) * (8 + 8 * args.top)
    times = [{name: _seconds(way) for name, way in ways.items()} for _ in range(args.turns)]
    medians = {name: statistics.median(one[name] for one in times) for name in ways}
    ratio = statistics.median((one["read"] - one["plain"]) / one["head"] for one in times)
    print(f"{args.tokens} tokens in chunks of {args.chunk}, top {args.top}; medians of {args.turns} turns")
    print("  ".join(f"{name} {1e3 * value:.0f} ms" for name, value in medians.items()))
    print(f"reading costs {ratio:.2f} times the head's product over its rows (goal: at most 1.5)")


def _seconds(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
