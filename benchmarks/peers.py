"""Comparison with other servers: hands this mesh to the `compare` program of a peers folder.

`make bench-peers BENCH_PEERS=DIR ARGS='--model MODEL_DIR'`. The folder's `compare` starts both servers, measures them
in turns on the same prompts and prints ratios; its own README says in which respects the comparison is like for like.
"""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="folder with `compare`")
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face directory that all servers load")
    parser.add_argument("--peers", default="vllm")
    parser.add_argument("--mesh-options", default="--mixed 1 --context-length 1024 --max-running 16")
    args, rest = parser.parse_known_args()
    program = args.directory / "compare"
    if not program.exists():
        parser.error(f"{program} does not exist: set BENCH_PEERS to the folder of the comparison harness")
    command = f"{sys.executable} -m cli up --model {{model}} --port {{port}} --name bench-peers {args.mesh_options}"
    arguments = ["--command", command, "--model", str(args.model), "--model-name", args.model.name]
    sys.exit(subprocess.run([str(program), *arguments, "--peers", args.peers, *rest]).returncode)


if __name__ == "__main__":
    main()
