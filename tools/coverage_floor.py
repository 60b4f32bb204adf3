"""The floors of `make coverage`: how much of each module tests must reach, lines and branches together.

    python -m tools.coverage_floor REPORT        REPORT as `coverage json` writes it

In cores tests must reach every branch: these need no process, socket or clock to be tested, so there is no excuse. All
other modules of `mesh`, `kvstore` and `nodes` need `REST_PERCENT`, except those that only a CUDA device reaches
(`ON_DEVICE`). In `cli` only the cores have a floor: `tests/process` runs its commands as users do, and a process that
is killed there reports no coverage.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

REST_PERCENT: Final = 95.0
REST: Final = ("mesh/", "kvstore/", "nodes/")
CORES: Final = {
    "allocator": ("kvstore/cache/allocator.py", "kvstore/cache/block_pool.py", "kvstore/cache/block_table.py"),
    "radix tree": (
        "kvstore/cache/radix_tree.py",
        "kvstore/cache/prefix_cache.py",
        "kvstore/cache/eviction.py",
        "kvstore/hashing.py",
    ),
    "page table": ("kvstore/cache/page_table.py", "kvstore/cache/rebuild.py", "kvstore/layout.py"),
    "transfer session": (
        "kvstore/transfer/session.py",
        "kvstore/transfer/plan.py",
        "kvstore/transfer/paired/pair.py",
        "kvstore/transfer/selection.py",
        "kvstore/transfer/paired/tcp/wire.py",
        "nodes/kv_agent/core.py",
        "kvstore/transfer/puller.py",
    ),
    "store": (
        "kvstore/store/index.py",
        "kvstore/store/chains.py",
        "kvstore/store/free_slots.py",
        "kvstore/store/heads.py",
        "kvstore/store/checksum.py",
    ),
    "memory": (
        "nodes/kv_agent/memory/core.py",
        "nodes/worker/memory/core.py",
    ),
    "ranks": ("nodes/scheduler/worker_link/ranks.py", "nodes/worker/parallel/ranks.py"),
    "leases": (
        "mesh/runtime/deadlines.py",
        "mesh/membership/view.py",
        "mesh/calls/retrier.py",
        "nodes/registry/core.py",
        "nodes/gateway/requests/cancels.py",
    ),
    "links": (
        "mesh/link/core.py",
        "mesh/link/handshake.py",
        "mesh/link/liveness.py",
        "mesh/link/peer.py",
        "mesh/link/refusals.py",
        "mesh/link/backoff.py",
    ),
    "handoff": (
        "nodes/scheduler/core.py",
        "nodes/scheduler/handoff/decode.py",
        "nodes/scheduler/handoff/prefill.py",
        "nodes/scheduler/asks.py",
    ),
    "batch": (
        "nodes/scheduler/queue/admission.py",
        "nodes/scheduler/attempts.py",
        "nodes/scheduler/batch/batching.py",
        "nodes/scheduler/finish/endings.py",
        "nodes/scheduler/batch/growth.py",
        "nodes/scheduler/worker_link/pipeline.py",
        "nodes/scheduler/worker_link/result_check.py",
        "nodes/scheduler/worker_link/worker_deaths.py",
        "nodes/scheduler/queue/policy.py",
        "nodes/scheduler/finish/results.py",
        "nodes/scheduler/batch/running.py",
        "nodes/scheduler/sequence.py",
        "nodes/scheduler/finish/streams.py",
        "nodes/worker/core.py",
    ),
    "calls": (
        "mesh/calls/table.py",
        "mesh/pubsub/topics.py",
        "mesh/wire/header.py",
        "mesh/wire/codec.py",
    ),
    "restarts": ("mesh/supervision/core.py", "cli/plan/topology.py"),
    "requests": (
        "nodes/gateway/requests/core.py",
        "nodes/gateway/requests/log.py",
        "nodes/gateway/requests/outputs.py",
        "nodes/gateway/jobs/fan_out.py",
        "nodes/gateway/jobs/validation.py",
        "nodes/tokenizer/routing/core.py",
        "nodes/tokenizer/routing/cache_index.py",
    ),
    "page": ("nodes/gateway/page/core.py", "mesh/runtime/history.py"),
    "text": (
        "nodes/detokenizer/core.py",
        "nodes/detokenizer/incremental.py",
        "nodes/detokenizer/stop_strings.py",
    ),
}

ON_DEVICE: Final = (
    "nodes/worker/cuda/graphs.py",
    "nodes/worker/cuda/few_rows.py",
    "nodes/worker/cuda/heads.py",
    "nodes/worker/cuda/own_kernels.py",
    "nodes/worker/cuda/load.py",
    "nodes/worker/cuda/memory.py",
    "nodes/worker/pool/device_view.py",
)
"""These have no floor: most of their code runs only on a CUDA device, under `tests/gpu`."""
PARTLY_ON_DEVICE: Final = {"nodes/worker/ops/torch/runner.py": 90.0}
"""The floors of modules that are tested on CPU tensors, except for their events, streams and pinned memory."""


class Reached(NamedTuple):
    """How much of one module tests reached. `percent` is rounded down, so that 100 means everything."""

    percent: float
    missing: str


def read_report(report: dict[str, Any]) -> dict[str, Reached]:
    """Every module of a report by its path."""
    return {path: _reached(entry) for path, entry in report["files"].items()}


def shortfalls(modules: dict[str, Reached]) -> list[str]:
    """One line for each module that is below its floor, or is missing from the report."""
    found: list[str] = []
    cores = {path: subject for subject, paths in CORES.items() for path in paths}
    for path, subject in cores.items():
        if path not in modules:
            found.append(f"{path}: a core ({subject}) that is not in the report: was it moved, or not measured?")
        elif modules[path].percent < 100.0:
            found.append(_line(path, modules[path], f"100 % ({subject})"))
    for path, reached in sorted(modules.items()):
        floor = PARTLY_ON_DEVICE.get(path, REST_PERCENT)
        if path not in (*cores, *ON_DEVICE) and path.startswith(REST) and reached.percent < floor:
            found.append(_line(path, reached, f"{floor:g} %"))
    return found


def main(report: Path) -> int:
    """Print the modules that fall short; returns the exit code."""
    found = shortfalls(read_report(json.loads(report.read_text())))
    for line in found:
        print(line)
    print(f"{len(found)} modules fall short" if found else "every module is above its floor")
    return 1 if found else 0


def _reached(entry: dict[str, Any]) -> Reached:
    summary = entry["summary"]
    wanted = summary["num_statements"] + summary["num_branches"]
    covered = summary["covered_lines"] + summary["covered_branches"]
    lines = [str(line) for line in entry["missing_lines"]]
    branches = [f"{start}->{end if end > 0 else 'exit'}" for start, end in entry["missing_branches"]]
    return Reached(1000 * covered // wanted / 10 if wanted else 100.0, ", ".join(lines + branches))


def _line(path: str, reached: Reached, floor: str) -> str:
    return f"{path}: {reached.percent:g} % of {floor}; not reached: {reached.missing}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
