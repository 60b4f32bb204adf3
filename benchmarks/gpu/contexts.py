"""Device memory that a mesh takes, and the kv_agent's context's share of it: `python -m benchmarks.gpu.contexts`

One group of one model with a pool of fixed size, made once by the kv_agent and once by the worker (`--pool-in-worker`);
with the latter, the agent does not touch the device as long as nothing is copied. The difference is one CUDA context
and what is loaded into it. The driver is asked for free memory before the start, after a first answer, and after
`meshctl release` with weights dropped, when contexts alone are left. Not yet run on a GPU.
"""

import argparse
import os
import subprocess
import sys
from typing import NamedTuple

from benchmarks.gpu.figures import say
from benchmarks.gpu.served import READY_S, ask
from benchmarks.server import mesh
from cli.supervisor.device_memory import ask_device
from kvstore.pool.device import cuda_ordinal

KINDS = {"pool of the kv_agent": (), "pool of the worker": ("--pool-in-worker",)}
_MIB = 1 << 20


class Taken(NamedTuple):
    """Bytes of the device: while the mesh serves, and while its memory is released."""

    serving: int
    released: int


def measure(args: argparse.Namespace, *options: str) -> Taken:
    """Start a mesh, have it answer once, release its memory."""
    ordinal = cuda_ordinal(args.device)

    def free() -> int:
        return ask_device(ordinal, os.environ).free_bytes

    before = free()
    command = ("--model", args.model, "--device", args.device, "--mixed", "1", "--kv-memory", args.kv_memory, *options)
    with mesh(*command, timeout_s=READY_S) as (port, name):
        ask(port, args.model, [1, 2, 3], 8, temperature=0.0).read()
        serving = before - free()
        release = [sys.executable, "-m", "cli", "release", "--name", name, "--reload-weights"]
        subprocess.run(release, check=True, capture_output=True, timeout=300)
        return Taken(serving, before - free())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--kv-memory", default="2GiB")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    name = f"{args.model.removeprefix('random:')}, pool of {args.kv_memory}"
    taken = {kind: measure(args, *options) for kind, options in KINDS.items()}
    for kind, found in taken.items():
        say(
            f"{name}, {kind}",
            f"{found.serving / _MIB:,.0f} MiB taken",
            f"{found.released / _MIB:,.0f} MiB with its memory released",
        )
    agents, workers = taken.values()
    say(f"{name}, context of the kv_agent", f"{(agents.serving - workers.serving) / _MIB:,.0f} MiB")


if __name__ == "__main__":
    main()
