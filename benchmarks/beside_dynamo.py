"""The ring beside Dynamo's frontend, router and mock engine, which need no GPU: in turns, same client and prompts.

    python -m benchmarks.beside_dynamo DIR [--pace]

DIR has the scripts of the peer, NVIDIA Dynamo 1.6.1: `install` (run before), `servers up | down`, and `mesh_load.py`,
the client, which prints a row for each server and number of clients. Both have one prefill and one decode group and
route by cached prefixes; Dynamo's mock engine computes nothing and moves no KV, ours (`echo`) writes, moves and reads
real pages. With `--pace` steps of both take 6 ms. Without DIR nothing is measured, which is said.
"""

import argparse
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

OURS, THEIRS = "ours-pd", "dpdkv"
STEP_MS: Final = 6


class Row(NamedTuple):
    """Medians of one server with so many clients."""

    tokens_per_s: float
    ttft_p50_ms: float
    itl_p99_ms: float
    cpu_s_per_1k: float


class Goal(NamedTuple):
    """Ours to theirs, of a column, with so many clients: at least, or at most, so much."""

    clients: int
    column: str
    is_least: bool
    bound: float


GOALS: Final = (Goal(64, "tokens_per_s", True, 0.85), Goal(256, "tokens_per_s", True, 1.0))
PACED_GOALS: Final = (Goal(64, "cpu_s_per_1k", False, 1.15), Goal(256, "cpu_s_per_1k", False, 1.05))


def rows_of(text: str) -> dict[tuple[str, int], Row]:
    """What the client has printed, by server and number of clients."""
    found: dict[tuple[str, int], Row] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 11 and words[0] in (OURS, THEIRS) and words[1].isdigit():
            # server, clients, tok/s, (min-max), TTFT 50 and 99, ITL 50 and 99, TPOT, CPU of the servers, of the client
            numbers = [float(words[at]) for at in (2, 4, 7, 9)]
            found[words[0], int(words[1])] = Row(*numbers)
    return found


@contextmanager
def servers(directory: Path, pace: bool) -> Generator[Mapping[str, str]]:
    """Both meshes, for as long as this is open; the environment in which the client finds them."""
    with tempfile.TemporaryDirectory() as folder:
        command = Path(folder) / "meshctl"
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cli "$@"\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        environment = os.environ | {"MESHCTL": str(command)}
        if pace:
            environment |= {"ECHO": f"echo?step_ms={STEP_MS}", "SPEED": "1"}
        try:
            subprocess.run([str(directory / "servers"), "up"], check=True, env=environment)
            yield environment
        finally:
            subprocess.run([str(directory / "servers"), "down"], check=False, env=environment)


def judge(rows: Mapping[tuple[str, int], Row], goals: tuple[Goal, ...]) -> bool:
    """Prints ours beside theirs, and each goal; returns whether all that were measured are met."""
    print("clients  tok/s ours, Dynamo  ratio   TTFT p50 ms   ITL p99 ms   CPU s per 1,000 tokens  ratio")
    for clients in sorted({clients for _, clients in rows}):
        ours, theirs = rows[OURS, clients], rows[THEIRS, clients]
        print(
            f"{clients:>7}  {ours.tokens_per_s:>7.0f}, {theirs.tokens_per_s:>6.0f}  "
            f"{ours.tokens_per_s / theirs.tokens_per_s:>9.2f}  {ours.ttft_p50_ms:>6.1f}, {theirs.ttft_p50_ms:.1f}"
            f"{ours.itl_p99_ms:>9.1f}, {theirs.itl_p99_ms:.1f}  {ours.cpu_s_per_1k:>10.4f}, {theirs.cpu_s_per_1k:.4f}"
            f"{ours.cpu_s_per_1k / theirs.cpu_s_per_1k:>12.2f}"
        )
    all_met = True
    for clients, column, is_least, bound in goals:
        if (OURS, clients) not in rows:
            continue
        ratio = getattr(rows[OURS, clients], column) / getattr(rows[THEIRS, clients], column)
        is_met = ratio >= bound if is_least else ratio <= bound
        all_met &= is_met
        limit = f"at {'least' if is_least else 'most'} {bound}"
        print(f"goal, {column} of ours to theirs at {clients}: {limit}: {'met' if is_met else 'MISSED'}, {ratio:.2f}")
    return all_met


def main() -> None:
    """Exits with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="with `servers` and `mesh_load.py`, after its `install`")
    parser.add_argument("--levels", default="1,16,64,256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pace", action="store_true", help=f"steps of {STEP_MS} ms instead of as fast as they go")
    args = parser.parse_args()
    client = args.directory / "mesh_load.py"
    if not client.exists():
        print(f"skipped: {client} does not exist, so there is no Dynamo to be measured beside")
        return
    with servers(args.directory, args.pace) as environment:
        targets = ["--targets", f"{OURS},{THEIRS}", "--levels", args.levels, "--repeats", str(args.repeats)]
        done = subprocess.run(
            [sys.executable, str(client), *targets], env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    print(done.stdout, end="")
    sys.exit(not judge(rows_of(done.stdout), PACED_GOALS if args.pace else GOALS))


if __name__ == "__main__":
    main()
