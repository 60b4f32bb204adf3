"""Checks, when a model is loaded, which same-bits rule holds on this machine, and names its numerics.

Same bits: a row's result must not depend on how many rows are computed with it. Whether that holds is a property of the
libraries' kernels for this processor, shapes and dtype, so it is tested on the loaded layers themselves:

    any      calls of any number of rows agree (native kernels)
    rows4    calls of any multiple of four rows agree (packed or plain kernels)
    tile16   only calls of one fixed number of rows agree: linears run in tiles of 16 rows
    varies   neither: results are right, but may differ in the last bit with the batch

The fingerprint ends in a hash of the results themselves: workers with equal fingerprints have equal bits.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore.layout import KVLayout
from nodes.model_spec import ModelSpec
from nodes.models.parts import Experts, Gated, Linear, parts_of
from nodes.worker.attention.base import AttentionBackend, Span
from nodes.worker.attention.torch_paged import SPLIT, TorchPagedAttention
from nodes.worker.ops.torch.host_network import TorchNetwork
from nodes.worker.pool.view import PoolView

Rule = Literal["any", "rows4", "tile16", "varies"]
TILE_ROWS: Final = 16

_NUM_ROWS: Final = 64
"""Enough for every kind of call in `_PARTS`; a library that changes kernels at more rows is not found out."""
_NUM_HEAD_ROWS: Final = 16
"""Fewer, as the head's product is a model's largest (vocabulary times hidden size), and is computed at every load."""
_PARTS: Final = ((0, 4), (4, 12), (12, 32), (28, 64), (16, 64), (60, 64))
_NUM_POSITIONS: Final = 3 * SPLIT + 9
"""Three whole splits and a part of a fourth: edges within splits, between them, and at the end."""


class Numerics(NamedTuple):
    """Two workers have equal `fingerprint`s exactly if they compute equal bits (as far as the check's probes see)."""

    rule: Rule
    fingerprint: str


def check_torch(
    spec: ModelSpec, network: TorchNetwork, attention: TorchPagedAttention, rule: Rule, num_threads: int
) -> Numerics:
    """The rule and fingerprint of the loaded layers and of `attention`. Raises what `check_numerics` raises."""

    def tried() -> list[tuple[bool, Tensor]]:
        return [*_linear_results(spec, network), *_attention_results(attention, network.dtype)]

    return check_numerics(tried, rule, numbers_of(spec, network.dtype), network.kernels, num_threads)


def numbers_of(spec: ModelSpec, dtype: torch.dtype) -> str:
    """The numbers that are computed with: `bfloat16`, or `bfloat16-int8` if weights were rounded."""
    name = str(dtype).removeprefix("torch.")
    return name if spec.quantization == "none" else f"{name}-{spec.quantization}"


def check_numerics(
    tried: Callable[[], list[tuple[bool, Tensor]]],
    rule: Rule,
    numbers: str,
    kernels: str,
    num_threads: int,
    set_threads: Callable[[int], None] = torch.set_num_threads,
) -> Numerics:
    """Test with one thread and with `num_threads` whether `rule` holds. Takes some tens of milliseconds.

    `tried` runs the probes and returns for each whether the rule held, and the result.
    """
    try:
        set_threads(1)
        alone = tried()
    finally:
        set_threads(num_threads)
    results = tried()
    holds = all(same for same, _ in alone + results)
    holds = holds and all(torch.equal(a, b) for (_, a), (_, b) in zip(alone, results, strict=True))
    digest = hashlib.blake2b(digest_size=8)
    for _, whole in results:
        digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
    found: Rule = rule if holds else "varies"
    isa = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()
    return Numerics(found, f"torch-{torch.__version__}/{isa}/{numbers}/{kernels}/{found}/{digest.hexdigest()}")


def _linear_results(spec: ModelSpec, network: TorchNetwork) -> Iterator[tuple[bool, Tensor]]:
    """The first layer's products and the head's, each on rows of realistic size: of norm 1."""
    hidden = network.norm(_drawn(1, _NUM_ROWS, spec.hidden_size).to(network.dtype), network.model.norm)
    for seed, part in enumerate(parts_of((Experts, Gated, Linear), network.model.layers[0]), 2):
        if isinstance(part, Gated):
            yield _compare(partial(network.gated, by=part), hidden)
            continue
        if isinstance(part, Experts):
            yield _compare(partial(_experts, network, part), hidden)
            continue
        _, num_in = part.weights[0].shape
        rows = hidden if num_in == spec.hidden_size else _drawn(seed, _NUM_ROWS, num_in).to(network.dtype)
        yield _compare(partial(_linear, network, part), rows)
    yield _compare(partial(network.head, by=network.model.head), hidden[:_NUM_HEAD_ROWS])


def _experts(network: TorchNetwork, by: Experts, rows: Tensor) -> Tensor:
    return network.moe(rows, by, torch.zeros_like(rows))


def _linear(network: TorchNetwork, by: Linear, rows: Tensor) -> Tensor:
    """As layers call it: a product that is summed over ranks is added to hidden states."""
    return network.linear(rows, by, rows.new_zeros(rows.shape[0], by.weights[0].shape[0]) if by.is_summed else None)


def _compare(compute: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[bool, Tensor]:
    whole = compute(rows)
    parts = [(a, b) for a, b in _PARTS if b <= rows.shape[0]]
    return all(torch.equal(compute(rows[a:b].contiguous()), whole[a:b]) for a, b in parts), whole


def _attention_results(attention: TorchPagedAttention, dtype: torch.dtype) -> Iterator[tuple[bool, Tensor]]:
    """One sequence: whole, in chunks, and its last positions as single rows beside other sequences."""
    layout, num_heads = attention.layout, attention.num_heads
    shape = (_NUM_POSITIONS, layout.num_kv_heads, layout.head_dim)
    q = _drawn(3, _NUM_POSITIONS, num_heads, layout.head_dim)
    k, v = _drawn(4, *shape).to(dtype).to(torch.float32), _drawn(5, *shape).to(dtype)
    num_pages = layout.num_pages_for(_NUM_POSITIONS)

    def attend(over: AttentionBackend, *rows_of: tuple[int, int, int]) -> Tensor:
        """Rows `begin .. end-1` of copies of the sequence: (copy, begin, end)."""
        spans = [
            Span(begin, end, np.arange(1 + copy * num_pages, 1 + (copy + 1) * num_pages, dtype=np.int32))
            for copy, begin, end in rows_of
        ]
        rows = torch.cat([torch.arange(begin, end) for _, begin, end in rows_of])
        return over.attend(0, over.plan(spans), q[rows], k[rows], v[rows])[: rows.shape[0]]

    whole = attend(attention.over(_scratch(layout, num_pages)), (0, 0, _NUM_POSITIONS))
    over = attention.over(_scratch(layout, 3 * num_pages))
    edges = [0, 37, 64, 150, _NUM_POSITIONS - 1]
    same = all(torch.equal(attend(over, (0, a, b)), whole[a:b]) for a, b in pairwise(edges))
    ends = [_NUM_POSITIONS, 130, 64]
    for copy, end in enumerate(ends[1:], 1):
        attend(over, (copy, 0, end - 1))
    single = attend(over, *((copy, end - 1, end) for copy, end in enumerate(ends)))
    yield same and all(torch.equal(single[i], whole[end - 1]) for i, end in enumerate(ends)), whole


def _scratch(layout: KVLayout, num_pages: int) -> PoolView:
    layout = KVLayout(
        num_layers=1,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        page_size=layout.page_size,
    )
    return PoolView(bytearray((num_pages + 1) * layout.page_bytes), layout)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
