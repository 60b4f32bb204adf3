"""What it costs to prefill in one process and decode in another, on one device: `python -m benchmarks.gpu.handoff`

The first token of a request is sent when decode has all pages. The time to the first token, less the same time where
one process does both, is therefore the handoff: the pages of the last chunk, pulled over `cuda_ipc`, and the messages
about them. The time from the first token to the second is the first decode step with its way to the client. Prompts of
4,096 random tokens, none seen before, one at a time; medians.
"""

import argparse
import random
import statistics
import time
from typing import NamedTuple

from benchmarks.gpu.figures import say
from benchmarks.gpu.served import ask, served

KINDS = {"together": ("--mixed", "1"), "apart": ("--prefill", "1", "--decode", "1", "--local-prefill-max", "0")}


class Times(NamedTuple):
    """Seconds."""

    first_token: float
    second_token: float


def timed(port: int, model: str, prompt: list[int]) -> Times:
    """Time to the first token, and from it to the second, of one streamed request."""
    start = time.perf_counter()
    events: list[float] = []
    with ask(port, model, prompt, 4, temperature=0.0, stream=True) as response:
        events = [time.perf_counter() for line in response if line.startswith(b"data: {")]
    assert len(events) >= 2, f"{len(events)} events for 4 tokens"
    return Times(events[0] - start, events[1] - events[0])


def measure(args: argparse.Namespace, *options: str) -> Times:
    """Medians over `args.repeats` prompts, after two that warm up."""
    draw = random.Random(1)
    with served(args.model, args.device, *options) as port:
        found = [
            timed(port, args.model, [draw.randint(0, 999) for _ in range(args.prompt)]) for _ in range(args.repeats + 2)
        ]
    return Times(*(statistics.median(column) for column in zip(*found[2:], strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    name = f"{args.model.removeprefix('random:')}, prompt of {args.prompt}"
    times = {kind: measure(args, *options) for kind, options in KINDS.items()}
    for kind, found in times.items():
        say(
            f"{name}, {kind}",
            f"{found.first_token * 1e3:.1f} ms to the first token",
            f"{found.second_token * 1e3:.1f} ms from it to the second",
        )
    cost = times["apart"].first_token - times["together"].first_token
    say(f"{name}, handoff", f"{cost * 1e3:.1f} ms", "time to the first token apart, less that together")


if __name__ == "__main__":
    main()
