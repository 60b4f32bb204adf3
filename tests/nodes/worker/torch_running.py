"""Builds runners over pools in memory, and steps from plain lists, for the tests of this folder."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.model_spec import ModelSpec, Quantization, resolve_model
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.executor.runner import HostRunner, load_torch_runner
from nodes.worker.steps.step import RunnableRow, RunnableStep

GREEDY = Sampling(temperature=0.0)


def make_runner(
    model: str | Path,
    dtype: str = "auto",
    num_pages: int = 200,
    page_size: int = 16,
    num_threads: int = 1,
    kernels: str = "auto",
    quantize: Quantization = "none",
    context_length: int = 0,
) -> HostRunner:
    spec: ModelSpec = resolve_model(str(model)).within(context_length).quantized(quantize)
    layout = spec.kv_layout(dtype, page_size)
    pool = HeapHost().create("g", PoolInfo(group="g", num_pages=num_pages, layout=layout, incarnation=1))
    config = WorkerConfig(
        group="g",
        model=str(model),
        agent="a",
        dtype=dtype,
        page_size=page_size,
        num_threads=num_threads,
        kernels=kernels,
    )
    return load_torch_runner(spec, config, pool)


class Row(NamedTuple):
    """Positions `start .. start+len(ids)-1` of a sequence on `pages`."""

    start: int
    ids: Sequence[int]
    pages: Sequence[int]
    sampling: Sampling | None = GREEDY
    prompt: int = 1


def step(*rows: Row) -> RunnableStep:
    tokens, pages, result = array("i"), array("i"), []
    for index, row in enumerate(rows):
        result.append(
            RunnableRow(
                index, row.start, len(row.ids), row.prompt, len(tokens), len(pages), len(row.pages), row.sampling
            )
        )
        tokens.extend(row.ids)
        pages.extend(row.pages)
    return RunnableStep(1, result, tokens, pages)


def logits_by_chunks(
    runner: HostRunner, ids: Sequence[int], pages: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Logits of the last position of each chunk, `[chunks, vocab]`; the sizes add up to all ids."""
    rows, start = [], 0
    for size in sizes:
        rows.append(runner.logits(step(Row(start, ids[start : start + size], pages)))[0])
        start += size
    assert start == len(ids)
    return torch.stack(rows)
