"""Where the time of a long prompt's prefill goes on the CPU, beside the peak of multiply-adds: no mesh, one process.

Chunks of a prompt are computed by the native kernels one operation at a time, and their times added up by kind:
products (linear layers and head), attention, the rest. The time of a chunk does not depend on what lies in the pages
before it, so only each fourth is computed, from the last one back (`--every`). The peak is a loop of nothing but
multiply-adds, taken before each turn of a chunk, so that other work on the machine slows both; with one thread the time
is that thread's CPU time.

    python -m benchmarks.long_prompts [--model random:qwen2.5-0.5b] [--tokens 1000,3000,6000] [--chunk 256]
                                      [--kernels auto] [--threads 1] [--against CHECKOUT]

`--against` compiles another checkout's kernels, and computes the same chunks with them in turns. The weights are random
numbers in the model's shape. Whether the hidden states that chunks leave in the pages have equal bits is printed, too.
"""

import argparse
import ctypes
import hashlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from kvstore.layout import KVLayout
from nodes.model_spec import ModelSpec, resolve_model
from nodes.model_spec.weight_index import expected_shapes
from nodes.models.registry import model_of
from nodes.worker.environment import prepare_environment
from nodes.worker.ops.native.builds import Library, choose_library, load_build
from nodes.worker.ops.native.program import ATTEND, GATED, HEAD, PRODUCT, WRITE, Operation
from nodes.worker.ops.native.sources import BUILDS, DIRECTORY, FLAGS, sources_digest
from nodes.worker.ops.native.steps import Columns, NativeSteps
from nodes.worker.ops.native.weights import pack_weights
from nodes.worker.pool.view import TORCH_DTYPES, PoolView
from nodes.worker.weights.part_weights import PartWeights
from nodes.worker.weights.random_weights import RandomWeights

PAGE_SIZE: Final = 16
KINDS: Final = {PRODUCT: "products", GATED: "products", HEAD: "products", ATTEND: "attention", WRITE: "attention"}
REST: Final = "rest"
Seconds: TypeAlias = defaultdict[str, float]
"""By kind."""
PEAK_STEPS: Final = 2_000_000
"""About 20 ms: shorter than a time slice, so that some of the loops run undisturbed."""


class OneByOne:
    """The functions of a library; `kvmesh_step` computes one operation at a time, and notes how long each takes.

    A worker computes them all in one call; what the calls add is 1 to 2 us each, of some 100 us at least for 256 rows.
    """

    def __init__(self, functions: Any, clock: Callable[[], float]) -> None:
        self._functions, self._clock = functions, clock
        self.seconds: Seconds = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def kvmesh_step(self, program: Any, step: Any, first: int, last: int) -> None:
        """As the library's."""
        # The program's first field.
        at = ctypes.cast(program, ctypes.POINTER(ctypes.c_void_p))[0]
        operations = ctypes.cast(at, ctypes.POINTER(Operation))
        for number in range(first, last):
            start = self._clock()
            self._functions.kvmesh_step(program, step, number, number + 1)
            self.seconds[KINDS.get(operations[number].kind, REST)] += self._clock() - start


class Peak:
    """The loops of multiply-adds of one build, in as many threads as compute."""

    def __init__(self, name: str, num_threads: int, clock: Callable[[], float], folder: Path) -> None:
        path = folder / f"{name}_peak.so"
        source = Path(__file__).with_name("multiply_adds.cpp")
        compile_shared(source, name, path, f"-I{DIRECTORY}", "-fvisibility=default", "-Wno-unused-function")
        library = ctypes.CDLL(str(path))
        self._loops = [library.multiply_adds, library.multiply_add_pairs]
        for loop in self._loops:
            loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._num_threads, self._clock = num_threads, clock

    def gflops(self) -> float:
        """Of all threads together, in 1e9 operations a second, by the faster instruction.

        That is not always the one that the build multiplies weights with: some CPUs take four times as long for one of
        bfloat16 pairs as for one of float32.
        """
        return max(map(self._gflops, self._loops))

    def _gflops(self, loop: Any) -> float:
        done: list[int] = []

        def run() -> None:
            done.append(loop((ctypes.c_float * 16)(), PEAK_STEPS))

        others = [threading.Thread(target=run) for _ in range(self._num_threads - 1)]
        start = self._clock()
        for one in others:
            one.start()
        run()
        for one in others:
            one.join()
        return sum(done) / (self._clock() - start) / 1e9


class Prompt(NamedTuple):
    """Chunks of a prompt that are computed, by where they begin and end; each stands for `weight` of the prompt."""

    num_tokens: int
    chunks: list[tuple[int, int]]
    weight: float


class Computed:
    """A model's prefill with one library."""

    def __init__(
        self, name: str, library: Library, spec: ModelSpec, layout: KVLayout, most: int, clock: Callable[[], float]
    ) -> None:
        self.name, self.one_by_one = name, OneByOne(library.functions, clock)
        model, dtype = model_of(spec), TORCH_DTYPES[layout.dtype]
        timed = Library(library.name, self.one_by_one)
        self._weights = pack_weights(model, PartWeights(model, RandomWeights(spec, dtype), spec.shard()), timed)
        num_pages = 1 + layout.num_pages_for(most)
        self._pool = PoolView(bytearray(num_pages * layout.page_bytes), layout)
        # Other numbers than zero, so that weights of positions differ.
        self._pool.pages.normal_(generator=torch.Generator().manual_seed(1))
        self._steps = NativeSteps(spec, timed, self._weights, model, self._pool)
        self._pages = array("i", range(1, num_pages))
        self.digest = hashlib.blake2b(digest_size=8)

    def seconds(self, begin: int, end: int) -> Seconds:
        """By kind."""
        self.one_by_one.seconds = defaultdict(float)
        ids = array("i", (300 + position % 1000 for position in range(begin, end)))
        columns = Columns(ids, array("i", (begin, end - begin, 0, 0)), self._pages, array("i", [end - begin - 1]))
        _, logits = self._steps.run(columns)
        assert logits is not None
        self.digest.update(logits.numpy().tobytes())
        return self.one_by_one.seconds


