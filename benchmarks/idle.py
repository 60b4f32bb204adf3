"""What a mesh without requests costs: CPU, wake-ups and memory of its processes, and how long it takes to start.

    python -m benchmarks.idle [--model echo] [--beside TREE --turns 4]

CPU is a share of one core over a quiet period, of all threads, as the scheduler counts it (ns; the ticks of
`/proc/PID/stat` are 10 ms, a twentieth of what an actor uses in 20 s). A wake-up is a switch that its thread asked for.
Memory is PSS, in which a page that n processes share counts as the n-th part of one; zygotes and renderers, which are
no actors, are listed by what they are. With `--beside`, another checkout's mesh is measured in turns with this one's,
both running all the time, and the medians of the turns are shown beside each other.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.server import actors, mesh
from cli.supervisor.processes.by_pid import proportional_bytes

SETTLE_S = 3.0
"""Work left over from the start must not count as idling."""


class Cost(NamedTuple):
    """Of one process, or of all: share of a core in percent, wake-ups a second, memory in MiB."""

    cpu: float
    wakes: float
    pss_mib: float


class Watched:
    """The processes of one mesh: its actors by their ids, the others by what they run."""

    def __init__(self, name: str, tree: Path | None = None) -> None:
        members = {member["pid"]: member["actor_id"] for member in actors(name, tree)}
        supervisor = next(pid for pid, actor_id in members.items() if actor_id == "supervisor")
        self.names = {pid: members.get(pid) or _name(pid) for pid in [supervisor, *_descendants(supervisor)]}
        self.turns: list[dict[str, Cost]] = []

    def turn(self, seconds: float) -> None:
        """Measure for so long."""
        before = {pid: _used(pid) for pid in self.names}
        began = time.perf_counter()
        time.sleep(seconds)
        took = time.perf_counter() - began
        costs: dict[str, Cost] = {}
        for pid, name in self.names.items():
            cpu_s, wakes = (after - was for after, was in zip(_used(pid), before[pid], strict=True))
            costs[name] = Cost(cpu_s / took * 100, wakes / took, (proportional_bytes(pid) or 0) / (1 << 20))
        costs["all"] = Cost(*(sum(column) for column in zip(*costs.values(), strict=True)))
        self.turns.append(costs)

    def medians(self) -> dict[str, Cost]:
        """The middle of all turns, by process."""
        return {
            name: Cost(
                *(statistics.median(column) for column in zip(*(turn[name] for turn in self.turns), strict=True))
            )
            for name in self.turns[0]
        }


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _read(task / "children").split()
    ]
    return [one for child in children for one in (child, *_descendants(child))]


def _name(pid: int) -> str:
    command = [part for part in _read(Path(f"/proc/{pid}/cmdline")).split("\0") if part]
    module = command[command.index("-m") + 1] if "-m" in command else command[0]
    return f"{module.rpartition('.')[2]} {pid}"


def _used(pid: int) -> tuple[float, int]:
    """CPU seconds and wake-ups of all threads that there are."""
    cpu_ns = wakes = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu_ns += int((_read(task / "schedstat") or "0").split()[0])
        status = _read(task / "status").partition("\nvoluntary_ctxt_switches:")[2]
        wakes += int(status.split()[0]) if status else 0
    return cpu_ns / 1e9, wakes


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # A thread that has ended since it was listed.
        return ""


def _print(sides: list[dict[str, Cost]]) -> None:
    for _ in sides:
        print(f"{'process':<28}{'% of a core':>12}{'wake-ups/s':>12}{'PSS MiB':>9}", end="   ")
    print()
    for rows in zip(*(side.items() for side in sides), strict=False):
        for name, (cpu, wakes, pss_mib) in rows:
            print(f"{name:<28}{cpu:>12.2f}{wakes:>12.1f}{pss_mib:>9.1f}", end="   ")
        print()
    print("; ".join(f"all: {side['all'].cpu:.2f} %, {side['all'].pss_mib:.0f} MiB" for side in sides))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one turn")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--beside", type=Path, help="another checkout of this repository")
    args = parser.parse_args()
    with ExitStack() as meshes:
        watched: list[Watched] = []
        for tree in ([args.beside.resolve()] if args.beside else []) + [None]:
            start = time.perf_counter()
            _, name = meshes.enter_context(mesh("--model", args.model, tree=tree))
            print(f"ready after {time.perf_counter() - start:.2f} s with {args.model}", flush=True)
            time.sleep(SETTLE_S)
            watched.append(Watched(name, tree))
        for _ in range(args.turns):
            for one in watched:
                one.turn(args.seconds)
        _print([one.medians() for one in watched])


if __name__ == "__main__":
    main()
