"""Runs every benchmark in turn, each in a process of its own: `python -m benchmarks [NAME...]`."""

import subprocess
import sys
import time

BENCHMARKS = (
    "mesh_calls", "encryption", "kv_transfer", "tcp_transfer", "cores", "pages", "rebuild", "detokenizer", "linears",
    "worker_steps", "long_prompts", "row_pass", "ask_steps", "prompt_reads", "idle", "ring", "records", "spans",
    "fairness", "engine", "in_process", "recovery", "around", "parsers",
)  # fmt: skip


def main() -> None:
    """Command line: names, or nothing for all. Exit status 1 if one of them failed."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed: list[str] = []
    for name in names:
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            failed.append(name)
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
