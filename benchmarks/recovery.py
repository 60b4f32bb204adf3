"""How long streams stand still when a role is killed or hangs: from the signal to the next token, by role.

A whole mesh with `tiny`, prefill and decode in different processes, with clients that stream without a pause. A stream
counts as stalled if it got nothing for `STALL_S` after the signal, or, where it still waits for its first token, for
`FIRST_TOKEN_STALL_S`. Heartbeat interval and goals are printed too. A stream that breaks ends the run with status 1.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.server import actors, mesh
from cli.bench.answer import Sample
from cli.bench.client import Server, encoded, stream
from cli.bench.loops import COMPLETIONS
from mesh.supervision.events import Policy

ROLES = {
    "registry": "registry",
    "tokenizer": "tokenizer-0",
    "prefill scheduler": "scheduler-prefill-0",
    "decode scheduler": "scheduler-decode-0",
    "prefill worker": "worker-prefill-0",
    "decode worker": "worker-decode-0",
    "detokenizer": "detokenizer-0",
    "kv_agent": "kv-agent-0",
}
MESH = ("--model", "tiny", "--prefill", "1", "--decode", "1", "--detokenizers", "2")
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
KILL_GOAL_S = 1.5
STALL_S = 0.2
FIRST_TOKEN_STALL_S = 0.6
WATCH_S = {"kill": 3.0, "hang": 7.0}
"""Requests that begin within this time after a signal are counted."""

SENTENCE = "Bob has 7 green pears. Ann has 3 red apples. The sky is blue and the grass is green. "
END_TOKEN = "2"


def body(number: int) -> dict[str, Any]:
    """Sampled, and never the end token, so that every step of every stream shows. No prompt is in a cache."""
    return {
        "model": "tiny",
        "prompt": f"Story {number}. " + SENTENCE * (3 + number % 6),
        "max_tokens": 300,
        "ignore_eos": True,
        "seed": number,
        "logit_bias": {END_TOKEN: -100},
        "cache_salt": str(number),
    }


class Load:
    """Clients that stream one request after the other, each to its end, until they are stopped."""

    def __init__(self, port: int, num_clients: int) -> None:
        self.samples: list[Sample] = []
        self.broken: list[str] = []
        self._server = Server("127.0.0.1", port)
        self._is_stopped = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def _client(self) -> None:
        while not self._is_stopped:
            sample = Sample(time.perf_counter())
            self.samples.append(sample)
            await stream(self._server, COMPLETIONS, encoded(body(len(self.samples))), sample)
            if sample.failure:
                self.broken.append(f"{sample.failure}: {sample.detail}")
                await asyncio.sleep(0.1)

    async def flows(self) -> None:
        """Wait until three quarters of the clients get tokens."""
        while True:
            since_s = time.perf_counter() - 0.1
            flowing = [
                s for s in self.samples[-4 * len(self._tasks) :] if s.event_times_s and s.event_times_s[-1] > since_s
            ]
            if len(flowing) >= 3 * len(self._tasks) // 4:
                return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Let every stream come to its end."""
        self._is_stopped = True
        await asyncio.gather(*self._tasks)

    def stalls(self, at_s: float, watch_s: float) -> list[float]:
        """Seconds of each stall, counted from `at_s`, or from its start if it began later."""
        found: list[float] = []
        for sample in self.samples:
            if sample.start_s > at_s + watch_s or (sample.end_s and sample.end_s < at_s):
                continue
            times = [sample.start_s, *sample.event_times_s]
            gaps = [(a, b) for a, b in itertools.pairwise(times) if b > at_s and a < at_s + watch_s]
            # Not always the first gap: tokens may have been on their way when the signal came.
            start_s, end_s = max(gaps, key=lambda gap: gap[1] - max(gap[0], at_s), default=(0.0, 0.0))
            limit_s = FIRST_TOKEN_STALL_S if start_s == sample.start_s else STALL_S
            if end_s - max(start_s, at_s) > limit_s:
                # Not always from `at_s`: a short pause seconds later is not that long.
                found.append(end_s - max(start_s, at_s))
        return found


async def ready(name: str, tree: Path | None = None) -> None:
    """Wait until the supervisor calls every actor ready; `tree` is the checkout that its mesh runs from."""
    while any(one["state"] != "ready" for one in await asyncio.to_thread(actors, name, tree)):  # noqa: ASYNC110 - a process
        await asyncio.sleep(0.2)


async def strike(load: Load, name: str, role: str, fault: str, settle_s: float) -> list[float]:
    """One blow, and what it cost the streams."""
    await ready(name)
    # After a stable while a restart is immediate; one that comes too soon would measure the restart's pause.
    await asyncio.sleep(settle_s)
    await load.flows()
    pid = next(actor["pid"] for actor in await asyncio.to_thread(actors, name) if actor["actor_id"] == ROLES[role])
    at_s = time.perf_counter()
    os.kill(pid, SIGNALS[fault])
    await asyncio.sleep(WATCH_S[fault])
    await load.flows()
    return load.stalls(at_s, WATCH_S[fault])


def report(fault: str, role: str, blows: list[list[float]]) -> None:
    """One line. p50 and p99 are over streams that stood still."""
    stalls = sorted(stall for blow in blows for stall in blow)
    if not stalls:
        print(f"{fault:<6}{role:<20}{len(blows):>6}{0:>9}   no stream stalled", flush=True)
        return
    p50, p99 = stalls[len(stalls) // 2], stalls[int(len(stalls) * 0.99)]
    print(f"{fault:<6}{role:<20}{len(blows):>6}{len(stalls) / len(blows):>9.1f}{p50:>9.2f}{p99:>9.2f}", flush=True)


async def measure(port: int, name: str, args: argparse.Namespace) -> list[str]:
    """All faults and roles in turn; returns what broke."""
    load = Load(port, args.clients)
    faults = {"kill": args.kills, "hang": args.hangs}
    for fault, num_blows in faults.items():
        blows: dict[str, list[list[float]]] = {role: [] for role in args.roles}
        for _ in range(num_blows):
            # One role after the other, so that each has been stable for a while when its turn comes again.
            for role in args.roles:
                blows[role].append(await strike(load, name, role, fault, args.settle))
        for role, of_role in blows.items():
            if of_role:
                report(fault, role, of_role)
    await load.stop()
    return load.broken


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--hangs", type=int, default=2)
    parser.add_argument("--settle", type=float, default=1.0)
    parser.add_argument("--roles", type=lambda text: text.split(","), default=list(ROLES))
    args = parser.parse_args()
    policy = Policy()
    hang_goal_s = policy.missed * policy.heartbeat_s + KILL_GOAL_S
    print(f"heartbeat {policy.heartbeat_s} s, suspected after {policy.missed}, killed {policy.kill_after_s} s later")
    print(f"goals: p99 after a kill below {KILL_GOAL_S} s, after a hang below {hang_goal_s} s")
    print("fault role                 blows  stalled    p50 s    p99 s", flush=True)
    os.environ["KVMESH_SUPERVISION__RESTART_BUDGET"] = "100000"
    with mesh(*MESH) as (port, name):
        broken = asyncio.run(measure(port, name, args))
    if broken:
        sys.exit(f"{len(broken)} streams broke, the first: {broken[0]}")


if __name__ == "__main__":
    main()
