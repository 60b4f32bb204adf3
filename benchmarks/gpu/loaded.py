"""A runner as in a worker, over a pool in device memory, and steps for it; no mesh, one process.

With `device="cpu"` the same runner computes on the host with plain torch: that tests the benchmark, not the speed.
"""

import gc
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.layout import KVLayout
from kvstore.pool.cuda.pool import CudaHost
from kvstore.pool.page_pool import HeapHost, PagePool, PoolInfo
from nodes.model_spec import ModelSpec, resolve_model
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import PipelinedRunner, Rows, RunnableStep

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.6, seed=7)


@dataclass
class Loaded:
    """A model that is ready to run steps over `pool`."""

    spec: ModelSpec
    layout: KVLayout
    pool: PagePool
    runner: PipelinedRunner


def load(model: str, num_tokens: int, max_batch_tokens: int, device: str, **options: object) -> Loaded:
    """Load `model` with room for `num_tokens` of KV; `options` are fields of WorkerConfig."""
    spec = resolve_model(model)
    layout = spec.kv_layout()
    info = PoolInfo(group="bench", num_pages=1 + layout.num_pages_for(num_tokens), layout=layout, incarnation=1)
    config = WorkerConfig(
        group="bench", model=model, agent="", max_batch_tokens=max_batch_tokens, device=device, mem_fraction=0.97,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    if device == "cpu":
        from nodes.worker.cuda.load import build_runner
        from nodes.worker.pool.view import PoolView

        pool = HeapHost().create("bench", info)
        return Loaded(spec, layout, pool, build_runner(spec, config, PoolView(pool.pages_view, layout))[0])
    import msgspec

    from nodes.worker.cuda.load import load_cuda_runner

    pool = CudaHost(HeapHost()).create("bench", msgspec.structs.replace(info, device=device))
    return Loaded(spec, layout, pool, load_cuda_runner(spec, config, pool))


def unload(loaded: Loaded) -> None:
    """Give all memory back, even if somebody still holds `loaded`."""
    loaded.runner.synchronize()
    del loaded.runner
    gc.collect()
    loaded.pool.close()
    if loaded.pool.info.device != "cpu":
        import torch

        torch.cuda.empty_cache()


def decode_steps(layout: KVLayout, batch: int, context: int, num_steps: int, sampling: Sampling) -> list[RunnableStep]:
    """`num_steps` steps of one row for each of `batch` sequences, around position `context`.

    Each step takes its input from the one before, as sent by a scheduler that runs ahead; the first has its own.
    """
    first = max(0, context - num_steps // 2)
    pages_each = layout.num_pages_for(first + num_steps)
    page_ids = array("i", range(1, 1 + batch * pages_each))
    steps: list[RunnableStep] = []
    one = OpenSequence(Open(0, 0, first, sampling))
    for number in range(num_steps):
        tokens = array("i", [-1 if number else 100 + i % 900 for i in range(batch)])
        offsets, page_offsets = range(batch), [i * pages_each for i in range(batch)]
        rows = Rows([one] * batch, [first + number] * batch, [1] * batch, offsets, page_offsets)
        rows.sources = list(offsets) if number else rows.sources
        steps.append(RunnableStep(1 + number, rows, tokens, page_ids))
    return steps


def prefill_steps(layout: KVLayout, num_tokens: int, chunk: int) -> list[RunnableStep]:
    """One prompt in chunks; the last chunk draws a token."""
    num_pages = layout.num_pages_for(num_tokens)
    steps: list[RunnableStep] = []
    for start in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - start)
        one = OpenSequence(Open(0, 0, num_tokens, GREEDY))
        rows = Rows([one], [start], [count], [0], [0], draws=[int(start + count == num_tokens)])
        tokens = array("i", [100 + (start + i) % 900 for i in range(count)])
        steps.append(RunnableStep(1 + len(steps), rows, tokens, array("i", range(1, 1 + num_pages))))
    return steps


def run_ahead(runner: PipelinedRunner, steps: list[RunnableStep]) -> Iterator[None]:
    """Run the steps as a worker does, each launched while the one before runs; yields after each that has ended."""
    before = None
    for step in steps:
        launched = runner.launch(step)
        if before is not None:
            runner.finish(before)
            yield
        before = launched
    if before is not None:
        runner.finish(before)
        yield
