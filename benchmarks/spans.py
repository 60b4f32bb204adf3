"""How much of a request's time its timeline leaves unaccounted for: 1,000 requests to a mesh of `tiny`, at a rate.

They come at 25 a second, so that each has its line in the request log, from which the spans are made as
`meshctl trace` makes them. What nobody accounts for are the spans `ways` and `gateway`.
"""

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict

import msgspec

from benchmarks.server import mesh
from cli.supervisor.kept.mesh_directory import MeshDirectory
from nodes.call_spans import sample_spans
from nodes.protocol.records import CallRecord

UNACCOUNTED = ("ways", "gateway")
GOAL_S, GOAL_SHARE = 0.005, 0.02


def calls_of(name: str) -> list[CallRecord]:
    """All calls of a mesh that have a line and were answered."""
    decoder = msgspec.json.Decoder(CallRecord)
    files = sorted(MeshDirectory(name).requests.glob("*.jsonl"))
    calls = [decoder.decode(line) for file in files for line in file.read_bytes().splitlines()]
    return [call for call in calls if call.status == 200 and call.samples]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=25.0, help="a second; above 50 not every one has a line")
    args = parser.parse_args()
    with mesh("--model", "tiny") as (_, name):
        words = ("--name", name, "--rate", str(args.rate), "--requests", str(args.requests), "--prompt", "64")
        subprocess.run([sys.executable, "-m", "cli", "bench", *words], check=True, stdout=subprocess.DEVNULL)
        calls = calls_of(name)
    took: defaultdict[str, list[float]] = defaultdict(list)
    lost: list[tuple[float, float]] = []
    for call in calls:
        spans = sample_spans(call, call.samples[0])
        assert (spans[0].begin_s, spans[-1].end_s) == (0.0, call.total_s), "they tile its time"
        for span in spans:
            took[span.name].append(span.took_s)
        unaccounted_s = sum(span.took_s for span in spans if span.name in UNACCOUNTED)
        lost.append((unaccounted_s, unaccounted_s / call.total_s))
    print(f"{len(calls)} calls; ms, of those that have the span:")
    for span_name, values in took.items():
        parts = statistics.quantiles([value * 1e3 for value in values], n=20)
        print(f"{span_name:<16} {len(values):>5} calls, p50 {parts[9]:6.1f}, p95 {parts[18]:6.1f}")
    within = sum(seconds <= GOAL_S or share <= GOAL_SHARE for seconds, share in lost) / len(lost)
    at_p95 = statistics.quantiles([seconds * 1e3 for seconds, _ in lost], n=20)[18]
    print(f"unaccounted for: p95 {at_p95:.1f} ms; {within:.1%} within 5 ms or 2 % (goal: 95 %)")


if __name__ == "__main__":
    main()
