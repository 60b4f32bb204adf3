"""Vectors per second of an encoder: the worker's runner beside sentence-transformers, which computes the same ones.

All inputs have one length and go through the runner in steps of at most 768 tokens, as `meshctl up` plans them for 512
positions; sentence-transformers gets the texts' ids in batches of 32, its default. The two take turns, so that both
meet the same state of the machine. Means are compared before anything is timed.

    python -m benchmarks.encoders FOLDER [TOKENS [THREADS]]
"""

import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Final

import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import ModelSpec, resolve_model
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.ops.torch.load import HostRunner, load_host_runner
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep

_INPUTS: Final = 32
_BATCH: Final = 32
_STEP_TOKENS: Final = 768
_ROUNDS: Final = 5


def load(model: str, spec: ModelSpec, num_threads: int) -> HostRunner:
    """A runner in float32 over a pool that has room for a step."""
    layout = spec.kv_layout("float32")
    num_pages = 1 + 2 * layout.num_pages_for(_STEP_TOKENS) + _INPUTS
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=num_pages, layout=layout, incarnation=1))
    config = WorkerConfig(group="g", model=model, agent="a", dtype="float32", num_threads=num_threads)
    return load_host_runner(spec, config, pool)


def steps_of(inputs: list[list[int]], page_size: int) -> list[RunnableStep]:
    """Whole inputs, as many in a step as fit."""
    each = max(_STEP_TOKENS // len(inputs[0]), 1)
    steps: list[RunnableStep] = []
    for begin in range(0, len(inputs), each):
        rows, tokens, pages = list[RunnableRow](), array("i"), array("i")
        for index, ids in enumerate(inputs[begin : begin + each]):
            one = OpenSequence(Open(index, index, len(ids), Sampling(), kind="mean"))
            rows.append(RunnableRow(index, one, 0, len(ids), len(tokens), len(pages), draws=0))
            tokens.extend(ids)
            pages.extend(range(1 + len(pages), 1 + len(pages) - (-len(ids) // page_size)))
        steps.append(RunnableStep(len(steps), Rows.of(rows), tokens, pages))
    return steps


def by_runner(runner: HostRunner, steps: list[RunnableStep]) -> torch.Tensor:
    """The mean of each input's states, `[inputs, hidden]`."""
    vectors = [one for step in steps for one in runner.run(step).vectors]
    return torch.stack([torch.frombuffer(bytearray(one), dtype=torch.float32) for one in vectors])


def by_library(model: Any, inputs: list[list[int]]) -> torch.Tensor:
    """The same by the modules that sentence-transformers runs, tokenizing left out."""
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        for begin in range(0, len(inputs), _BATCH):
            ids = torch.tensor(inputs[begin : begin + _BATCH])
            features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            found.append(model[1](model[0](features))["sentence_embedding"])
    return torch.cat(found)


def seconds(work: Any, *arguments: Any) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def main() -> None:
    """Command line: a folder as sentence-transformers writes it, how long inputs are, how many threads compute."""
    # Not among the requirements: only this file needs it.
    from sentence_transformers import SentenceTransformer

    folder = str(Path(sys.argv[1]).expanduser())
    length, num_threads = (int(given) for given in [*sys.argv[2:4], *("128", "2")[len(sys.argv) - 2 :]])
    spec = resolve_model(folder)
    inputs = torch.randint(
        1000, spec.vocab_size, (_INPUTS, length), generator=torch.Generator().manual_seed(1)
    ).tolist()
    model, runner = SentenceTransformer(folder, device="cpu"), load(folder, spec, num_threads)
    steps = steps_of(inputs, 16)
    torch.set_num_threads(num_threads)
    difference = float((by_runner(runner, steps) - by_library(model, inputs)).abs().max())
    own, library = list[float](), list[float]()
    for _ in range(_ROUNDS):
        torch.set_num_threads(1)
        own.append(_INPUTS / seconds(by_runner, runner, steps))
        torch.set_num_threads(num_threads)
        library.append(_INPUTS / seconds(by_library, model, inputs))
    ratio = statistics.median(a / b for a, b in zip(own, library, strict=True))
    print(f"{spec.name}, {length} tokens, {num_threads} threads, {runner.numerics}")
    print(f"means differ by {difference:.1e}")
    print(f"runner {statistics.median(own):.1f} vectors/s, sentence-transformers {statistics.median(library):.1f}")
    print(f"ratio {ratio:.2f} (median of {_ROUNDS} pairs)")


if __name__ == "__main__":
    main()
