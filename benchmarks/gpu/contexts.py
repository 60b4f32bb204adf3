"""What processes take of a device's memory besides weights and pools: contexts, libraries, workspaces, graphs.

    python -m benchmarks.gpu.contexts [--models random:qwen3-0.6b,random:qwen3-8b]

`cli/plan/devices.py` plans pools with these numbers. A kv_agent is played by a process with a pool, a stream and its
kernel for scattered pages; a worker by one with a runner as in a worker, after steps that decode, draw and prefill.
Memory is what the driver counts as free, before and while the process lives: nothing else may use the device.
"""

import argparse
import subprocess
import sys

from benchmarks.gpu.figures import say

MIB = 1 << 20


def be_agent(device: str) -> None:
    from kvstore.pool.cuda.memory import load_cupy_memory
    from kvstore.pool.device import cuda_ordinal

    memory, ordinal = load_cupy_memory(), cuda_ordinal(device)
    pointer = memory.allocate(ordinal, 2 * MIB)
    memory.stream(ordinal, gathers=True).gather([(0, MIB, 64)], pointer, pointer).wait()
    print("2097152 0 0", flush=True)
    sys.stdin.read()


def be_worker(model: str, device: str) -> None:
    import torch

    from benchmarks.gpu.loaded import SAMPLED, decode_steps, load, prefill_steps, run_ahead
    from nodes.worker.cuda.buckets import MAX_BUCKET
    from nodes.worker.pool.device_memory import activation_bytes, weight_bytes

    rows = 4096
    loaded = load(model, 64, rows, device)
    for steps in (decode_steps(loaded.layout, 1, 16, 8, SAMPLED), prefill_steps(loaded.layout, 40, rows)):
        for _ in run_ahead(loaded.runner, steps):
            pass
    # What torch keeps of steps that have ended is not what the next one needs.
    torch.cuda.empty_cache()
    dtype = loaded.layout.dtype
    bound = activation_bytes(loaded.spec, dtype, rows, MAX_BUCKET)
    print(loaded.pool.info.pages_bytes, weight_bytes(loaded.spec, dtype), bound, flush=True)
    sys.stdin.read()


def taken_by(device: str, role: str) -> tuple[int, list[int]]:
    """Bytes that a process takes, and what it says of its pool, its weights and the bound on its activations."""
    import torch

    def free() -> int:
        return torch.cuda.mem_get_info(device)[0]

    before = free()
    words = [sys.executable, "-m", "benchmarks.gpu.contexts", "--device", device, "--role", role]
    # A process of its own, asked while it lives: what it takes is given back when it ends.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(number) for number in process.stdout.readline().split()]
        if not said:
            sys.exit(f"error: {role} ended early")
        return before - free(), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="random:qwen3-0.6b,random:qwen3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--role", help="run as this process: `agent`, or a model")
    args = parser.parse_args()
    if args.role:
        be_agent(args.device) if args.role == "agent" else be_worker(args.role, args.device)
        return
    taken, (pool, *_) = taken_by(args.device, "agent")
    say("a kv_agent beside its pool", f"{(taken - pool) // MIB} MiB")
    for model in args.models.split(","):
        taken, (pool, weights, bound) = taken_by(args.device, model)
        left = taken - pool - weights
        say(
            f"a worker of {model.removeprefix('random:')} beside weights and pool", f"{left // MIB} MiB",
            f"of which activations take at most {bound // MIB} MiB",
        )  # fmt: skip


if __name__ == "__main__":
    main()
