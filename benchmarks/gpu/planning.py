"""Which share of a decode step is planning in Python, and whether the device hides it: an experiment.

    python -m benchmarks.gpu.planning

The same steps three times. One by one: the host plans while the device idles, so the time of a launch is what the host
costs and the time of the wait after it is what the device needs after that. Ahead: as in a worker, where a step is
planned while the one before runs. And on the host alone: the arrays of a step, which need no device. If planning is
hidden, steps that run ahead take as long as the device's part alone.

Last, a cost that captured steps avoid: FlashInfer's whole plan of a decode step by tensor cores (0.6.13) takes Python's
`max` over the tensor of lengths, row by row; captured steps use `fast_decode_plan` instead (see
`nodes.worker.cuda.flashinfer_plans`), steps that mix chunks and single rows still pay it.
"""

import argparse
import itertools
import statistics
import time

from benchmarks.gpu.figures import say
from benchmarks.gpu.loaded import GREEDY, SAMPLED, Loaded, decode_steps, load, run_ahead, unload

MODEL = "random:qwen3-0.6b"
WARM_STEPS = 8


def behind(loaded: Loaded, batch: int, context: int, num_steps: int, *, sampled: bool) -> tuple[float, float]:
    """Median seconds of launching, and of waiting after that, one step at a time."""
    launching: list[float] = []
    waiting: list[float] = []
    sampling = SAMPLED if sampled else GREEDY
    for step in decode_steps(loaded.layout, batch, context, num_steps + WARM_STEPS, sampling):
        loaded.runner.synchronize()
        start = time.perf_counter()
        launched = loaded.runner.launch(step)
        between = time.perf_counter()
        loaded.runner.finish(launched)
        launching.append(between - start)
        waiting.append(time.perf_counter() - between)
    return statistics.median(launching[WARM_STEPS:]), statistics.median(waiting[WARM_STEPS:])


def ahead(loaded: Loaded, batch: int, context: int, num_steps: int, *, sampled: bool) -> float:
    """Median seconds from the end of one step to the end of the next."""
    steps = decode_steps(loaded.layout, batch, context, num_steps + WARM_STEPS, SAMPLED if sampled else GREEDY)
    times = [time.perf_counter() for _ in run_ahead(loaded.runner, steps)][WARM_STEPS:]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def on_the_host(loaded: Loaded, batch: int, context: int) -> float:
    """Seconds to lay out the arrays of one step."""
    from nodes.worker.ops.torch.batch import host_batch, pack

    step = decode_steps(loaded.layout, batch, context, 2, GREEDY)[1]
    times: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        pack(host_batch(step, loaded.layout.page_size))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def maximum_in_python(batch: int, context: int) -> float:
    """Seconds of the `max` that `BatchDecodeWithPagedKVCacheWrapper.plan` takes over the lengths, on the host."""
    import torch

    lengths = torch.full((batch,), context, dtype=torch.int32)
    times: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        int(max(lengths))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    batches = [int(text) for text in args.batches.split(",")]
    loaded = load(args.model, max(batches) * (args.context + args.steps + 32), max(batches), args.device)
    name = args.model.removeprefix("random:")
    for batch in batches:
        for sampled in (False, True):
            launch, wait = behind(loaded, batch, args.context, args.steps, sampled=sampled)
            step = ahead(loaded, batch, args.context, args.steps, sampled=sampled)
            arrays = on_the_host(loaded, batch, args.context)
            say(
                f"{name} step, batch {batch}, {'sampled' if sampled else 'greedy'}",
                f"{step * 1e3:.2f} ms ahead, {(launch + wait) * 1e3:.2f} ms one by one",
                f"launch {launch * 1e3:.2f} ms ({launch / step:.0%} of a step; arrays {arrays * 1e3:.2f} ms),"
                f" wait behind it {wait * 1e3:.2f} ms",
            )
        say(
            f"{name} maximum of the lengths in Python, batch {batch}",
            f"{maximum_in_python(batch, args.context) * 1e3:.3f} ms",
            "in FlashInfer's whole plan of tensor-core decode; captured steps are planned without it",
        )
    unload(loaded)


if __name__ == "__main__":
    main()
