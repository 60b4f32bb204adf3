"""How long streams stand still when a decode worker is killed while another decode group is healthy, and with none.

16 paced streams, `kill -9` of a decode worker in their middle, so many blows; the worker of each group in turn. Of each
blow: the longest time in which any stream got nothing, counted from the signal; and how long after the signal a new
request had its first token. Each text is compared with the undisturbed one. The same with one decode group, whose
streams wait until its worker is back. A stream that breaks or differs ends the run with status 1.
"""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.recovery import SENTENCE, ready
from benchmarks.server import actors, get, mesh
from cli.bench.client import Server
from cli.chaos.answer import Answer, differences
from cli.chaos.asked import Request, streamed
from cli.chaos.clients import ask
from cli.chaos.held import samples

NUM_STREAMS: Final = 16
MOVES: Final = 'mesh_gateway_moves_total{actor="gateway-0",role="gateway"}'
STALL_GOALS_S: Final = (0.12, 0.2)
"""Median and worst, with two groups."""
NEW_GOAL_S: Final = 0.1
ONE_GROUP_S: Final = 0.32
"""What streams of one group waited before any of this: not to get worse."""
MESHES: Final = {2: ("--prefill", "2", "--decode", "2"), 1: ("--prefill", "1", "--decode", "1")}


def body(number: int, salt: str, num_tokens: int, model: str) -> dict[str, Any]:
    """Of some hundred tokens each, no two alike; sampled where the model samples."""
    return streamed(
        {
            "model": model.partition("?")[0],
            "prompt": f"Story {number}. " + SENTENCE * (3 + number % 4),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": number,
            "temperature": 0.8,
            "cache_salt": salt,
        }
    )


@dataclass
class Stream:
    """One request, and when each of its events came."""

    answer: Answer = field(default_factory=Answer)
    times_s: list[float] = field(default_factory=list[float])

    async def run(self, port: int, body: dict[str, Any]) -> None:
        self.times_s.append(time.perf_counter())
        await ask(Server("127.0.0.1", port), Request(body), self.answer, self._heard)

    def _heard(self) -> None:
        self.times_s.append(time.perf_counter())

    def stall_s(self, at_s: float) -> float:
        """The longest time without an event, from `at_s` on."""
        gaps = ((a, b) for a, b in itertools.pairwise(self.times_s) if b > at_s)
        return max((b - max(a, at_s) for a, b in gaps), default=0.0)


async def wave(port: int, salt: str, args: argparse.Namespace) -> list[Stream]:
    """All streams, undisturbed."""
    streams = [Stream() for _ in range(NUM_STREAMS)]
    await asyncio.gather(
        *(one.run(port, body(number, salt, args.tokens, args.model)) for number, one in enumerate(streams))
    )
    return streams


async def blow(
    port: int, name: str, number: int, num_groups: int, args: argparse.Namespace
) -> tuple[float, float, list[Stream]]:
    """The longest stall, when a new request had its first token, and the streams."""
    await ready(name, args.tree)
    # After a stable while a restart is immediate; one that comes too soon would measure the restart's pause.
    await asyncio.sleep(args.settle)
    victim = f"worker-decode-{number % num_groups}"
    pid = next(one["pid"] for one in await asyncio.to_thread(actors, name, args.tree) if one["actor_id"] == victim)
    running = asyncio.ensure_future(wave(port, f"blow {number}", args))
    await asyncio.sleep(args.after)
    at_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    new = Stream()
    await new.run(port, body(number, f"new {number}", 4, args.model))
    streams = await running
    return max(one.stall_s(at_s) for one in streams), new.times_s[1] - at_s, [*streams, new]


async def measure(port: int, name: str, num_groups: int, args: argparse.Namespace) -> list[str]:
    """All blows on one mesh; returns what broke or differed."""
    wanted = [one.answer for one in await wave(port, "undisturbed", args)]
    stalls: list[float] = []
    news: list[float] = []
    wrong: list[str] = [one.broken for one in wanted if one.broken]
    for number in range(args.blows):
        stall_s, new_s, (*streams, new) = await blow(port, name, number, num_groups, args)
        stalls.append(stall_s)
        news.append(new_s)
        wrong += differences([one.answer for one in streams], wanted)
        wrong += [new.answer.broken] if new.answer.broken else []
        if args.verbose:
            print(f"  blow {number}: stall {stall_s:.3f} s, new request {new_s:.3f} s", flush=True)
    moves = samples(get(f"http://127.0.0.1:{port}/metrics").decode()).get(MOVES, 0.0)
    goals = f"{STALL_GOALS_S[0]}, {STALL_GOALS_S[1]}; {NEW_GOAL_S}" if num_groups > 1 else f"{ONE_GROUP_S} as before"
    print(
        f"{num_groups:>6}{args.blows:>7}{statistics.median(stalls):>10.2f}{max(stalls):>8.2f}"
        f"{statistics.median(news):>12.2f}{max(news):>8.2f}{moves / args.blows:>9.1f}   {goals}",
        flush=True,
    )
    return wrong


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blows", type=int, default=20)
    parser.add_argument("--model", default="echo?step_ms=6", help="as in `meshctl up`")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--after", type=float, default=0.8, help="seconds from the begin of the streams to the blow")
    parser.add_argument("--settle", type=float, default=2.0)
    parser.add_argument("--groups", type=lambda text: [int(one) for one in text.split(",")], default=[2, 1])
    parser.add_argument("--tree", type=Path, help="another checkout, to compare with")
    parser.add_argument("--verbose", action="store_true", help="each blow")
    args = parser.parse_args()
    os.environ["KVMESH_SUPERVISION__RESTART_BUDGET"] = "100000"
    print(f"{NUM_STREAMS} streams of {args.tokens} tokens, {args.model}; seconds")
    print("groups  blows  stall p50   worst  new req p50   worst    moves   goals", flush=True)
    wrong: list[str] = []
    for num_groups in args.groups:
        options = ("--model", args.model, "--detokenizers", "2", *MESHES[num_groups])
        with mesh(*options, tree=args.tree) as (port, name):
            wrong += asyncio.run(measure(port, name, num_groups, args))
    if wrong:
        sys.exit(f"{len(wrong)} answers broke or differ, the first: {wrong[0]}")


if __name__ == "__main__":
    main()
