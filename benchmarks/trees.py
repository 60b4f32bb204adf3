"""What a change costs when nothing fails: the ring of another checkout and this one's, measured in turns.

Both meshes run `echo` with prefill and decode in different processes, and idle while the other is measured. Wall time
varies with the host's other work, so pairs are compared, and the CPU time of all actors per token is printed too, which
varies less.
"""

import argparse
import asyncio
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ring import body
from benchmarks.server import actors, ask, cpu_seconds, mesh

MESH = ("--model", "echo", "--max-running", "256", "--prefill", "1", "--decode", "1")


class Run(NamedTuple):
    """One closed loop."""

    tokens_per_s: float
    ttft_p50_ms: float
    cpu_us_per_token: float


class Side:
    """One of the two meshes."""

    def __init__(self, port: int, name: str, tree: Path | None = None) -> None:
        self._port = port
        self._roles: dict[int, str] = {actor["pid"]: actor["role"] for actor in actors(name, tree)}
        self.runs: list[Run] = []
        self.by_role: dict[str, list[float]] = {}
        """Microseconds of CPU for a token, of all actors of a role, for each run."""

    def forget(self) -> None:
        self.runs.clear()
        self.by_role.clear()

    async def run(self, concurrency: int, num_requests: int, make_body: Callable[[int], dict[str, Any]]) -> None:
        """Do one run and record it."""
        before_s = {pid: cpu_seconds(pid) for pid in self._roles}
        level = await ask(self._port, concurrency, num_requests, make_body)
        spent_s = {pid: cpu_seconds(pid) - before_s[pid] for pid in self._roles}
        cpu_s = sum(spent_s.values())
        for role in {*self._roles.values()}:
            its_s = sum(spent_s[pid] for pid, its in self._roles.items() if its == role)
            self.by_role.setdefault(role, []).append(its_s / level.num_output_tokens * 1e6)
        self.runs.append(Run(level.tokens_per_s, level.ttft.p50, cpu_s / level.num_output_tokens * 1e6))


def quartiles(values: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


async def measure(before: Side, after: Side, args: argparse.Namespace) -> None:
    """One line per level; a ratio above 1 means that this checkout is faster, has a longer TTFT, or needs more CPU."""
    print(
        "clients  tok/s before  after  ratio of pairs, middle half   TTFT ratio   CPU per token before  after   ratio"
    )
    for concurrency in args.concurrency:
        num_requests = max(args.requests, args.waves * concurrency)
        before.forget()
        after.forget()
        for pair in range(args.pairs + 1):
            base = 1_000_000 * concurrency + pair * 10_000
            # In turns, and each is first as often as second.
            for side in (before, after) if pair % 2 else (after, before):
                await side.run(concurrency, num_requests, lambda n, base=base: body(args.tokens, base + n))
            if pair == 0:
                # Warm-up.
                before.forget()
                after.forget()
        pairs = list(zip(before.runs, after.runs, strict=True))
        speed = quartiles([b.tokens_per_s / a.tokens_per_s for a, b in pairs])
        ttft = statistics.median(b.ttft_p50_ms / a.ttft_p50_ms for a, b in pairs)
        cpu = quartiles([b.cpu_us_per_token / a.cpu_us_per_token for a, b in pairs])
        middle_before, middle_after = (
            Run(*(statistics.median(column) for column in zip(*side.runs, strict=True))) for side in (before, after)
        )
        print(
            f"{concurrency:>7}{middle_before.tokens_per_s:>14.0f}{middle_after.tokens_per_s:>7.0f}  {speed:<28}"
            f"{ttft:>12.3f}{middle_before.cpu_us_per_token:>20.1f} us{middle_after.cpu_us_per_token:>8.1f} us  {cpu}",
            flush=True,
        )
        medians = [{role: statistics.median(us) for role, us in side.by_role.items()} for side in (before, after)]
        shown = [f"{role} {medians[0].get(role, 0):.1f} -> {us:.1f}" for role, us in sorted(medians[1].items())]
        print(f"        by role, us for a token: {', '.join(shown)}", flush=True)


@contextmanager
def computing(number: int) -> Generator[None]:
    """So many processes that compute meanwhile, as on a machine that others use, too."""
    # In a session of their own: the kernel shares cores among sessions first, and theirs are not the client's.
    hog = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(hog, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in hogs:
            process.kill()
            process.wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="another checkout of this repository")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32, help="least number of requests per run")
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--options", default="", help="more options of this checkout's mesh, for `.` beside itself")
    parser.add_argument("--hogs", type=int, default=0, help="processes that compute beside both meshes")
    args = parser.parse_args()
    tree = args.before.resolve()
    with mesh(*MESH, tree=tree) as one, mesh(*MESH, *shlex.split(args.options)) as other, computing(args.hogs):
        asyncio.run(measure(Side(*one, tree), Side(*other), args))


if __name__ == "__main__":
    main()
