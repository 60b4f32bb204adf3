"""FlashInfer's own Python over kernels that are played by torch: what it checks, computes and hands to its modules.

Needs flashinfer-python installed, no GPU: the wrappers and their plans are the real ones, the compiled modules are not.
"""

import contextlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nodes.worker.cuda.flashinfer_backend import FlashInferAttention, load_flashinfer
from nodes.worker.cuda.graphs import padding_batch
from nodes.worker.ops.torch.attention import TorchAttention
from nodes.worker.ops.torch.batch import DeviceBatch, pack, unpack
from tests.nodes.worker.cuda import fake_flashinfer
from tests.nodes.worker.cuda.attention_cases import KINDS, MIXED, Shape, attend, batch_of, random_pool, rows_of
from tests.nodes.worker.cuda.fake_flashinfer import _attend

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="needs flashinfer"),
    pytest.mark.filterwarnings("default"),
]


class PlayedModule:
    """A compiled module: `plan` is told everything on the host, the kernels find the same on the device."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *args: Any) -> dict[str, Any]:
        assert all(x.device.type == "cpu" for x in args if isinstance(x, Tensor))
        self.plans.append(args[3:])
        if isinstance(args[5], Tensor):
            query_indptr, kv_indptr, kv_lens = args[3:6]
            return {"query_indptr": query_indptr.clone(), "kv_indptr": kv_indptr.clone(), "kv_lens": kv_lens.clone()}
        return {"kv_indptr": args[3].clone()}

    def paged_run(self, *args: Any) -> None:
        _, _, plan, q, keys, values, query_indptr, kv_indptr, indices, last, out, lse, mask, layout, window_left = args[
            :15
        ]
        assert layout == 0
        assert lse is None
        assert torch.equal(query_indptr, plan["query_indptr"])
        assert torch.equal(kv_indptr, plan["kv_indptr"])
        lengths = (kv_indptr.diff() - 1).clamp(min=0) * keys.shape[1] + last
        assert torch.equal(torch.where(kv_indptr.diff() > 0, lengths, 0), plan["kv_lens"])
        for i, length in enumerate(plan["kv_lens"].tolist()):
            rows = slice(int(query_indptr[i]), int(query_indptr[i + 1]))
            pages = indices[kv_indptr[i] : kv_indptr[i + 1]]
            k, v = (part[pages].flatten(0, 1)[:length] for part in (keys, values))
            out[rows] = _attend(q[rows], k, v, causal=mask == 1, window_left=window_left)

    def run(self, *args: Any) -> None:
        """Decode without tensor cores."""
        _, _, plan, q, keys, values, kv_indptr, indices, last, out, lse, layout, window_left = args[:13]
        lengths = plan["kv_indptr"].diff().sub(1).mul(keys.shape[1]).add(last)
        numbers = torch.arange(len(q) + 1, dtype=torch.int32)
        plan = {"kv_indptr": plan["kv_indptr"], "query_indptr": numbers, "kv_lens": lengths}
        self.paged_run(0, 0, plan, q, keys, values, numbers, kv_indptr, indices, last, out, lse, 0, layout, window_left)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """FlashInfer with its real wrappers and everything else from the fake; `module` is what they compile and load."""
    real = load_flashinfer()
    module = PlayedModule()
    decode, prefill = (importlib.import_module(f"flashinfer.{name}") for name in ("decode", "prefill"))
    for file in (decode, prefill):
        monkeypatch.setattr(file, "get_batch_prefill_module", lambda *_: module)
        monkeypatch.setattr(file, "device_support_pdl", lambda _: False)
    monkeypatch.setattr(decode, "get_batch_decode_module", lambda *_: module)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    wrappers = {name: getattr(real, name) for name in dir(fake_flashinfer) if name.startswith("Batch")}
    append = fake_flashinfer.append_paged_kv_cache
    return SimpleNamespace(
        **wrappers, append_paged_kv_cache=append, fast_decode_plan=real.fast_decode_plan, module=module
    )


def near(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a.float(), b.float(), atol=0.02, rtol=0.02) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_of_every_kind(played: SimpleNamespace, heads: tuple[int, int], deterministic: bool) -> None:
    view = random_pool(*heads, 64, "bfloat16")
    for shapes in (MIXED, MIXED[:1], [Shape(40, 1)], [Shape(0, 9)]):
        batch = batch_of(shapes)
        q, k, v = rows_of(batch, heads[0], view.layout, torch.bfloat16)
        expected = attend(TorchAttention(view, heads[0], KINDS), batch, q, k, v, KINDS)
        fast = FlashInferAttention(played, view, heads[0], 400, KINDS, deterministic=deterministic)
        assert near(attend(fast, batch, q, k, v, KINDS), expected)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_steps(played: SimpleNamespace, heads: tuple[int, int], deterministic: bool) -> None:
    """The quick plan hands to the module what the whole one does, but for where tensors lie."""
    view = random_pool(*heads, 64, "bfloat16")
    fast = FlashInferAttention(played, view, heads[0], 400, KINDS, deterministic=deterministic)
    whole = FlashInferAttention(
        SimpleNamespace(**{**vars(played), "fast_decode_plan": None}), view, heads[0], 400, KINDS,
        deterministic=deterministic,
    )  # fmt: skip
    buckets = []
    for attention in (fast, whole):
        static = unpack(torch.zeros(6 * 4 + 64, dtype=torch.int32), 4, 4)
        bucket = attention.for_bucket(4, static)
        bucket.plan(padding_batch(4), static._replace(indices=torch.zeros(4, dtype=torch.int32)))
        buckets.append((bucket, static))
    oracle = TorchAttention(view, heads[0], KINDS)
    for seed, lengths in enumerate([(0, 36, 37), (100, 16, 15), (70, 1, 50)]):
        batch = batch_of([Shape(length, 1) for length in lengths], seed).padded(4)
        q, k, v = rows_of(batch, heads[0], view.layout, torch.bfloat16, seed=seed)
        expected = attend(oracle, batch, q, k, v, KINDS)
        told = []
        for bucket, static in buckets:
            arrays: DeviceBatch = unpack(torch.from_numpy(pack(batch)), batch.num_rows, len(batch.sampled))
            for name in ("write_pages", "write_offsets"):
                getattr(static, name).copy_(getattr(arrays, name))
            before = len(played.module.plans)
            bucket.plan(batch, arrays)
            told.append(played.module.plans[before:])
            found = [bucket.attend(layer, q, k, v) for layer in range(2)]
            assert near(found, expected)
        assert len(told[0]) == len(told[1]) == 2
        for quick, slow in zip(*told, strict=True):
            assert len(quick) == len(slow)
            assert all(same(a, b) for a, b in zip(quick, slow, strict=True))


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