def compile_shared(source: Path, name: str, path: Path, *flags: str) -> None:
    """Compiles one source as build `name` is compiled."""
    command = ["g++", *FLAGS, *BUILDS[name].flags, *flags, "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)


def libraries(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Library]]:
    """The builds to compare, with what they are called."""
    for wanted in args.kernels.split(","):
        found = choose_library(wanted)
        if found.build is None:
            sys.exit(found.note or "there are no native kernels for this CPU, and they are what this measures")
        yield found.build.name, found.build
        if args.against:
            path = folder / f"{found.build.name}_against.so"
            source = Path(args.against) / DIRECTORY.relative_to(Path(__file__).parents[1]) / "kernels.cpp"
            # Called like this checkout's, whose interface it must have.
            compile_shared(source, found.build.name, path, f'-DKVMESH_SOURCES="{sources_digest()}"')
            yield f"{found.build.name}, before", load_build(found.build.name, path)


def operations(spec: ModelSpec, begin: int, end: int) -> Counter[str]:
    """Multiplications and additions of a chunk whose last token is drawn: two for each weight and each number of KV."""
    shapes = {name: shape for name, shape in expected_shapes(spec).items() if len(shape) == 2}
    table = shapes.pop("model.embed_tokens.weight")
    head = shapes.pop("lm_head.weight", table)
    seen = (end * (end + 1) - begin * (begin + 1)) // 2
    weights = sum(rows * columns for rows, columns in shapes.values())
    products = 2 * (weights * (end - begin) + head[0] * head[1])
    return Counter(products=products, attention=4 * seen * spec.num_heads * spec.head_dim * spec.num_layers)


def prompt_of(num_tokens: int, chunk: int, every: int) -> Prompt:
    """The last chunk, and every so many before it."""
    begins = list(range(0, num_tokens, chunk))[::-1][::every]
    chunks = [(begin, min(begin + chunk, num_tokens)) for begin in begins]
    return Prompt(num_tokens, chunks, num_tokens / sum(end - begin for begin, end in chunks))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", default="1000,3000,6000")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--every", type=int, default=4, help="compute every so manieth chunk of a prompt")
    parser.add_argument("--kernels", default="auto", help="builds to compare, in turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="the least time of so many turns counts")
    parser.add_argument("--against", default="", help="another checkout, whose kernels are compared")
    args = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(1)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    spec = resolve_model(args.model)
    layout = spec.kv_layout(args.dtype, PAGE_SIZE)
    prompts = [prompt_of(int(text), args.chunk, args.every) for text in args.tokens.split(",")]
    most = max(prompt.num_tokens for prompt in prompts)
    with tempfile.TemporaryDirectory() as folder:
        found = list(libraries(args, Path(folder)))
        computed = [Computed(name, library, spec, layout, most, clock) for name, library in found]
        peaks = {library.name: Peak(library.name, args.threads, clock, Path(folder)) for _, library in found}
        for one in computed:
            one.one_by_one.kvmesh_set_threads(args.threads)
        print(f"{spec.name}, {layout.dtype}, {args.threads} threads, chunks of {args.chunk}")
        for prompt in prompts:
            compare(computed, [peaks[library.name] for _, library in found], spec, prompt, args.rounds)
    for one in computed:
        print(f"bits of {one.name}: {one.digest.hexdigest()}")


def compare(computed: list[Computed], peaks: list[Peak], spec: ModelSpec, prompt: Prompt, rounds: int) -> None:
    """Computes a prompt's chunks with each of `computed`, in turns, and prints a line for each."""
    total: list[Seconds] = [defaultdict(float) for _ in computed]
    reached: dict[Peak, list[float]] = {peak: [] for peak in peaks}
    needed: Counter[str] = Counter()
    for begin, end in prompt.chunks:
        needed += operations(spec, begin, end)
        turns: list[list[Seconds]] = [[] for _ in computed]
        for turn in range(rounds):
            for peak in reached:
                reached[peak].append(peak.gflops())
            # Forth and back: whoever came first after the peak's loops was 1 to 4 % slower.
            for one, own in list(zip(computed, turns, strict=True))[:: -1 if turn % 2 else 1]:
                own.append(one.seconds(begin, end))
        for own, sums in zip(turns, total, strict=True):
            for kind in own[0]:
                sums[kind] += min(turn[kind] for turn in own)
    for one, peak, sums in zip(computed, peaks, total, strict=True):
        report(one.name, prompt, sums, needed, max(reached[peak]), statistics.median(reached[peak]))


def report(name: str, prompt: Prompt, seconds: Seconds, needed: Counter[str], gflops: float, middle: float) -> None:
    """One line: the whole prompt, and each kind's time, share of the time, and share of the peak."""
    whole = sum(seconds.values())
    share = sum(needed.values()) / whole / gflops / 1e9
    kinds = [
        f"{kind} {seconds[kind] * prompt.weight:.2f} s ({seconds[kind] / whole:.0%}"
        + (f", {needed[kind] / seconds[kind] / gflops / 1e9:.0%} of peak)" if needed[kind] else ")")
        for kind in ("products", "attention", REST)
    ]
    print(
        f"{prompt.num_tokens:6,} tokens, {name:20} {whole * prompt.weight:6.2f} s, {share:.0%} of the peak of"
        f" {gflops:.0f} GFLOP/s (median {middle:.0f}): {', '.join(kinds)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
