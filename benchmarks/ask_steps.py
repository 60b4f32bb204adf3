"""What asks cost a decode step of a worker on the CPU: each kind of request beside plain greedy ones, in turns.

One process, no mesh. All rows of a step ask for the same; the figure is the median over turns of a step's time divided
by that of the plain step in the same turn, so that other work on the machine affects both alike.

    python -m benchmarks.ask_steps [--model random:qwen3-0.6b] [--threads 2] [--batches 1,16] [--turns 20]
"""

import argparse
import os
import statistics
import time
from array import array

from benchmarks.worker_steps import GREEDY, PAGE_SIZE, load
from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.asks import Ask, DrawnModel, asked, open_asks
from nodes.asks.allowed_token_ids import AllowedTokenIds
from nodes.asks.logprobs import Logprobs
from nodes.asks.penalties import Penalties
from nodes.asks.repetition_penalty import RepetitionPenalty
from nodes.model_spec import resolve_model
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.environment import prepare_environment
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep

CONTEXT = 1024
"""Positions of each row, and tokens that its penalties look back at."""
NUM_PROMPT = 24

KINDS: dict[str, tuple[tuple[Ask, ...], Sampling]] = {
    "logprobs, top 5": ((Logprobs(5),), GREEDY),
    "a mask of 8,192 ids": ((AllowedTokenIds([*range(0, 8 * 8192, 8)]),), GREEDY),
    "penalties over 1,000 tokens": ((RepetitionPenalty(1.1), Penalties(0.5, 0.5)), GREEDY),
    "temperature 0.7, top_p 0.95": ((), Sampling(temperature=0.7, top_p=0.95, seed=1)),
}


def step_of(batch: int, asks: tuple[Ask, ...], sampling: Sampling, vocab_size: int) -> RunnableStep:
    """One token for each of `batch` sequences at position `CONTEXT - 1`, with editors of their own."""
    pages_each = CONTEXT // PAGE_SIZE
    travelling = asked(asks)
    model = DrawnModel(vocab_size)
    opening = Open(0, 0, NUM_PROMPT, Sampling(sampling.temperature, sampling.top_p, seed=1, asks=travelling))
    found = [OpenSequence(opening, *open_asks(travelling, model)) for _ in range(batch)]
    histories = [
        array("i", range(7 * i, 7 * i + CONTEXT)) if opening.sampling.looks_back else None for i in range(batch)
    ]
    rows = Rows(
        found, [CONTEXT - 1] * batch, [1] * batch, range(batch), [i * pages_each for i in range(batch)],
        histories=histories,
    )  # fmt: skip
    return RunnableStep(1, rows, array("i", range(300, 300 + batch)), array("i", range(1, 1 + batch * pages_each)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    prepare_environment()
    spec = resolve_model(args.model)
    batches = [int(number) for number in args.batches.split(",")]
    pages = 1 + max(batches) * (CONTEXT // PAGE_SIZE)
    layout = spec.kv_layout(args.dtype, PAGE_SIZE)
    pool = HeapHost().create("bench", PoolInfo(group="bench", num_pages=pages, layout=layout, incarnation=1))
    runner = load("auto", spec, args, pool).runner
    for batch in batches:
        plain = step_of(batch, (), GREEDY, spec.vocab_size)
        runner.run(plain)
        print(f"decode, {batch} rows, context {CONTEXT}; against plain greedy steps, medians of {args.turns} turns")
        for name, (asks, sampling) in KINDS.items():
            step = step_of(batch, asks, sampling, spec.vocab_size)
            runner.run(step)
            pairs = [(_seconds(runner.run, plain), _seconds(runner.run, step)) for _ in range(args.turns)]
            ratio = statistics.median(asking / greedy for greedy, asking in pairs)
            plain_ms, asking_ms = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"  {name:28} {asking_ms:8.2f} ms, plain {plain_ms:8.2f} ms: {ratio:.3f}")


def _seconds(run: object, step: RunnableStep) -> float:
    start = time.perf_counter()
    run(step)  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
