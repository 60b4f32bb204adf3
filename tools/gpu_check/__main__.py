"""Runs tests and benchmarks on a CUDA host that has no network, and prints one table.

    python3 -m tools.gpu_check [--wheels DIR] [--minutes 8] [--only NAME,…] [--out DIR]

Run it from a plain checkout, with the host's own python3 that has torch and CuPy; the tool itself needs only the
standard library. `--wheels` is a folder of wheels that the host lacks (`--list` says what is missing): they are
unpacked into a folder of their own, not installed, and stay there for the next run, because FlashInfer compiles again
if its place changes. Each step is a process group of its own that is killed when its time is over, so the whole run
ends in time; steps that were not begun are listed. `--only` takes names of steps or beginnings of them. `--out` gets
the table, the same as JSON, and an archive of every step's output; the last lines of a failed step are printed too. The
exit code is 0 only if every step ran and passed.
"""

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.figures import Figure, figures_in
from tools.gpu_check import host, report
from tools.gpu_check.plan import FAILED, NOT_REACHED, Outcome, Step, UnknownStep, choose, exit_code, state_of, time_for

ROOT = Path(__file__).resolve().parents[2]
_TOLD_LINES = 25
_RESERVE_S = 10.0
"""Time kept for killing a step that hangs, and for the table."""


class Check:
    """One run of the tool."""

    def __init__(
        self, steps: list[Step], variables: dict[str, str], logs: Path, ends_at: float, has_timeout: bool
    ) -> None:
        self._steps = steps
        self._variables = variables
        self._logs = logs
        self._ends_at = ends_at
        self._options = host.pytest_options(has_timeout)
        self.outcomes: list[Outcome] = []
        self.figures: dict[str, list[Figure]] = {}

    def run(self) -> None:
        """Run every step in turn."""
        for step in self._steps:
            outcome = self._run(step)
            self.outcomes.append(outcome)
            print(f"{outcome.state:>11}  {outcome.name}  {outcome.seconds:.0f} s  {outcome.detail}", flush=True)
            if outcome.state == FAILED and (log := self._logs / f"{step.name}.log").exists():
                print("\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-_TOLD_LINES:]))

    def _run(self, step: Step) -> Outcome:
        limit_s = time_for(step, self._ends_at - time.monotonic())
        if limit_s is None:
            return Outcome(step.name, NOT_REACHED, 0.0, "no time was left")
        arguments = [*step.arguments, *(self._options if "pytest" in step.arguments else [])]
        log = self._logs / f"{step.name}.log"
        start = time.monotonic()
        try:
            code = host.run(arguments, ROOT, self._variables, log, limit_s)
        except OSError as error:
            return Outcome(step.name, FAILED, 0.0, f"it could not be started: {error}")
        output = log.read_text(errors="replace")
        self.figures[step.name] = figures_in(output)
        for figure in self.figures[step.name]:
            print(f"             {figure.name}: {figure.value}  {figure.beside}", flush=True)
        return Outcome(step.name, *_timed(state_of(code, output), time.monotonic() - start))


def _timed(state: tuple[str, str], seconds: float) -> tuple[str, float, str]:
    return state[0], seconds, state[1]


def main() -> int:
    """Command line."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this host lacks")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit for the whole run, in minutes")
    parser.add_argument("--only", default="", help="comma-separated step names or prefixes")
    parser.add_argument("--out", type=Path, help="folder for the table, JSON and outputs")
    parser.add_argument("--list", action="store_true", help="list the steps and which would run, then exit")
    args = parser.parse_args()
    try:
        steps = choose([name for name in args.only.split(",") if name])
    except UnknownStep as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        site = None
        if args.wheels is not None:
            site = host.site_for(args.wheels)
            problem = host.install_wheels(args.wheels, site)
            if problem:
                parser.error(problem)
        variables = host.environment(ROOT, site, os.environ)
        versions = host.versions(variables["PYTHONPATH"])
        if args.list:
            print(report.text(versions, [Outcome(step.name, NOT_REACHED) for step in steps], {}, 0.0))
            return 0
        out, logs = args.out or Path(scratch), Path(scratch) / "logs"
        out.mkdir(parents=True, exist_ok=True)
        logs.mkdir()
        missing = [name for name, version in versions.items() if version == "missing"]
        print(f"missing: {', '.join(missing) or 'nothing'}", flush=True)
        ends_at = start + args.minutes * 60 - _RESERVE_S
        check = Check(steps, variables, logs, ends_at, versions["pytest-timeout"] != "not there")
        check.run()
        taken_s = time.monotonic() - start
        text = report.text(versions, check.outcomes, check.figures, taken_s)
        print(f"\n{text}", flush=True)
        (out / "table.txt").write_text(f"{text}\n")
        found = report.document(versions, check.outcomes, check.figures, taken_s)
        (out / "results.json").write_text(json.dumps(found, indent=1))
        with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
            archive.add(logs, "logs")
        return exit_code(check.outcomes)


if __name__ == "__main__":
    sys.exit(main())
