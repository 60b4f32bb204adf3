"""What a mesh without requests costs, and how long it takes to start.

Prints seconds from process start to ready, then each actor's CPU use over a quiet period as a share of one core
(goal: below 1 %).
"""

import argparse
import time

from benchmarks.server import actors, cpu_seconds, mesh


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    start = time.perf_counter()
    with mesh("--model", args.model) as (_, name):
        print(f"ready after {time.perf_counter() - start:.2f} s with {args.model}")
        time.sleep(3)  # work left over from start-up must not count as idling
        members = actors(name)
        before = {member["actor_id"]: cpu_seconds(member["pid"]) for member in members}
        began = time.perf_counter()
        time.sleep(args.seconds)
        wall = time.perf_counter() - began
        for member in members:
            used = cpu_seconds(member["pid"]) - before[member["actor_id"]]
            print(f"{member['actor_id']:<24} {used / wall:7.2%} of a core")


if __name__ == "__main__":
    main()
