"""Checks, when a model is loaded, which same-bits rule holds on this machine, and names its numerics.

Same bits: a row's result must not depend on how many rows are computed with it. Whether that holds is a property of the
libraries' kernels for this processor, shapes and dtype, so it is tested on layers of the model's shapes, one of each
kind that it has. Their weights are drawn, not the model's: numerics say how is computed, not what with.

    any      calls of any number of rows agree (native kernels)
    rows4    calls of any multiple of four rows agree (packed or plain kernels)
    tile16   only calls of one fixed number of rows agree: linears run in tiles of 16 rows
    varies   neither: results are right, but may differ in the last bit with the batch

The fingerprint ends in a hash of the results themselves: workers of one model (`ModelSpec.fingerprint`) with equal
ones have equal bits.
"""

import hashlib
import platform
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Final, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from nodes.model_spec import ModelSpec
from nodes.models.decoder import Decoder
from nodes.models.encoder import Encoder
from nodes.models.parts import Activated, Experts, Gated, Linear, parts_of
from nodes.protocol.steps import Open
from nodes.request import Sampling
from nodes.worker.ops.torch.attention import SPLIT, TorchAttention
from nodes.worker.ops.torch.batch import host_batch, pack, unpack
from nodes.worker.ops.torch.hidden import Hidden, Value
from nodes.worker.ops.torch.kinds import AttentionKind
from nodes.worker.ops.torch.network import DeviceNetwork, rows_of
from nodes.worker.parallel.collectives import Collectives
from nodes.worker.pool.view import PoolView
from nodes.worker.steps.sequence_table import OpenSequence
from nodes.worker.steps.step import Rows, RunnableStep

Rule = Literal["any", "rows4", "tile16", "varies"]
TILE_ROWS: Final = 16

_NUM_ROWS: Final = 64
"""Enough for every kind of call in `_PARTS`; a library that changes kernels at more rows is not found out."""
_NUM_HEAD_ROWS: Final = 16
"""Fewer, as the head's product is a model's largest (vocabulary times hidden size), and is computed at every load."""
_PARTS: Final = ((0, 4), (4, 12), (12, 32), (28, 64), (16, 64), (60, 64))
_PANEL_ROWS: Final = 64
"""Of a head; native kernels compute fewer rows at once."""
_NUM_POSITIONS: Final = 3 * SPLIT + 9
"""Three whole splits and a part of a fourth: edges within splits, between them, and at the end."""


class Numerics(NamedTuple):
    """Two workers of one model have equal `fingerprint`s exactly if they compute equal bits, as far as probes see."""

    rule: Rule
    fingerprint: str


def drawn_model(spec: ModelSpec, most_words: int = 0) -> ModelSpec:
    """A model of random weights that computes as `spec` does, with one layer of each kind that `spec` has.

    With `most_words` its vocabulary has at most so many whole panels of the head, and what `spec` has beside those.
    """
    kinds = [*dict.fromkeys((i in spec.sliding_layers, i in spec.dense_layers) for i in range(spec.num_layers))]
    num_words = most_words + spec.vocab_size % _PANEL_ROWS if most_words else spec.vocab_size
    return msgspec.structs.replace(
        spec,
        source="random",
        seed=0,
        num_layers=len(kinds),
        sliding_layers=tuple(i for i, (slides, _) in enumerate(kinds) if slides),
        dense_layers=tuple(i for i, (_, is_dense) in enumerate(kinds) if is_dense),
        vocab_size=min(spec.vocab_size, num_words),
        weight_files=(),
        weights=None,
        pooling=None,
    )


