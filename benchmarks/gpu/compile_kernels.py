"""Has FlashInfer compile the kernels that tests and benchmarks use, several at once, so that none waits for them later.

    python -m benchmarks.gpu.compile_kernels

Each process runs one small layer of one shape through every kernel; FlashInfer keeps what it has compiled. Modules that
all shapes share are compiled first, in one parallel build: otherwise the processes would wait for each other there, one
module after the other.
"""

import argparse
import importlib
import subprocess
import sys
import time
from typing import Any

import msgspec

from benchmarks.gpu.figures import say
from nodes.model_spec import resolve_model

# Heads of 64 and of 128; a group of 4 decodes with the prefill kernels, one of 2 with its own. Windows have their own.
MODELS = (
    "random:tiny-qwen3", "random:qwen3-0.6b", "random:qwen3-8b", "random:tiny-mistral", "random:tiny-qwen2-sliding",
)  # fmt: skip


def run_one(model: str, device: str) -> None:
    from kvstore.pool.cuda.pool import CudaHost
    from kvstore.pool.page_pool import HeapHost, PoolInfo
    from nodes.worker.config import WorkerConfig
    from nodes.worker.cuda.load import load_cuda_runner

    spec = msgspec.structs.replace(
        resolve_model(model), num_layers=2, vocab_size=1024, intermediate_size=256, hidden_size=256, dtype="bfloat16"
    )
    info = PoolInfo(group="g", num_pages=9, layout=spec.kv_layout(), incarnation=1, device=device)
    pool = CudaHost(HeapHost()).create("g", info)
    config = WorkerConfig(
        group="g",
        model=model,
        agent="",
        device=device,
        attention="flashinfer",
        cuda_graphs=False,
        max_batch_tokens=64,
    )
    print(load_cuda_runner(spec, config, pool).numerics)
    pool.close()


def compile_shared() -> None:
    """Norms, rotation, pages, joining, activation: modules that depend on no shape, by one parallel build."""
    from nodes.worker.cuda.flashinfer_backend import load_flashinfer

    load_flashinfer()

    def jit(name: str) -> Any:
        return importlib.import_module(f"flashinfer.jit.{name}")

    modules = [getattr(jit(name), f"gen_{name}_module")() for name in ("norm", "rope", "page", "cascade")]
    jit("core").build_jit_specs([*modules, jit("activation").gen_act_and_mul_module("silu")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", help="compile for this one model only, in this process")
    parser.add_argument("--shared", action="store_true", help="compile what all models share, in this process")
    args = parser.parse_args()
    if args.shared:
        compile_shared()
        return
    if args.model:
        run_one(args.model, args.device)
        return
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu.compile_kernels", "--device", args.device]
    if subprocess.run([*command, "--shared"], check=False).returncode:
        # The shapes' processes then compile the same modules, more slowly, and say why if that fails too.
        print("compiling first what all shapes share failed", flush=True)
    children = [subprocess.Popen([*command, "--model", model]) for model in MODELS]
    codes = [child.wait() for child in children]
    if any(codes):
        sys.exit(f"error: not all of {', '.join(MODELS)} succeeded: exit codes {codes}")
    say("kernels of FlashInfer, compiled or found", f"{time.perf_counter() - start:.0f} s", f"{len(MODELS)} shapes")


if __name__ == "__main__":
    main()
