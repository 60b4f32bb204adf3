"""How long hashing a model's weights takes, beside loading it, and beside reading the same bytes.

The files of a preset are written once, with random numbers; a folder is taken as it is. In turn, `--rounds` times: all
bytes are read by as many threads as hash them (the limit: no hash is done before its bytes are read), hashed, found in
the cache of hashes, and loaded as a worker loads them. They are in memory by then; `--cold` has the system forget them
before reading and before hashing. Seconds of wall and of CPU: where others compute, too, the second says more.

    python -m benchmarks.weights [MODEL] [--rounds N] [--threads N] [--cold]
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import ModelSpec, describe_model, file_hash, hash_cache
from nodes.model_spec.fingerprint import WeightsReader, files_of
from nodes.worker.config import WorkerConfig
from nodes.worker.environment import prepare_environment

_PIECE: Final = 8 << 20
_PAGES: Final = 32


def main() -> None:
    """Print one line for each kind of work: median seconds, GB a second, and its share of a load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:qwen2.5-0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that a load packs weights with")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from memory")
    args = parser.parse_args()
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="kvmesh-weights-") as folder:
        use_own_cache(Path(folder))
        spec = with_files(describe_model(args.model), Path(folder))
        files = files_of(spec)
        num_bytes = sum(Path(file).stat().st_size for file in files)
        print(f"{spec.name}, {num_bytes / 1e9:.2f} GB in {len(files)} files, {len(os.sched_getaffinity(0))} cores")
        hashed = WeightsReader().read(spec)
        work: dict[str, Callable[[], object]] = {
            "read (the limit)": partial(read_all, files),
            "hash": partial(hash_all, files),
            "find in the cache": partial(find, spec),
            "load": loader(hashed, args.model, args.threads),
        }
        found = {name: list[tuple[float, float]]() for name in work}
        for _ in range(args.rounds):
            for name, do in work.items():
                if args.cold and name != "load":
                    forget(files)
                found[name].append(timed(do))
        load_s, load_cpu = (statistics.median(column) for column in zip(*found["load"], strict=True))
        for name, times in found.items():
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            speed = f"{num_bytes / wall / 1e9:5.2f} GB/s" if name != "find in the cache" else " " * 10
            shares = f"{wall / load_s:6.1%} of a load, {cpu / load_cpu:6.1%} of its CPU"
            print(f"  {name:18} {wall:7.4f} s (best {min(times)[0]:.4f})  CPU {cpu:7.4f} s  {speed}  {shares}")


def use_own_cache(folder: Path) -> None:
    """The user's is left alone, and files count as old enough to be kept."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    now_ns = time.time_ns
    file_hash.time.time_ns = lambda: now_ns() + int(2e9 * hash_cache.KEPT_S)


def with_files(spec: ModelSpec, folder: Path) -> ModelSpec:
    """`spec`, with what it draws written into a file if it has none."""
    if spec.source == "directory":
        return spec
    import torch
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  (bare path types)

    from nodes.models.registry import parameters
    from nodes.worker.weights.random_weights import RandomWeights

    drawn = RandomWeights(spec, getattr(torch, spec.dtype))
    file = folder / "model.safetensors"
    save_file({name: drawn.tensor(name) for name in parameters(spec)}, file, {"format": "pt"})
    return msgspec.structs.replace(spec, source="directory", weight_files=(str(file),))


def read_all(files: tuple[str, ...]) -> None:
    """Each byte once, as they are hashed."""

    def read(descriptor: int, begin: int) -> None:
        buffer = memoryview(bytearray(1 << 18))
        for at in range(begin, begin + _PIECE, len(buffer)):
            os.preadv(descriptor, [buffer], at)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for path in files:
            with open(path, "rb") as file:
                list(threads.map(partial(read, file.fileno()), range(0, os.fstat(file.fileno()).st_size, _PIECE)))


def hash_all(files: tuple[str, ...]) -> None:
    with file_hash.FileHasher() as hasher:
        for file in files:
            hasher.hash(file)


def find(spec: ModelSpec) -> None:
    """As another process does, which has read nothing yet."""
    hash_cache.forget_hashes()
    WeightsReader().read(spec)


def loader(spec: ModelSpec, model: str, num_threads: int) -> Callable[[], object]:
    """Loads as a worker does, once it has its pool; what it has loaded is dropped."""
    from nodes.worker.executor.runners import make_runner

    layout = spec.kv_layout()
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=_PAGES, layout=layout, incarnation=1))
    config = WorkerConfig(group="g", model=model, agent="a", num_threads=num_threads)
    make_runner(spec, config, pool)
    return lambda: make_runner(spec, config, pool).numerics


def forget(files: tuple[str, ...]) -> None:
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(do: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall and of CPU."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    began, used = time.perf_counter(), cpu()
    do()
    return time.perf_counter() - began, cpu() - used


if __name__ == "__main__":
    main()