def check_torch(
    spec: ModelSpec, network: DeviceNetwork, attention: TorchAttention, rule: Rule, num_threads: int
) -> Numerics:
    """The rule and fingerprint of a network of `drawn_model` and of `attention`, the same at all ranks of a group.

    Raises what `check_numerics` raises.
    """

    def tried() -> list[tuple[bool, Tensor]]:
        return [
            *_linear_results(spec, network),
            *_attention_results(attention, network.dtype, sees_all=spec.is_encoder),
        ]

    kernels, collectives = network.product_kernels, network.collectives
    # The sums over the inner dimension are cut differently.
    kernels += "" if collectives is None else f"-tp{collectives.size}"
    return check_numerics(tried, rule, numbers_of(spec, network.dtype), kernels, num_threads, collectives=collectives)


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
    collectives: Collectives | None = None,
) -> Numerics:
    """Test with one thread and with `num_threads` whether `rule` holds. Takes some tens of milliseconds.

    `tried` runs the probes and returns for each whether the rule held, and the result. With `collectives` the rule
    holds only if it does at every rank, and each rank's results are in the fingerprint of all.
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
    if collectives is not None:
        own = torch.tensor([[float(holds), *digest.digest()]], dtype=torch.float32)
        every = collectives.all_gather(own).view(collectives.size, -1)
        holds = bool(every[:, 0].min())
        digest = hashlib.blake2b(every.numpy().tobytes(), digest_size=8)
    found: Rule = rule if holds else "varies"
    isa = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()
    return Numerics(found, f"torch-{torch.__version__}/{isa}/{numbers}/{kernels}/{found}/{digest.hexdigest()}")


def _linear_results(spec: ModelSpec, network: DeviceNetwork) -> Iterator[tuple[bool, Tensor]]:
    """The products of each layer and of the head, if there is one, each on rows of realistic size: of norm 1."""
    model, drawn = network.model, _drawn(1, _NUM_ROWS, spec.hidden_size).to(network.dtype)
    if isinstance(model, Encoder):
        yield _compare(partial(network.layer_norm, by=model.embedding_norm), drawn)
        hidden = rows_of(network.layer_norm(drawn, model.embedding_norm))
    else:
        assert isinstance(model, Decoder), "a model is one or the other"
        hidden = rows_of(network.norm(drawn, model.norm))
    for seed, part in enumerate(parts_of((Experts, Gated, Activated, Linear), model.layers), 2):
        if isinstance(part, Gated | Activated):
            compute = (
                partial(network.gated, by=part) if isinstance(part, Gated) else partial(network.activated, by=part)
            )
            yield _compare(compute, hidden)
            continue
        if isinstance(part, Experts):
            yield _compare(partial(_experts, network, part), hidden)
            continue
        num_in = network.depths[part.name]
        rows = hidden if num_in == spec.hidden_size else _drawn(seed, _NUM_ROWS, num_in).to(network.dtype)
        yield _compare(partial(network.linear, by=part), rows)
    if isinstance(model, Decoder):
        yield _compare(partial(network.head, by=model.head), hidden[:_NUM_HEAD_ROWS])


def _experts(network: DeviceNetwork, by: Experts, rows: Tensor) -> Value:
    return network.moe(rows, by, Hidden(torch.zeros_like(rows)))


def _compare(compute: Callable[[Tensor], Value], rows: Tensor) -> tuple[bool, Tensor]:
    whole = rows_of(compute(rows))
    parts = [(a, b) for a, b in _PARTS if b <= rows.shape[0]]
    # All of them, whatever the first gives: ranks take part in each other's sums.
    found = [torch.equal(rows_of(compute(rows[a:b].contiguous())), whole[a:b]) for a, b in parts]
    return all(found), whole


def _attention_results(
    attention: TorchAttention, dtype: torch.dtype, *, sees_all: bool
) -> Iterator[tuple[bool, Tensor]]:
    """One sequence: whole, in chunks, and its last positions as single rows beside other sequences.

    With `sees_all`, which has no chunks, three: alone and together.
    """
    layout, num_heads = attention.pool.layout, attention.num_heads
    shape = (_NUM_POSITIONS, layout.num_kv_heads, layout.head_dim)
    q = _drawn(3, _NUM_POSITIONS, num_heads, layout.head_dim).to(dtype)
    k, v = (_drawn(seed, *shape).to(dtype) for seed in (4, 5))
    num_pages = layout.num_pages_for(_NUM_POSITIONS)
    nobody = OpenSequence(Open(0, 0, 1, Sampling()))
    layout = msgspec.structs.replace(layout, num_layers=1)
    pool = PoolView(bytearray((3 * num_pages + 1) * layout.page_bytes), layout)
    over = TorchAttention(pool, num_heads, [AttentionKind(sees_all=sees_all)])
    pages = array("i", range(1, 1 + 3 * num_pages))

    def attend(*rows: tuple[int, int, int]) -> Tensor:
        """Rows `begin .. end-1` of copies of the sequence: (copy, begin, end)."""
        copies, starts, ends = zip(*rows, strict=True)
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        offsets = list(accumulate(counts[:-1], initial=0))
        columns = Rows([nobody] * len(rows), starts, counts, offsets, [copy * num_pages for copy in copies])
        batch = host_batch(RunnableStep(0, columns, array("i", bytes(4 * sum(counts))), pages), layout.page_size)
        over.plan(batch, unpack(torch.from_numpy(pack(batch)), batch.num_rows, len(batch.sampled)))
        taken = torch.from_numpy(batch.positions)
        return over.attend(0, q[taken], k[taken], v[taken])

    whole = attend((0, 0, _NUM_POSITIONS))
    if sees_all:
        ends = (_NUM_POSITIONS, 37, 64)
        alone = torch.cat([attend((0, 0, end)) for end in ends])
        yield torch.equal(attend(*((copy, 0, end) for copy, end in enumerate(ends))), alone), alone
        return
    edges = [0, 37, 64, 150, _NUM_POSITIONS - 1]
    same = all(torch.equal(attend((1, a, b)), whole[a:b]) for a, b in pairwise(edges))
    ends = [_NUM_POSITIONS, 130, 64]
    attend((2, 0, 63))
    single = attend(*((1 + (end == 64), end - 1, end) for end in ends))
    yield same and all(torch.equal(single[i], whole[end - 1]) for i, end in enumerate(ends)), whole


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
