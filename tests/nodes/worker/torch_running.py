"""Builds runners over pools in memory, and steps from plain lists, for the tests of this folder."""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from kvstore.pool.page_pool import HeapHost, PoolInfo
from nodes.asks import Ask, DrawnModel, Editor, RowEdits, RowReads, asked, open_asks
from nodes.model_spec import ModelSpec, Quantization, resolve_model
from nodes.models.pooling import Pooling
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.config import WorkerConfig
from nodes.worker.draw.sampler import Draw
from nodes.worker.ops.torch.load import HostRunner, load_host_runner
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableRow, RunnableStep

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
    pooling: Pooling | None = None,
) -> HostRunner:
    spec: ModelSpec = resolve_model(str(model)).within(context_length).quantized(quantize)
    spec = spec if pooling is None else msgspec.structs.replace(spec, pooling=pooling)
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
    return load_host_runner(spec, config, pool)


class Row(NamedTuple):
    """Positions `start .. start+len(ids)-1` of a sequence on `pages`."""

    start: int
    ids: Sequence[int]
    pages: Sequence[int]
    sampling: Sampling | None = GREEDY
    prompt: int = 1


def step(*rows: Row) -> RunnableStep:
    """Rows of sequences of their own, numbered as they come."""
    tokens, pages, result = array("i"), array("i"), []
    for index, row in enumerate(rows):
        one, draws = sequence_of(row.sampling or GREEDY, row.prompt), int(row.sampling is not None)
        result.append(RunnableRow(index, one, row.start, len(row.ids), len(tokens), len(pages), draws))
        tokens.extend(row.ids)
        pages.extend(row.pages)
    return RunnableStep(1, Rows.of(result), tokens, pages)


def asking(*asks: Ask, **fields: Any) -> Sampling:
    """Sampling that asks this of its draws."""
    return Sampling(asks=asked(asks), **fields)


def sequence_of(
    sampling: Sampling, num_prompt: int = 1, *editors: Editor, reads: RowReads | None = None
) -> OpenSequence:
    opened = open_asks(sampling.asks, DrawnModel(1 << 16))
    return OpenSequence(Open(0, 1, num_prompt, sampling), (*opened.editors, *editors), reads or opened.reads)


def drawing_of(sampling: Sampling, position: int, history: Sequence[int] = ()) -> Draw:
    """How a row draws whose sampling is all that changes its logits."""
    edits = RowEdits()
    for editor in open_asks(sampling.asks, DrawnModel(1 << 16)).editors:
        editor.edit(array("i", history), position, edits)
    is_any = any(getattr(edits, field) for field in RowEdits.__slots__)
    return Draw(sampling, position, edits if is_any else None)


def with_rows(plan: RunnableStep, rows: Iterable[RunnableRow]) -> RunnableStep:
    return plan._replace(rows=Rows.of([*rows]))


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
