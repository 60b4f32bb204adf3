"""How long streams stand still when one of three hosts is killed, paused or cut off: from the blow to the next token.

The mesh of compose.yaml, each host a podman container on this machine, with clients that stream without a pause.
`benchmarks/recovery.py` says what counts as a stall. A killed host is recreated at once, with its id and without its
files; a host that is paused or cut off is let go after `--seconds`. Any stream that breaks ends the run with status 1.
Needs root, podman and a base image, see CONTRIBUTING.md.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.containers.image import NoContainers, base_image, build, image_name, is_built
from benchmarks.containers.mesh import DECODE, HEAD, PREFILL, HostMesh
from benchmarks.containers.world import World, wait_until
from benchmarks.recovery import KILL_GOAL_S, Load
from mesh.supervision.events import Policy

WATCH_S: Final = 6.0
POLICY: Final = Policy()
GOAL_S: Final = POLICY.missed * POLICY.heartbeat_s + KILL_GOAL_S

KILLS: Final[dict[str, Callable[[HostMesh], None]]] = {
    "decode killed": lambda mesh: mesh.remake(DECODE),
    "prefill killed": lambda mesh: mesh.remake(PREFILL),
    "registry killed": HostMesh.kill_registry,
}
FAULTS: Final[dict[str, Callable[[HostMesh], AbstractContextManager[None]]]] = {
    "decode paused": lambda mesh: mesh[DECODE].paused(),
    "prefill paused": lambda mesh: mesh[PREFILL].paused(),
    # No stream goes on before the head does: the goal is a second and a half more than the pause.
    "head paused": lambda mesh: mesh[HEAD].paused(),
    "decode cut off": lambda mesh: mesh[DECODE].cut_off(),
    "prefill cut off": lambda mesh: mesh[PREFILL].cut_off(),
    "decode disconnected": lambda mesh: mesh[DECODE].disconnected(),
    "prefill | decode cut": lambda mesh: mesh[DECODE].cut_off(mesh[PREFILL]),
}


def _blow(mesh: HostMesh, name: str, seconds: float) -> None:
    if name in KILLS:
        KILLS[name](mesh)
        return
    with FAULTS[name](mesh):
        time.sleep(seconds)


async def strike(load: Load, mesh: HostMesh, name: str, seconds: float, logs: Path | None) -> list[float]:
    """One blow, and what it cost the streams.

    The logs of all hosts are kept in `logs` after a blow that is worse than the goal, or breaks a stream.
    """
    before = await asyncio.to_thread(mesh.settled)
    await load.flows()
    num_broken = len(load.broken)
    at_s, began_at = time.perf_counter(), datetime.now(UTC)
    await asyncio.to_thread(_blow, mesh, name, seconds)
    blow_s = time.perf_counter() - at_s
    await asyncio.sleep(max(0.0, at_s + WATCH_S - time.perf_counter()))
    await load.flows()
    stalls = load.stalls(at_s, WATCH_S)
    broken = len(load.broken) - num_broken
    if broken:
        print(f"{name}: {broken} streams broke: {load.broken[-1]}", flush=True)
    if logs is not None and (broken or max(stalls, default=0.0) > GOAL_S):
        # Before the mesh has settled: whatever is recreated loses its logs.
        directory = logs / f"{name.replace(' ', '-')}-{max(stalls, default=0.0):.2f}"
        directory.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(mesh.world.keep_logs, directory)
        (directory / "blow").write_text(f"at {began_at:%H:%M:%S.%f} UTC, the blow itself took {blow_s:.2f} s\n")
    if name in KILLS:
        # The killed actors stay listed for a moment longer.
        await asyncio.to_thread(wait_until, lambda: mesh.settled() != before, "the killed actors are back")
    return stalls


def report(name: str, blows: list[list[float]]) -> None:
    """p50 and p99 of the streams that stood still, the median of the worst stall of each blow, and all the worst."""
    stalls = sorted(stall for blow in blows for stall in blow)
    worst = sorted(max(blow, default=0.0) for blow in blows)
    if not stalls:
        print(f"{name:<22}{len(blows):>6}{0:>9}   no stream stalled", flush=True)
        return
    p50, p99 = stalls[len(stalls) // 2], stalls[int(len(stalls) * 0.99)]
    mean = len(stalls) / len(blows)
    print(f"{name:<22}{len(blows):>6}{mean:>9.1f}{p50:>9.2f}{p99:>9.2f}{worst[len(worst) // 2]:>9.2f}", flush=True)
    # All of them: if one blow of ten is unlike the others, it has a cause of its own.
    print(f"{'':<22}worst of each blow: {' '.join(f'{one:.2f}' for one in worst)}", flush=True)


async def measure(mesh: HostMesh, args: argparse.Namespace) -> list[str]:
    """All faults in turn; returns what broke."""
    load = Load(mesh.port, args.clients)
    for name in args.faults:
        report(name, [await strike(load, mesh, name, args.seconds, args.logs) for _ in range(args.blows)])
    await load.stop()
    return load.broken


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--blows", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--faults", type=lambda text: text.split(","), default=[*KILLS, *FAULTS])
    parser.add_argument("--logs", type=Path, help="folder for the logs of hosts after blows with stalls above the goal")
    args = parser.parse_args()
    try:
        base = base_image()
    except NoContainers as error:
        sys.exit(str(error))
    if not is_built(image_name(base)):
        build(base)
    print(f"heartbeat {POLICY.heartbeat_s} s, {POLICY.missed} of them missed; goal: p99 below {GOAL_S} s", flush=True)
    print("fault                  blows  stalled    p50 s    p99 s  worst s", flush=True)
    world = World(image_name(base))
    try:
        broken = asyncio.run(measure(HostMesh.settled_in(world), args))
    finally:
        world.remove()
    if broken:
        sys.exit(f"{len(broken)} streams broke, the first: {broken[0]}")


if __name__ == "__main__":
    main()
