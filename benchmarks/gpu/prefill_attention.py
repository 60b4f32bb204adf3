"""Attention of a chunk over its pages in one call, or in two parts that are joined: which is cheaper, and where.

    python -m benchmarks.gpu.prefill_attention

Attention alone, including planning and the writing of pages, through all layers of the shape: the two choices of the
worker's setting `prefill_attention`. Both write and read the same pages. With `--device cpu` plain torch stands in for
both, which tests the benchmark, not the speed. Not yet run on a GPU.
"""

import argparse
import time
from array import array
from typing import Any

from benchmarks.gpu.figures import say
from nodes.model_spec import ModelSpec, resolve_model
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep

SHAPES = ((256, 0), (256, 4096), (2048, 0), (2048, 2048), (2048, 16_384))
"""New tokens, and cached ones before them."""
REPEATS = 10


def chunk_step(new: int, cached: int, num_sequences: int, page_size: int) -> RunnableStep:
    """One chunk of `new` tokens for each sequence, after `cached` ones."""
    num_pages = -(-(new + cached) // page_size)
    one = OpenSequence(Open(0, 0, cached + new, Sampling()))
    offsets, page_offsets = ([i * size for i in range(num_sequences)] for size in (new, num_pages))
    rows = Rows(
        [one] * num_sequences, [cached] * num_sequences, [new] * num_sequences, offsets, page_offsets,
        draws=[0] * num_sequences,
    )  # fmt: skip
    tokens = array("i", [0] * (new * num_sequences))
    return RunnableStep(1, rows, tokens, array("i", range(1, 1 + num_pages * num_sequences)))


def backend(spec: ModelSpec, view: Any, num_rows: int, *, merged: bool) -> Any:
    """The worker's attention on a device, plain torch on the CPU."""
    from nodes.worker.cuda.flashinfer_backend import FlashInferAttention, load_flashinfer
    from nodes.worker.ops.torch.attention import TorchAttention

    if view.pages.device.type == "cpu":
        return TorchAttention(view, spec.num_heads, merged=merged)
    return FlashInferAttention(load_flashinfer(), view, spec.num_heads, num_rows, deterministic=False, merged=merged)


def seconds_of(attention: Any, spec: ModelSpec, view: Any, step: RunnableStep, repeats: int) -> float:
    """Seconds of one step's attention through all layers, the best of `repeats`."""
    import torch

    from nodes.worker.ops.torch.batch import host_batch, pack, pinned, unpack

    device = view.pages.device
    batch = host_batch(step, view.layout.page_size)
    packed = pinned(pack(batch), device).to(device)
    arrays = unpack(packed, batch.num_rows, len(batch.sampled))
    shape = (batch.num_rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    joint = torch.randn(shape, device=device).to(view.pages.dtype)
    q, k, v = torch.split(joint, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        attention.plan(batch, arrays)
        for layer in range(spec.num_layers):
            attention.attend(layer, q, k, v)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def pool_of(spec: ModelSpec, num_tokens: int, device: str) -> tuple[Any, Any]:
    """A pool with room for `num_tokens`, and its view: all zeros, which are fine for every kernel."""
    from kvstore.pool.cuda.pool import CudaHost
    from kvstore.pool.page_pool import HeapHost, PoolInfo
    from nodes.worker.pool.device_view import view_device_pages
    from nodes.worker.pool.view import PoolView

    layout = spec.kv_layout()
    num_pages = 1 + layout.num_pages_for(num_tokens)
    info = PoolInfo(group="bench", num_pages=num_pages, layout=layout, incarnation=1, device=device)
    if device == "cpu":
        pool = HeapHost().create("bench", info)
        return pool, PoolView(pool.pages_view, layout)
    pool = CudaHost(HeapHost()).create("bench", info)
    view = view_device_pages(pool.device_pages, layout)
    view.pages.zero_()
    return pool, view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", default=",".join(f"{new}+{cached}" for new, cached in SHAPES), help="new+cached")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    shapes = [tuple(int(number) for number in text.split("+")) for text in args.shapes.split(",")]
    spec = resolve_model(args.model)
    most = max(new + cached for new, cached in shapes)
    pool, view = pool_of(spec, args.sequences * (most + 16), args.device)
    num_rows = args.sequences * max(new for new, _ in shapes)
    paged, merged = (backend(spec, view, num_rows, merged=choice) for choice in (False, True))
    name = args.model.removeprefix("random:")
    for new, cached in shapes:
        step = chunk_step(new, cached, args.sequences, view.layout.page_size)
        one, two = (seconds_of(each, spec, view, step, args.repeats) for each in (paged, merged))
        say(
            f"{name} attention of {args.sequences} chunks of {new} behind {cached}, merged",
            f"{two * 1e3:.2f} ms",
            f"{two / one:.2f} of one paged call ({one * 1e3:.2f} ms)",
        )
    del view, paged, merged
    pool.close()


if __name__ == "__main__":
    main()
