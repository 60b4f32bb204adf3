"""How long the device idles between decode steps, from a profile, at batch 32 and 256.

    python -m benchmarks.gpu.gaps

Steps run ahead of each other as in a worker. A gap is a time in which neither a kernel nor a copy runs on any stream;
the profiler itself slows the host, so gaps are measured too long rather than too short.
"""

import argparse
from typing import NamedTuple

from benchmarks.gpu.figures import say
from benchmarks.gpu.loaded import GREEDY, Loaded, decode_steps, load, run_ahead, unload

MODEL = "random:qwen3-0.6b"
WARM_STEPS = 8


class Idle(NamedTuple):
    """Microseconds: the whole span, its busy part, and the gaps in it, longest first."""

    span_us: float
    busy_us: float
    gaps_us: list[float]


def idle_times(intervals: list[tuple[float, float]]) -> Idle:
    """From begin and end (microseconds) of all that ran on the device; what overlaps counts once."""
    busy, gaps, first, reached = 0.0, [], None, 0.0
    for begin, end in sorted(intervals):
        if first is None:
            first = reached = begin
        elif begin > reached:
            gaps.append(begin - reached)
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return Idle(reached - (first or 0.0), busy, sorted(gaps, reverse=True))


def profiled(loaded: Loaded, batch: int, context: int, num_steps: int) -> Idle:
    """Idle times of `num_steps` decode steps."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = decode_steps(loaded.layout, batch, context, num_steps + WARM_STEPS, GREEDY)
    for _ in run_ahead(loaded.runner, steps[:WARM_STEPS]):
        pass
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in run_ahead(loaded.runner, steps[WARM_STEPS:]):
            pass
        loaded.runner.synchronize()
    return idle_times(
        [
            (event.time_range.start, event.time_range.end)
            for event in found.events()
            if event.device_type == DeviceType.CUDA
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    batches = (32, 256)
    loaded = load(args.model, max(batches) * (args.context + args.steps + 32), max(batches), args.device)
    for batch in batches:
        idle = profiled(loaded, batch, args.context, args.steps)
        if not idle.span_us:
            print("skipped: the profiler saw nothing on the device", flush=True)
            continue
        per_step = (idle.span_us - idle.busy_us) / args.steps
        longest = sorted(idle.gaps_us[: args.steps])
        between = longest[len(longest) // 2] if longest else 0.0
        say(
            f"{args.model.removeprefix('random:')} idle between steps, batch {batch}",
            f"{per_step:,.0f} us of {idle.span_us / args.steps:,.0f} us",
            f"{1 - idle.busy_us / idle.span_us:.1%} idle; median of the {args.steps} longest gaps {between:,.0f} us",
        )
    unload(loaded)


if __name__ == "__main__":
    main()
